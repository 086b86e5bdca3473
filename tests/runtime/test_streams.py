"""Steps that are launched without waiting for the device, and what is carried between it and the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import inside
import models
import numpy as np
import pytest
import torch

import hf_cb
from hf_cb.attention.flash import FlashAttention2
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec
from hf_cb.core.output import UNKNOWN, RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.hf.twins.attention import IMPLEMENTATION, register, set_port
from hf_cb.hf.twins.twin import forward_of, make_twin, set_attention
from hf_cb.request import Request, SamplingParams
from hf_cb.runtime import draws, streams
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.streams import Download, Streams
from hf_cb.runtime.swap_space import SwapSpace

pytestmark = pytest.mark.timeout(20)

META = torch.device("meta")
CPU = torch.device("cpu")
PARAMS = (
    SamplingParams(),
    SamplingParams(min_new_tokens=3, suppress_tokens=(5,), begin_suppress_tokens=(7,)),
    SamplingParams(do_sample=True, logit_bias=((5, 2.0), (9, -1.5))),
    SamplingParams(do_sample=True, temperature=0.7, top_k=9),
    SamplingParams(do_sample=True, temperature=1.3, top_p=0.9, min_p=0.01),
)


# -- nothing waits -----------------------------------------------------------------------------------------------------------


class Shapes:
    """Attention that gives the right shapes, with the plan and the write of a kernel for GPUs."""

    name = "shapes"

    def why_not(self, spec: LayerSpec) -> str | None:
        return None

    def plan(self, step: AttentionStep, spec: LayerSpec) -> object:
        return FlashAttention2().plan(step, spec)

    def attend(self, call: LayerCall) -> torch.Tensor:
        call.write()
        return call.v.new_empty(len(call.q), call.spec.num_heads, call.spec.value_head_size)


class ShapedDraws(draws.TorchDraws):
    """There are no generators on the meta device."""

    def __init__(self, seed: int, device: torch.device) -> None: ...

    def take(self, times: torch.Tensor) -> None: ...


def meta_runner() -> ModelRunner:
    twin = make_twin(models.tiny("llama", head_dim=16).to(META))
    register()
    set_attention(twin, IMPLEMENTATION)
    modules = [layer.self_attn for layer in twin.model.layers]  # type: ignore[union-attr, operator]
    config = twin.config
    specs = [LayerSpec(config.num_attention_heads, config.num_key_value_heads, 16, 16, torch.float32, META, 0.25)] * len(
        modules
    )
    port = AttentionPort(modules, specs, Shapes(), KVCache(specs, 8, 256))
    set_port(twin, port)
    forward = forward_of(twin)
    assert forward is not None
    return ModelRunner(forward, port, 256, META)


def rows(ids: Sequence[int], start: int, tokens: tuple[int, ...]) -> SchedulerOutput:
    return SchedulerOutput(tuple(ScheduledRow(i, start, tokens, RowMemory((i,)), 1) for i in ids), len(ids) * len(tokens))


def test_no_launch_needs_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, whose tensors have none: what would make the host wait for a GPU raises here."""
    monkeypatch.setattr(draws, "TorchDraws", ShapedDraws)
    runner = meta_runner()
    for i, params in enumerate(PARAMS):
        runner.add(Request((4, 5, 6), 9, frozenset({3}), params, request_id=i))
    prompts, tokens = rows(range(5), 0, (4, 5, 6)), rows((4, 0, 2, 1), 3, (UNKNOWN,))
    assert runner.can_wait(prompts)
    first = runner.launch(prompts)
    second = runner.launch(tokens, first)
    third = runner.launch(rows((1, 2), 4, (UNKNOWN,)), second)
    assert [launched.logits.shape for launched in (first, second, third)] == [(n, models.VOCAB) for n in (5, 4, 2)]
    errors = runner.collect(third).errors  # which does need the values
    assert errors.keys() == {1, 2}
    assert all("meta" in str(error) for error in errors.values())


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(frequency_penalty=0.5)},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"rules": object()},
        {"search": type("Search", (), {"width": 2, "num_chosen": 0})()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_rows_whose_next_token_takes_the_host(options: dict[str, Any]) -> None:
    runner = ModelRunner(lambda *_: torch.zeros(0), AttentionPort([], [], Shapes(), KVCache([], 1, 4)), 4, CPU)
    runner.add(Request((4, 5, 6), 9, request_id=0))
    assert runner.can_wait(rows((0,), 0, (4, 5, 6)))
    runner.add(Request((4, 5, 6), 9, request_id=1, **options))
    assert not runner.can_wait(rows((0, 1), 0, (4, 5, 6)))


class Recorder(Streams):
    """Notes what goes up and what is waited for, in its order. Tokens that have not been waited for are not there."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.notes: list[tuple[str, int]] = []
        self.steps = -1

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.steps += 1
        self.notes.append(("up", self.steps))
        return super().upload(arrays)

    def download(self, *tensors: torch.Tensor) -> Download:
        own, step = super().download(*tensors), self.steps

        def wait() -> tuple[torch.Tensor, ...]:
            self.notes.append(("down", step))
            return own()

        return wait

    @contextlib.contextmanager
    def swapping(self, device: torch.device) -> Iterator[None]:
        self.notes.append(("swap", self.steps))
        yield


def recorded(engine: hf_cb.Engine, **options: Any) -> list[tuple[str, int]]:
    recorder = Recorder()
    inside.runner(engine)._streams = recorder
    engine.submit((4, 5, 6), max_new_tokens=4, **options).result()
    return recorder.notes


def test_the_next_step_goes_up_before_the_tokens_come_down() -> None:
    with hf_cb.continuous_batching(models.tiny("llama"), overlap=True) as engine:
        assert recorded(engine) == [
            *[("up", 0), ("up", 1), ("down", 0), ("up", 2), ("down", 1), ("up", 3), ("down", 2), ("down", 3)]
        ]


def test_a_step_is_waited_for_where_the_next_one_needs_its_tokens() -> None:
    in_turn = [(way, step) for step in range(4) for way in ("up", "down")]
    with hf_cb.continuous_batching(models.tiny("llama"), overlap=True) as engine:
        assert recorded(engine, logprobs=1) == in_turn
    with hf_cb.continuous_batching(models.tiny("llama")) as engine:  # on a CPU, where there is nothing to overlap
        assert recorded(engine) == in_turn


# -- carrying -----------------------------------------------------------------------------------------------------------------


def test_the_parts_of_one_upload() -> None:
    """As on CUDA, where all arrays go in one piece of memory."""
    arrays = [
        np.arange(5),
        np.arange(3, dtype=np.int32),
        np.zeros((0, 4), np.int32),
        np.arange(6, dtype=np.int32).reshape(2, 3),
    ]
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    parts = streams._parts(arrays, memory, [sum(sizes[:i]) for i in range(len(sizes))])
    for array, part in zip(arrays, parts, strict=True):
        part.numpy()[...] = array
    for array, part in zip(arrays, parts, strict=True):
        assert (part.dtype, tuple(part.shape)) == (torch.from_numpy(array).dtype, array.shape)
        assert part.tolist() == array.tolist()
        assert not part.numel() or part.data_ptr() % 16 == 0


def test_blocks_that_follow_one_another_are_one_copy() -> None:
    specs = [LayerSpec(2, 1, 8, 4, torch.float32, CPU, 1.0)] * 2
    cache, recorder = KVCache(specs, 6, 4), Recorder()
    space = SwapSpace(cache, 5, recorder)
    for pair in cache.tensors:
        for blocks in pair:
            blocks.copy_(torch.arange(len(blocks)).view(-1, 1, 1, 1).expand_as(blocks))
    copies: list[int] = []
    copy_ = torch.Tensor.copy_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "copy_", lambda to, source, **how: (copies.append(len(source)), copy_(to, source, **how))[1]
        )
        space.copy_out([(1, 0), (2, 1), (4, 2), (5, 4)])
        assert copies == [2, 1, 1] * 4
        for pair in cache.tensors:
            for blocks in pair:
                blocks.zero_()
        space.copy_in([(0, 3), (1, 4), (2, 5), (4, 0)])
    assert copies == [2, 1, 1] * 4 + [3, 1] * 4
    for pair in cache.tensors:
        for blocks in pair:
            assert blocks.amax((1, 2, 3)).tolist() == [5, 0, 0, 1, 2, 4, 0, 0]
    assert [name for name, _ in recorder.notes] == ["swap", "swap"]


def test_every_kind_of_device_has_streams() -> None:
    assert type(streams.streams_of(CPU)) is Streams
    assert isinstance(streams.streams_of(torch.device("cuda", 0)), streams.CudaStreams)
