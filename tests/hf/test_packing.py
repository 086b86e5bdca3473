"""Packed weights: which layers are joined, that they follow the model, and what they may cost."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import seam
import torch
from seam import NEW, PROMPT
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_cb
from hf_cb.hf.fast import packing
from hf_cb.hf.fast.packing import Packs, group_by_input, linear_calls
from hf_cb.hf.support import Wishes, examine
from hf_cb.hf.twins.twin import forward_of, make_twin
from hf_cb.hf.twins.weights import WeightWatch


def groups_of(name: str) -> list[set[str]]:
    twin = make_twin(models.tiny(name))
    names = {module: key.rpartition(".")[2] for key, module in twin.named_modules()}
    forward = forward_of(twin)
    assert forward is not None
    with torch.no_grad(), linear_calls(twin) as calls:
        forward(PROMPT, torch.arange(6)[None], torch.tensor([5]))
    assert not any("forward" in vars(module) for module in twin.modules())
    return [{names[module] for module in group} for group in group_by_input(calls)]


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("llama", [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]),
        ("phi3", []),  # joins them itself
        ("gpt2", []),
        ("gptj", [{"q_proj", "k_proj", "v_proj", "fc_in"}]),  # attention and MLP read the same
    ],
)
def test_layers_with_the_same_input_are_joined(name: str, joined: list[set[str]]) -> None:
    groups = groups_of(name)
    assert [group for group in groups if group in joined] == joined * (sum(len(g) > 1 for g in groups) // max(1, len(joined)))
    assert sum(len(group) > 1 for group in groups) == len(joined) * models.tiny(name).config.num_hidden_layers
    assert {"lm_head"} in groups


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gptj", "mixtral"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_limit_is_kept_and_the_tokens_are_the_same(name: str, share: float) -> None:
    whole = examine(models.tiny(name), Wishes(pack_memory=1 << 30)).packs.num_bytes
    assert whole > 0
    limit = int(share * whole)
    with seam.duo(name, {"pack_memory": limit}) as pair:
        packed = pair.engine.stats().packed_bytes
        assert packed <= limit
        assert packed >= limit // 3
        pair.same(PROMPT, max_new_tokens=NEW)
        pair.same(**seam.left_padded(seam.prompts(5, 17, 40)), max_new_tokens=NEW)


def test_the_users_modules_are_not_touched() -> None:
    model = models.tiny("llama")
    with hf_cb.continuous_batching(model) as engine:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert engine.stats().packed_bytes == sum(module.weight.nbytes for module in linear)
        assert not any("forward" in vars(module) for module in linear)


# -- writes to the weights ------------------------------------------------------------------------------------------------


def by_operation(tensor: nn.Parameter) -> None:
    with torch.no_grad():
        tensor.add_(1.5)


def under_inference_mode(tensor: nn.Parameter) -> None:
    with torch.inference_mode():
        tensor.mul_(-1.5)


def behind_its_back(tensor: nn.Parameter) -> None:
    tensor.data += 1.5


def by_other_data(tensor: nn.Parameter) -> None:
    tensor.data = tensor.data.flip(0).contiguous() + 1.5


def by_other_strides(tensor: nn.Parameter) -> None:
    tensor.data = torch.stack([tensor.data.flip(0) + 1.5] * 2, -1)[..., 0]


def through_numpy(tensor: nn.Parameter) -> None:
    tensor.detach().numpy()[...] *= -1.5


WRITES = (by_operation, under_inference_mode, behind_its_back, by_other_data, by_other_strides, through_numpy)


@pytest.fixture(scope="module")
def qwen2() -> Iterator[seam.Duo]:
    with seam.duo("qwen2") as pair:
        yield pair


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *itertools.product(("self_attn.q_proj.weight", "self_attn.v_proj.bias", "input_layernorm.weight"), WRITES),
        *itertools.product(("self_attn.q_proj.bias", "self_attn.o_proj.weight"), (by_operation, through_numpy)),
        *itertools.product(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (by_other_strides, through_numpy)),
    ],
)
def test_a_write_is_seen_by_the_next_call(qwen2: seam.Duo, name: str, write: Callable[[nn.Parameter], None]) -> None:
    before = qwen2.same(PROMPT, max_new_tokens=NEW)
    qwen2.both(lambda model: write(model.model.layers[1].get_parameter(name)))
    assert not torch.equal(qwen2.same(PROMPT, max_new_tokens=NEW), before)
    weights = models.tiny("qwen2").state_dict()
    qwen2.both(lambda model: model.load_state_dict(weights))
    assert torch.equal(qwen2.same(PROMPT, max_new_tokens=NEW), before)


@pytest.mark.parametrize("name", ["lm_head", "model.norm"])
@pytest.mark.parametrize("paused", [False, True])
def test_a_write_counts_for_what_is_running(name: str, paused: bool) -> None:
    model = models.tiny("llama")
    with hf_cb.continuous_batching(model) as engine:
        handle = engine.submit(PROMPT, max_new_tokens=480, eos_token_id=None)
        seen = list(itertools.islice(handle, 3))
        with engine.pause() if paused else contextlib.nullcontext(), torch.no_grad():
            model.get_submodule(name).weight.zero_()
        tokens = handle.result().tokens
        assert list(tokens[:3]) == seen
        assert set(tokens[-50:]) == {0}  # all logits are equal: the first wins


def test_a_small_write_past_torch_counts_after_a_pause() -> None:
    with seam.duo("llama") as pair:
        before = pair.same(PROMPT, max_new_tokens=NEW)
        with pair.engine.pause():
            pair.both(lambda model: model.lm_head.weight.data[3:6, 5].add_(40.0))
        assert not torch.equal(pair.same(PROMPT, max_new_tokens=NEW), before)


def test_a_weight_that_cannot_be_packed_again_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with seam.duo("llama") as pair:
        pair.same(PROMPT, max_new_tokens=NEW)

        def fail(self: object) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr(packing.Pack, "load", fail)
        pair.both(lambda model: by_operation(model.model.layers[0].self_attn.k_proj.weight))
        with caplog.at_level(logging.WARNING, "hf_cb"):
            pair.same(PROMPT, max_new_tokens=NEW)
        assert "could not be packed again" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_watch_tells_which(dtype: torch.dtype) -> None:
    tensors = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((3, 5), (1,), (64, 64))]
    watch = WeightWatch(tensors)
    assert watch.changed() == []
    for tensor in tensors:
        for write in (by_operation, behind_its_back, by_other_data):
            write(tensor)
            (only,) = watch.changed()
            assert only is tensor
            assert watch.changed() == []
    for tensor in tensors:
        by_operation(tensor)
    assert [id(tensor) for tensor in watch.changed()] == [id(tensor) for tensor in tensors]


# -- models that are not what they seemed ---------------------------------------------------------------------------------


class Fork(nn.Module):
    """Two layers over one input. `between` is what happens to the input before the second reads it."""

    def __init__(self, between: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.left, self.right, self.between, self.swapped = nn.Linear(8, 4), nn.Linear(8, 6, bias=False), between, False

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.swapped:
            return [self.right(x), self.left(x)]
        return [self.left(x), self.right(self.between(x))]


def packed(fork: Fork) -> Packs:
    with torch.no_grad(), linear_calls(fork) as calls:
        fork(torch.randn(3, 8))
    return Packs(group_by_input(calls), 1 << 20)


@torch.inference_mode()
def test_layers_called_in_another_order_than_seen() -> None:
    fork, x = Fork(), torch.randn(3, 8)
    want = fork(x)
    packs = packed(fork)
    assert packs.num_bytes == 4 * 8 * 10
    torch.testing.assert_close(fork(x), want)
    fork.swapped = True
    torch.testing.assert_close(fork(x), want[::-1])
    torch.testing.assert_close(fork(2 * x), [fork.right(2 * x), fork.left(2 * x)])
    fork.swapped = False
    torch.testing.assert_close(fork(x), want)
    torch.testing.assert_close([part.shape for part in fork(x[:0])], [(0, 4), (0, 6)])
    packs.undo()
    assert not {"forward"} & (set(vars(fork.left)) | set(vars(fork.right)))


def test_nothing_is_kept_when_every_part_has_been_fetched() -> None:
    fork = Fork()
    packs = packed(fork)
    with torch.inference_mode():
        fork(torch.randn(3, 8))
    assert packs._packs[0]._input is None
    assert packs._packs[0]._parts == ()


def test_a_model_that_runs_otherwise_when_packed_is_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    """An input that is written to between two layers that read it: only a run shows it."""
    model = models.tiny("llama")
    mlp = model.model.layers[1].mlp

    class Doubling(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate_proj(x)
            x.mul_(2)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    mlp.__class__ = Doubling
    with caplog.at_level(logging.WARNING, "hf_cb"), hf_cb.continuous_batching(model) as engine:
        want = type(model).generate(model, PROMPT, max_new_tokens=NEW)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW), want)
        assert engine.stats().packed_bytes == 0
        assert engine.stats().native_calls == {}
    assert "not packed" in caplog.text


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 4, dtype=torch.float64),
        nn.Bilinear(4, 4, 4),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.Linear(4, 4, device="meta"),
        nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4),
    ],
)
def test_layers_that_are_left_alone(module: nn.Module) -> None:
    assert not packing._can_pack(module)


def test_layers_that_are_packed() -> None:
    assert packing._can_pack(nn.Linear(4, 4))
    assert packing._can_pack(Conv1D(4, 4))
    own = nn.Linear(4, 4)
    own.forward = own.forward  # as accelerate's hooks do
    assert not packing._can_pack(own)
