"""The tiny models show faults: without this, equal tokens would prove little."""

from __future__ import annotations

from collections.abc import Iterable

import models
import pytest
import torch
import truth
from transformers import DynamicCache, PreTrainedModel

SPAN = 4  # tokens: a block of the cache
FEATURES = {
    name: option
    for name, values in models.SERVED.items()
    for option in ("sliding_window", "attention_chunk_size")
    if option in values
}
"""Per model, the config value that makes its window or chunk."""


def changed(row: truth.Row, logits: torch.Tensor) -> bool:
    """Whether greedy decoding by `logits` [1, n, vocab], those of the row's last tokens, would leave the true tokens."""
    return bool(logits[0, -len(row.tokens) - 1 : -1].argmax(-1).tolist() != row.tokens)


def most(faults: Iterable[bool]) -> bool:
    seen = list(faults)
    return 2 * sum(seen) > len(seen)


@torch.no_grad()
def packed(model: PreTrainedModel, rows: list[truth.Row]) -> torch.Tensor:
    """Logits of rows packed into one sequence, positions starting anew at each, with nothing to separate them."""
    ids = torch.cat([row.full for row in rows], dim=1)
    positions = torch.cat([torch.arange(row.full.shape[1]) for row in rows])[None]
    # With a mask, transformers does not look for packed sequences in the positions.
    return model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits


@torch.no_grad()
def cached(model: PreTrainedModel, rows: list[truth.Row], swap: bool) -> list[torch.Tensor]:
    """Logits of each row's outputs over its prompt's cache; with `swap`, a span of every row's cache is the next row's."""
    caches = [DynamicCache(config=model.config) for _ in rows]
    for row, cache in zip(rows, caches, strict=True):
        model(input_ids=row.prompt[:, :-1], cache=cache, use_cache=True)
    if swap:
        for layer in range(len(caches[0].layers)):
            for part in ("keys", "values"):
                tensors = [getattr(cache.layers[layer], part) for cache in caches]
                spans = [tensor[:, :, -SPAN:].clone() for tensor in tensors]
                for tensor, span in zip(tensors, spans[1:] + spans[:1], strict=True):
                    tensor[:, :, -SPAN:] = span
    return [
        model(input_ids=row.full[:, row.prompt.shape[1] - 1 :], cache=cache, use_cache=True).logits
        for row, cache in zip(rows, caches, strict=True)
    ]


@pytest.mark.parametrize("name", models.SERVED)
def test_a_wrong_mask_changes_the_tokens(name: str) -> None:
    model, rows = truth.model(name), truth.rows(name)
    assert not any(changed(row, packed(model, [row])) for row in rows)
    assert most(changed(row, packed(model, [other, row])) for other, row in zip(rows[1:] + rows[:1], rows, strict=True))


# A state is no block: the rows packed above run through it, one into the other.
@pytest.mark.parametrize("name", [name for name in models.SERVED if name not in models.STATEFUL])
def test_a_swapped_block_changes_the_tokens(name: str) -> None:
    model, rows = truth.model(name), [row for row in truth.rows(name) if row.prompt.shape[1] > SPAN]
    assert not any(map(changed, rows, cached(model, rows, swap=False)))
    assert most(map(changed, rows, cached(model, rows, swap=True)))


@pytest.mark.parametrize("name", FEATURES)
def test_a_dropped_window_changes_the_tokens(name: str) -> None:
    without = models.tiny(name, **{FEATURES[name]: 512})
    longer = [row for row in truth.rows(name) if row.full.shape[1] > models.WINDOW]
    assert most(changed(row, packed(without, [row])) for row in longer)


def test_dropped_sinks_change_the_tokens() -> None:
    without = models.tiny("gpt_oss")
    with torch.no_grad():
        for layer in without.model.layers:
            layer.self_attn.sinks.fill_(-100.0)
    assert most(changed(row, packed(without, [row])) for row in truth.rows("gpt_oss"))


def test_a_dropped_softcap_changes_the_tokens() -> None:
    without = models.tiny("gemma2", attn_logit_softcapping=None)
    assert most(changed(row, packed(without, [row])) for row in truth.rows("gemma2"))


@pytest.mark.parametrize("name", models.SERVED)
def test_the_same_model_every_time(name: str) -> None:
    again = models.tiny(name).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in truth.model(name).state_dict().items())
