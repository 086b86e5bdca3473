"""CBConfig: wrong values are named at once, options merge, and what is left open is decided by plain arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_cb
from hf_cb.config import CBConfig, ModelFacts

GIB = 1 << 30
POSITIVE = ("max_batch_tokens", "max_batch_size", "block_size", "num_blocks")
WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in POSITIVE for value in (0, -1, 2.0, "5", True, [])),
    *(("pack_memory", value) for value in (-1, 2.0, "5", True)),
    *(("record_steps", value) for value in (-1, 2.0, None, "5", True)),
    *(("fallback", value) for value in ("Native", None, True, "")),
    *(("kv_cache_memory", value) for value in (0, -1, 1.0, 0.0, 2.5, -0.5, "5", "GiB", "4 gigs", "-1GiB", "", "0GB", True, [])),
    *(("swap_space", value) for value in (-1, 0.5, "5", None, True, False, [])),
    *(("max_queue_size", value) for value in (-1, 2.0, "5", True)),
    *((name, value) for name in ("queue_timeout", "target_itl_ms") for value in (0, -1, "5", True, float("nan"), float("inf"))),
    *(("kv_dtype", value) for value in ("int8", "fp8", None, torch.float16)),
    *(("policy", value) for value in ("lifo", None, 3)),
    *(("prefix_cache", value) for value in (1, "yes", None)),
    *(("overlap", value) for value in (1, "yes")),
    *(("graph_memory", value) for value in (-1, 0.5, "5", True, False, [])),
    *(("attention_backend", value) for value in (5, True, ["reference"])),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values(llama: PreTrainedModel, name: str, value: Any) -> None:
    for call in (lambda: CBConfig(**{name: value}), lambda: hf_cb.install(llama, **{name: value})):
        with pytest.raises(hf_cb.InvalidArgumentError, match=rf"^{name}: takes .*got ") as caught:
            call()
        assert repr(value) in str(caught.value)
    assert "generate" not in vars(llama)


def test_every_field_is_tested() -> None:
    assert {name for name, _ in WRONG} == {field.name for field in dataclasses.fields(CBConfig)}


def test_an_unknown_field(llama: PreTrainedModel) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^max_batch: no such field of CBConfig; it takes max_batch_tokens"):
        hf_cb.install(llama, max_batch=3)


def test_a_config_of_another_kind(llama: PreTrainedModel) -> None:
    for config in ({"block_size": 4}, 5, llama.config):
        with pytest.raises(hf_cb.InvalidArgumentError, match=r"^config: takes a CBConfig or None"):
            hf_cb.install(llama, config)


def test_options_go_on_top_of_the_config(llama: PreTrainedModel) -> None:
    config = CBConfig(max_batch_tokens=33, block_size=4, num_blocks=50)
    with hf_cb.continuous_batching(llama, config, max_batch_tokens=44, max_batch_size=3) as engine:
        resolved = engine.config
    assert resolved is not None
    assert (resolved.max_batch_tokens, resolved.block_size, resolved.num_blocks, resolved.max_batch_size) == (44, 4, 50, 3)
    assert config == CBConfig(max_batch_tokens=33, block_size=4, num_blocks=50)
    assert CBConfig.make(config) == config
    assert CBConfig.make() == CBConfig()


def facts(**values: Any) -> ModelFacts:
    usual = {
        "kv_bytes_per_token": 100,
        "max_positions": 64,
        "free_memory": 8 * GIB,
        "default_batch_tokens": 512,
        "kv_dtype": "float32",
    }
    return ModelFacts(**{**usual, **values})


def test_nothing_is_left_open() -> None:
    resolved = CBConfig().resolve(facts())
    assert all(value is not None for value in resolved.as_dict().values())
    assert (resolved.max_batch_tokens, resolved.block_size, resolved.fallback) == (512, 16, "native")


@pytest.mark.parametrize(
    ("settings", "known", "num_blocks"),
    [
        # Blocks that were asked for are what there is.
        ({"num_blocks": 7}, {}, 7),
        ({"num_blocks": 7, "kv_cache_memory": GIB}, {}, 7),
        # So is memory: 16 tokens of 100 bytes make a block.
        ({"kv_cache_memory": 16_000}, {}, 10),
        ({"kv_cache_memory": 16_000, "block_size": 4}, {}, 40),
        ({"kv_cache_memory": 17_599}, {}, 10),
        ({"kv_cache_memory": GIB}, {}, GIB // 1600),
        ({"kv_cache_memory": "1GiB"}, {}, GIB // 1600),
        ({"kv_cache_memory": "1.5 KiB", "block_size": 1}, {}, 15),
        ({"kv_cache_memory": "16KB"}, {}, 10),
        ({"kv_cache_memory": "1600B"}, {}, 1),
        ({"kv_cache_memory": 0.5}, {}, 4 * GIB // 1600),
        # By default no more than max_batch_size sequences of the greatest length can use: 4 blocks each.
        ({}, {}, 256 * 4),
        ({"max_batch_size": 3}, {}, 3 * 4),
        ({"max_batch_size": 3}, {"max_positions": 65}, 3 * 5),
        ({"block_size": 5, "max_batch_size": 3}, {}, 3 * 13),
        # A quarter of what is free, and at most 4 GiB.
        ({}, {"max_positions": None}, 2 * GIB // 1600),
        ({}, {"max_positions": None, "free_memory": 100 * GIB}, 4 * GIB // 1600),
        ({}, {"free_memory": 64_000}, 10),
    ],
)
def test_blocks(settings: dict[str, Any], known: dict[str, Any], num_blocks: int) -> None:
    resolved = CBConfig(**settings).resolve(facts(**known))
    assert resolved.num_blocks == num_blocks
    assert resolved.kv_cache_memory == num_blocks * resolved.block_size * 100


def test_no_room_for_a_block() -> None:
    for settings, known in (({"kv_cache_memory": 1599}, {}), ({}, {"free_memory": 6399})):
        message = r"^kv_cache_memory: 1599 bytes hold no block of 16 tokens x 100 bytes; it takes at least 1600$"
        with pytest.raises(hf_cb.InvalidArgumentError, match=message):
            CBConfig(**settings).resolve(facts(**known))


def test_a_config_is_fixed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CBConfig().block_size = 3  # type: ignore[misc]
