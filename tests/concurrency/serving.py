"""Rows with their true tokens, a gate before the engine's steps, and threads whose errors are seen."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import inside
import models
import pytest
import torch
from clear_rows import clear_row
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_cb import Engine, GenerationHandle
from hf_cb.core.output import SchedulerOutput, StepResult

T = TypeVar("T")

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 4096}
LONG = 4000  # output tokens: for requests that must not end by themselves while a test looks on


@dataclass(frozen=True)
class Row:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # what plain generate gives

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether these are the first true tokens, as far as we know them."""
        return tuple(tokens)[: len(self.tokens)] == self.tokens[: len(tokens)]

    @property
    def ids(self) -> torch.Tensor:
        """[1, n] int64."""
        return torch.tensor([self.prompt])


def tiny_llama() -> PreTrainedModel:
    """The tiny Llama with positions for LONG tokens; the same weights as ever."""
    return models.tiny("llama", max_position_embeddings=2 * LONG)


def plain(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, seed: int | None = None, **options: Any
) -> tuple[int, ...]:
    """The output tokens of the model's own generate, whatever is installed on it; drawn from `seed`, if there is one."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        out = type(model).generate(model, torch.tensor([prompt]), max_new_tokens=max_new_tokens, **options)
    return tuple(out[0, len(prompt) :].tolist())


def ask(model: PreTrainedModel, row: Row, **options: Any) -> tuple[int, ...]:
    """The output tokens of `model.generate`, with as many asked for as `row` has."""
    out = model.generate(row.ids, max_new_tokens=len(row.tokens), **options)
    assert out[0, : len(row.prompt)].tolist() == list(row.prompt)
    return tuple(out[0, len(row.prompt) :].tolist())


@models.once
def rows(name: str = "llama", count: int = 16) -> tuple[Row, ...]:
    """Random rows of many lengths for `models.tiny(name)`."""
    model = models.tiny(name)
    generator = torch.Generator().manual_seed(2)
    return tuple(_row(model, 1 + 5 * i % 37, 6 + 7 * i % 19, generator) for i in range(count))


@models.once
def long_row() -> Row:
    """A row of the tiny Llama with a long prompt and many true tokens, though fewer than LONG."""
    return _row(models.tiny("llama"), 40, 70, torch.Generator().manual_seed(3))


def submit(engine: Engine, row: Row, **options: Any) -> GenerationHandle:
    """Ask for as many tokens as `row` has."""
    return engine.submit(row.prompt, **{"max_new_tokens": len(row.tokens), **options})


def doors(model: PreTrainedModel, engine: Engine) -> list[Callable[[], object]]:
    """Every call that asks the engine for something, or waits for it."""
    row = rows()[0]
    return [
        lambda: engine.submit(row.prompt),
        lambda: engine.generate_batch([row.prompt]),
        lambda: ask(model, row),
        lambda: engine.pause().__enter__(),
    ]


def assert_ends(handle: GenerationHandle, error: type[Exception], match: str | None = None) -> None:
    """With that error for all who wait, and with the first tokens of `long_row`, if with any."""
    for wait in (handle.result, lambda: list(handle)):
        with pytest.raises(error, match=match):
            wait()
    assert long_row().begins_with(handle.tokens)


def submit_long(engine: Engine, **options: Any) -> GenerationHandle:
    """Ask for LONG tokens, of which those of `long_row` come first."""
    return submit(engine, long_row(), max_new_tokens=LONG, **options)


def _row(model: PreTrainedModel, length: int, max_new_tokens: int, generator: torch.Generator) -> Row:
    prompt, tokens = clear_row(model, length, max_new_tokens, generator)
    return Row(tuple(prompt[0].tolist()), tuple(tokens))


class Recorder(BaseStreamer):
    """Keeps what it is given, and which thread gave it; calls `at_third` at the third token."""

    def __init__(self, at_third: Callable[[], None] = lambda: None) -> None:
        self.puts: list[list[int]] = []
        self.threads: set[threading.Thread] = set()
        self.ended = 0
        self._at_third = at_third

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        self.threads.add(threading.current_thread())
        if len(self.puts) == 4:  # the first is the prompt
            self._at_third()

    def end(self) -> None:
        self.ended += 1

    def assert_whole(self, row: Row) -> None:
        """It was given the prompt, each token by itself, and the end."""
        assert self.puts == [list(row.prompt), *([token] for token in row.tokens)]
        assert self.ended == 1


class Gate:
    """Stands before every step of an engine and lets none through until told, so that a test acts at a known moment.

    As a context manager it stays open afterwards.
    """

    def __init__(self, engine: Engine) -> None:
        runner = inside.runner(engine)
        self._execute = runner.execute
        self._changed = threading.Condition()
        self._allowed: float = 0
        self._standing: SchedulerOutput | None = None
        runner.execute = self._pass

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.let(math.inf)

    def let(self, steps: float) -> None:
        """Let this many more steps through."""
        with self._changed:
            self._allowed = steps
            self._changed.notify_all()

    def arrival(self) -> SchedulerOutput:
        """Wait until a step stands at the shut gate, and return it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._standing is not None and self._allowed == 0, timeout=10)
            assert self._standing is not None
            return self._standing

    def after(self, steps: float) -> SchedulerOutput:
        """Let this many more steps through, and return the one that stands at the gate then."""
        self.let(steps)
        return self.arrival()

    def act(self, call: Callable[[], object]) -> None:
        """Let the engine's thread make this call before the step that stands here, and all steps through."""
        execute = self._execute

        def call_back(output: SchedulerOutput) -> StepResult:
            self._execute = execute
            call()
            return execute(output)

        self._execute = call_back
        self.let(math.inf)

    def when(self, condition: Callable[[], object]) -> Callable[[], None]:
        """A call that lets all steps through as soon as `condition` holds."""

        def let() -> None:
            wait_until(condition)
            self.let(math.inf)

        return let

    def _pass(self, output: SchedulerOutput) -> StepResult:
        with self._changed:
            self._standing = output
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed > 0)
            self._allowed -= 1
            self._standing = None
        return self._execute(output)


def together(calls: Sequence[Callable[[], T]], timeout: float = 15) -> list[T | BaseException]:
    """Run every call in a thread of its own, starting at once; what each returned or raised. Fails if one takes too long."""
    start = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    # Daemons: one that hangs must not keep pytest from ending.
    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    hanging = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"calls {hanging} have not ended; the others: {results}"
    return results


def wait_until(condition: Callable[[], object], timeout: float = 5) -> None:
    """Return as soon as `condition` holds; fail if it does not within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.001)
