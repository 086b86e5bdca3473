"""What plain `generate()` gives for each row alone: the truth that the engine must repeat token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import crowd
import models
import torch
from clear_rows import clear_row
from transformers import PreTrainedModel

from hf_cb import Engine, GenerationHandle

LENGTHS = ((1, 13), (40, 9), (5, 20), (17, 12), (9, 16), (26, 8), (2, 18), (33, 11))
"""(prompt, output) tokens of each row: some shorter, some longer than a window or a chunk."""


@dataclass(frozen=True)
class Row:
    prompt: torch.Tensor  # [1, n] int64
    tokens: list[int]

    @property
    def full(self) -> torch.Tensor:
        """[1, n + m]: prompt and output."""
        return torch.cat([self.prompt, torch.tensor([self.tokens])], dim=1)


@models.once
def model(name: str) -> PreTrainedModel:
    return models.tiny(name)


@models.once
def rows(name: str, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> tuple[Row, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(Row(*clear_row(model(name), length, new, generator)) for length, new in lengths)


def submit(engine: Engine, rows: Iterable[Row], **options: Any) -> list[GenerationHandle]:
    """Ask for as many tokens as each row has."""
    return [engine.submit(row.prompt[0], **{"max_new_tokens": len(row.tokens), **options}) for row in rows]


def results(handles: Iterable[GenerationHandle]) -> list[list[int]]:
    """Their tokens, once all have ended."""
    return [list(handle.result().tokens) for handle in handles]


def tokens(rows: Iterable[Row]) -> list[list[int]]:
    return [row.tokens for row in rows]


def plain(model: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    """The new tokens of the model's own generate, whatever is installed on it."""
    mask = torch.ones_like(prompt)  # else what looks like padding in it would be masked
    out = type(model).generate(model, prompt, attention_mask=mask, max_new_tokens=max_new_tokens)
    return out[0, prompt.shape[1] :].tolist()


def prompts(*lengths: int) -> list[torch.Tensor]:
    """Random ones [1, n], the same every time, for models without rows here."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in lengths]


class Calls:
    """Calls of generate with so long prompts, for so many new tokens each. What they return is prompt and output."""

    def __init__(self, sizes: Iterable[tuple[int, int]]) -> None:
        lengths, new = zip(*sizes, strict=True)
        self.pairs = list(zip(prompts(*lengths), new, strict=True))

    def one_by_one(self, generate: Callable[..., torch.Tensor], **options: Any) -> list[list[int]]:
        return [generate(prompt, max_new_tokens=n, **options)[0].tolist() for prompt, n in self.pairs]

    def plain(self, model: PreTrainedModel, **options: Any) -> list[list[int]]:
        return self.one_by_one(lambda *args, **more: type(model).generate(model, *args, **more), **options)

    def at_once(self, engine: Engine, model: PreTrainedModel, **options: Any) -> list[list[int]]:
        calls = [lambda p=p, n=n: model.generate(p, max_new_tokens=n, **options)[0].tolist() for p, n in self.pairs]
        return crowd.answers(engine, calls)

    def assert_right(self, engine: Engine, model: PreTrainedModel, times: int = 1, **options: Any) -> None:
        """All at once, so many times, they are answered as plain generate answers them one by one."""
        want = self.plain(model, **options)
        for _ in range(times):
            assert self.at_once(engine, model, **options) == want
