"""Rows in which every token wins clearly: a near tie would test the rounding of a sum, not the engine."""

from __future__ import annotations

import models
import torch
from transformers import PreTrainedModel

_MARGIN = 1e-3  # of the logits' standard deviation; rounding stays far below


def clear_row(
    model: PreTrainedModel, length: int, max_new_tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[int]]:
    """A random prompt [1, n] without the pad id, from which generate would infer a mask, and what plain generate gives."""
    while True:
        prompt = torch.randint(3, models.VOCAB, (1, length), generator=generator)
        out = model.generate(prompt, max_new_tokens=max_new_tokens, output_logits=True, return_dict_in_generate=True)
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        if ((best[:, 0] - best[:, 1]) / logits.std(-1)).min() > _MARGIN:
            return prompt, out.sequences[0, -max_new_tokens:].tolist()
