"""What happens while the questions are answered: a clock on every answer, and a live display of all of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from demo.report import Answer, num_tokens

_LINES, _WIDTH, _LABEL = 3, 96, 26


class Clock(BaseStreamer):
    """A streamer that notes when each answer's tokens come. `answers`: one for each row of the call, in order.

    Once `stop` is set it ends its call, by raising InterruptedError.
    """

    def __init__(self, answers: Sequence[Answer], eos_token_ids: frozenset[int], stop: threading.Event):
        self._answers = answers
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._stop.is_set():
            raise InterruptedError("the demo stops")
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        now = time.perf_counter()
        for answer, token in zip(self._answers, value.reshape(-1).tolist(), strict=True):
            if answer.finished_at is None:
                answer.first_token_at = answer.first_token_at or now
                answer.tokens.append(token)
                if token in self._eos_token_ids:
                    answer.finished_at = now

    def end(self) -> None:
        for answer in self._answers:
            answer.finished_at = answer.finished_at or time.perf_counter()


class Live:
    """Answers that are done and tokens per second; on a terminal also the latest words of a few that run."""

    def __init__(self, label: str, total: int, tokenizer: Any):
        self._label, self._total, self._tokenizer = label, total, tokenizer
        self._terminal = sys.stderr.isatty()
        self._started = time.perf_counter()

    def watch(self, futures: Sequence[Future[None]], answers: Sequence[Answer]) -> None:
        """Return when all the futures are done; raise what one of them raised. `answers` may grow meanwhile."""
        show = self._show_bars if self._terminal else self._show_line
        bars = self._make_bars() if self._terminal else []
        try:
            pending: Any = futures
            while pending:
                done, pending = wait(pending, timeout=0.2 if self._terminal else 10)
                for future in done:
                    future.result()
                show(list(answers), bars)
        finally:
            for bar in reversed(bars):
                bar.close()

    def _make_bars(self) -> list[Any]:
        form = "{desc} {bar:24} {n_fmt}/{total_fmt} answers{postfix}"
        bar = tqdm(total=self._total, desc=f"{self._label:<{_LABEL}}", bar_format=form, dynamic_ncols=True)
        return [bar, *(tqdm(bar_format="{desc}", position=1 + i, leave=False) for i in range(_LINES))]

    def _show_bars(self, answers: Sequence[Answer], bars: Sequence[Any]) -> None:
        done, speed = self._state(answers)
        bars[0].n = done
        bars[0].set_postfix_str(speed)
        running = [answer for answer in answers if answer.tokens and answer.finished_at is None]
        for i, bar in enumerate(bars[1:]):
            bar.set_description_str(self._words(running[i]) if i < len(running) else "")

    def _show_line(self, answers: Sequence[Answer], bars: Sequence[Any]) -> None:
        done, speed = self._state(answers)
        print(f"{self._label}: {done}/{self._total} answers, {speed}", file=sys.stderr)

    def _state(self, answers: Sequence[Answer]) -> tuple[int, str]:
        seconds, tokens = time.perf_counter() - self._started, num_tokens(answers)
        return sum(answer.finished_at is not None for answer in answers), f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"

    def _words(self, answer: Answer) -> str:
        text = " ".join(self._tokenizer.decode(answer.tokens[-40:], skip_special_tokens=True).split())
        return f"  {answer.number + 1:>2}│ {text[-_WIDTH:]}"
