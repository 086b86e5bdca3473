"""What plain `generate()` gives for each row alone: the truth that the engine must repeat token by token."""

from __future__ import annotations

from dataclasses import dataclass

import models
import torch
from transformers import PreTrainedModel

LENGTHS = ((1, 13), (40, 9), (5, 20), (17, 12), (9, 16), (26, 8), (2, 18), (33, 11))
"""(prompt, output) tokens of each row: some shorter, some longer than a window or a chunk."""

_MARGIN = 1e-3  # of the logits' standard deviation; rounding stays far below


@dataclass(frozen=True)
class Row:
    prompt: torch.Tensor  # [1, n] int64, without the pad id, from which generate would infer a mask
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
    return tuple(_row(name, length, max_new_tokens, generator) for length, max_new_tokens in lengths)


def _row(name: str, length: int, max_new_tokens: int, generator: torch.Generator) -> Row:
    """A random row in which every token wins clearly: a near tie would test the rounding of a sum, not the engine."""
    while True:
        prompt = torch.randint(3, models.VOCAB, (1, length), generator=generator)
        out = model(name).generate(prompt, max_new_tokens=max_new_tokens, output_logits=True, return_dict_in_generate=True)
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        if ((best[:, 0] - best[:, 1]) / logits.std(-1)).min() > _MARGIN:
            return Row(prompt, out.sequences[0, -max_new_tokens:].tolist())
