"""How layers are put into groups, and what memory they share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_cb.attention.step import LayerSpec
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.kv_layout import KVLayout

FULL = LayerSpec(4, 2, 8, 8, torch.float32, torch.device("cpu"), 1.0)
NEAR = dataclasses.replace(FULL, window=16)
CHUNKED = dataclasses.replace(FULL, chunk=32)


@pytest.mark.parametrize(
    ("specs", "sizes", "reaches"),
    [
        pytest.param([FULL] * 5, [5], [(None, None)], id="all see everything"),
        pytest.param([NEAR] * 5, [5], [(16, None)], id="all have the window"),
        pytest.param([NEAR, FULL] * 3, [3, 3], [(None, None), (16, None)], id="in turns"),
        pytest.param([*[CHUNKED] * 3, FULL] * 4, [4] * 4, [(None, None), *[(None, 32)] * 3], id="three in four"),
        pytest.param([*[NEAR] * 5, FULL] * 4 + [NEAR] * 2, [4] * 6 + [2], [(None, None), *[(16, None)] * 6], id="gemma 3"),
        pytest.param([*[NEAR] * 4, FULL], [1] * 5, [(None, None), *[(16, None)] * 4], id="a single one"),
    ],
)
def test_groups(specs: list[LayerSpec], sizes: list[int], reaches: list[tuple[int | None, int | None]]) -> None:
    layout = KVLayout.of(specs)
    assert [len(group) for group in layout.groups] == sizes
    assert list(layout.reaches) == reaches
    assert sorted(layer for group in layout.groups for layer in group) == list(range(len(specs)))
    for group, reach in zip(layout.groups, layout.reaches, strict=True):
        assert {(specs[layer].window, specs[layer].chunk) for layer in group} == {reach}
    least = sum(spec.bytes_per_token for spec in specs)
    assert least <= layout.bytes_per_token(specs) <= 1.1 * least


def test_layers_of_different_forms_are_one_group() -> None:
    layout = KVLayout.of([NEAR, dataclasses.replace(FULL, head_size=16)])
    assert layout.groups == ((0, 1),)
    assert layout.reaches == ((None, None),)


def test_groups_share_tensors() -> None:
    specs = [NEAR, FULL] * 3
    cache = KVCache(specs, 10, 4, KVLayout.of(specs))
    assert len(cache.tensors) == 3
    assert len(cache.layers) == 6
    assert [cache.layers[i].k is cache.tensors[i // 2].k for i in range(6)] == [True] * 6
