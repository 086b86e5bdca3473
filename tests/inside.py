"""What tests see of an engine beyond its public face: they reach inside through here alone."""

from __future__ import annotations

from typing import Any

from hf_cb import Engine
from hf_cb.core.scheduler import Scheduler
from hf_cb.engine_core import EngineCore
from hf_cb.handle import OutputQueue
from hf_cb.intake import Intake
from hf_cb.request import Request
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.worker import Worker


def intake(engine: Engine) -> Intake:
    return engine._intake


def request(engine: Engine, input_ids: Any, **options: Any) -> Request:
    """A validated request, as `submit` makes one."""
    return engine._intake.make_requests([input_ids], 1, None, options)[0]


def worker(engine: Engine) -> Worker:
    """What serves it. An engine whose model can't be served has none."""
    found = engine._intake.worker
    assert found is not None
    return found


def core(engine: Engine) -> EngineCore:
    return worker(engine).core


def scheduler(engine: Engine) -> Scheduler:
    return core(engine).scheduler


def runner(engine: Engine) -> ModelRunner:
    return core(engine).runner


def cache(engine: Engine) -> KVCache:
    return core(engine).cache


def inbox(engine: Engine) -> list[Any]:
    """What waits to be taken in."""
    return list(worker(engine)._inbox)


def num_pauses(engine: Engine) -> int:
    return worker(engine)._pauses


def closing(engine: Engine) -> str | None:
    """How it is being closed: "drain" or "now"."""
    return worker(engine)._closing


def kill(engine: Engine, error: BaseException) -> None:
    """Let its thread's work end by this error."""
    worker(engine)._die(error)


def queue(handle: Any) -> OutputQueue:
    return handle._queue
