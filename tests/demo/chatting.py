"""A chat page in this process, and who may look at it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import hf_cb
from demo.chat_answers import Answers, Sampling
from demo.chat_page import CSS, build, conversation_of, theme
from demo.chat_panel import RECORDED_STEPS, Panel


@dataclass(frozen=True)
class Served:
    """A page that people can open."""

    url: str
    engine: hf_cb.Engine
    tokenizer: Any
    sampling: Sampling

    def answers_to(self, messages: Iterable[str], system: str) -> list[str]:
        """What the engine answers to these without a page."""
        prompts = [
            self.tokenizer.apply_chat_template(conversation_of(system, [], message), add_generation_prompt=True)["input_ids"]
            for message in messages
        ]
        results = self.engine.generate_batch(prompts, **self.sampling.options())
        return [self.tokenizer.decode(result.tokens, skip_special_tokens=True) for result in results]

    def is_idle(self) -> bool:
        """Nothing runs or waits, no block is held."""
        stats = self.engine.stats()
        return not (stats.running or stats.waiting or stats.blocks_used)

    @property
    def num_cancelled(self) -> int:
        return self.engine.stats().finished.get(hf_cb.FinishReason.CANCELLED, 0)


@contextlib.contextmanager
def served(model: Any, tokenizer: Any, sampling: Sampling, **config: Any) -> Iterator[Served]:
    with hf_cb.continuous_batching(model, record_steps=RECORDED_STEPS, **config) as engine:
        answers = Answers(engine, tokenizer)
        page = build(answers, Panel(engine, interval=0.1), "a model", sampling)
        _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, css=CSS, theme=theme())
        try:
            yield Served(url, engine, tokenizer, sampling)
        finally:
            page.close()
            answers.close()
            close_forgotten_loops()


def close_forgotten_loops() -> None:
    """gradio makes event loops, for the main thread too, and leaves them: whoever replaced one would be blamed for it."""
    for thing in gc.get_objects():
        if issubclass(type(thing), asyncio.BaseEventLoop) and not thing.is_running() and not thing.is_closed():
            thing.close()
    gc.collect()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 15) -> None:
    """Raise AssertionError when it doesn't come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
