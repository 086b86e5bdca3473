"""What every test runs under: one torch thread, and after each test a look for what the engines left behind.

pytest itself enables faulthandler, and pytest-timeout prints every thread's stack when a test hangs.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import models
import pytest
import torch
from transformers import PreTrainedModel

from hf_cb import worker as worker_module
from hf_cb.core.scheduler import Scheduler
from hf_cb.engine_core import EngineCore
from hf_cb.handle import OutputQueue
from hf_cb.worker import Worker

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # the models are tiny, and many tests bring threads of their own

THREAD_NAME = "hf_cb-engine"
GRACE = 5.0  # seconds in which what was told to end must have ended


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-requests", type=int, default=500, help="requests of the soak with faults")


SLOW_FOLDERS = ("benchmarks", "integrations", "demo", "gpu")
SLOW_FILES = (
    *("test_docs", "test_real_model", "test_quantised", "test_processes", "test_tensor_parallel", "test_devices"),
    *("test_packaged_server", "test_drain", "test_robustness_connections", "test_robustness_fuzz", "test_soak", "test_faults"),
    *("test_serving", "test_run", "test_close", "test_pipeline_install", "test_pipeline_flow", "test_extension", "test_peft"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes, servers or a real model is slow, and comes first: no process must be left with it at the end."""
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS or item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def llama() -> PreTrainedModel:
    """A sensitive tiny Llama, float32, of the test's own: it may change it."""
    return models.tiny("llama")


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that change the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class _Watch:
    """Notes what the engines of one test do. It holds no engine, worker or handle: a test may watch those being collected."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.before = {worker for worker in worker_module._workers if worker.is_open}  # of fixtures that outlive the test
        self.schedulers: list[Scheduler] = [worker.core.scheduler for worker in self.before]
        self.queues: list[OutputQueue] = []
        self._dead: list[Scheduler] = []  # what a dead engine held is gone with it
        init, submit, replace, die = Worker.__init__, Worker.submit, Worker.replace, Worker._die

        def note_init(worker: Worker, core: EngineCore, *args: object) -> None:
            self.schedulers.append(core.scheduler)
            init(worker, core, *args)

        def note_submit(worker: Worker, queues: Sequence[OutputQueue]) -> None:
            submit(worker, queues)
            self.queues.extend(queues)
            if len(self.queues) > 1000:  # a soak's: what has ended need not be kept
                self.queues = [queue for queue in self.queues if queue.finish_reason is None]

        def note_replace(worker: Worker, core: EngineCore) -> None:
            self.schedulers.append(core.scheduler)
            replace(worker, core)

        def note_die(worker: Worker, cause: BaseException) -> None:
            self._dead.append(worker.core.scheduler)
            die(worker, cause)

        patch.setattr(Worker, "__init__", note_init)
        patch.setattr(Worker, "submit", note_submit)
        patch.setattr(Worker, "replace", note_replace)
        patch.setattr(Worker, "_die", note_die)

    def leaks(self) -> list[str]:
        """What is wrong now, in words."""
        known = {worker._thread for worker in self.before}
        threads = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME and thread not in known]
        unresolved = [queue.request.request_id for queue in self.queues if queue.finish_reason is None]
        held = [s.memory.blocks_used for s in self._living() if s.memory.blocks_used or s.has_work]
        found = {"engine threads still run": threads, "requests never resolved": unresolved, "blocks still in use": held}
        return [f"{what}: {items}" for what, items in found.items() if items]

    def check_blocks(self) -> None:
        """The accounting of every scheduler, idle now, adds up."""
        for scheduler in self._living():
            scheduler.check()

    def close(self) -> None:
        """End what leaked, so that the next tests don't meet it."""
        for worker in set(worker_module._workers) - self.before:
            worker.close(drain=False, timeout=GRACE)

    def _living(self) -> list[Scheduler]:
        return [scheduler for scheduler in self.schedulers if not any(scheduler is dead for dead in self._dead)]


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test no engine thread runs, no request is unresolved, no block is held, and the accounting adds up."""
    with pytest.MonkeyPatch.context() as patch:
        watch = _Watch(patch)
        yield
        monkeypatch.undo()  # before ours, or it would put our notes back
    if watch.leaks():
        gc.collect()
    end = time.monotonic() + GRACE
    while (leaks := watch.leaks()) and time.monotonic() < end:
        time.sleep(0.005)
    watch.close()
    assert not leaks, "; ".join(leaks)
    watch.check_blocks()
