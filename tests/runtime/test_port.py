"""The port: each layer's call meets the current step, its own cache and the plan that it shares with layers like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_cb.attention.step import AttentionStep, LayerCall, LayerKV, LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.request import Request, SamplingParams
from hf_cb.runtime.input_batch import build_input_batch
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.kv_layout import KVLayout
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.streams import streams_of

CPU = torch.device("cpu")


def spec(**values: Any) -> LayerSpec:
    usual = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "value_head_size": 6, "scale": 0.5}
    return LayerSpec(**{**usual, "dtype": torch.float32, "device": CPU, **values})


class Noting:
    """An attention backend that notes what it is given, and gives each value head back for its queries."""

    name = "noting"

    def __init__(self) -> None:
        self.plans: list[LayerSpec] = []
        self.calls: list[tuple[LayerKV, LayerSpec, AttentionStep, object, torch.Tensor | None]] = []

    def why_not(self, spec: LayerSpec) -> str | None:
        return None

    def plan(self, step: AttentionStep, spec: LayerSpec) -> object:
        self.plans.append(spec)
        return ("plan", len(self.plans))

    def attend(self, call: LayerCall) -> torch.Tensor:
        _, _, v, kv, spec, step, plan, sinks = call
        self.calls.append((kv, spec, step, plan, sinks))
        return v.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)


class Module:
    """Stands for an attention module."""


def output(*rows: ScheduledRow) -> SchedulerOutput:
    return SchedulerOutput(rows, sum(len(row.token_ids) for row in rows))


STEP = build_input_batch(output(ScheduledRow(1, 0, (5, 6, 7), RowMemory((0,)), 1)), 4, streams_of(CPU)).steps[0]
Q, K, V = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 6)
SPECS = [spec(), spec(window=4), spec()]


@pytest.fixture
def made() -> tuple[AttentionPort, Noting, list[Module], KVCache]:
    backend, modules, cache = Noting(), [Module() for _ in SPECS], KVCache(SPECS, 5, 4)
    return AttentionPort(modules, SPECS, backend, cache), backend, modules, cache


Made = tuple[AttentionPort, Noting, list[Module], KVCache]


def test_each_layer_meets_its_own_cache_and_like_layers_share_a_plan(made: Made) -> None:
    port, backend, modules, cache = made
    port.begin((STEP,))
    sinks = torch.zeros(4)
    for i in (2, 0, 1):
        out = port.serve(modules[i], Q, K, V, sinks if i == 1 else None)
        assert torch.equal(out, V.repeat_interleave(2, dim=1))
    assert [call[0] is cache.layers[i] for call, i in zip(backend.calls, (2, 0, 1), strict=True)] == [True] * 3
    assert [call[1] for call in backend.calls] == [SPECS[2], SPECS[0], SPECS[1]]
    assert all(call[2] is STEP for call in backend.calls)
    assert [call[3] for call in backend.calls] == [("plan", 1), ("plan", 1), ("plan", 2)]
    assert [call[4] is sinks for call in backend.calls] == [False, False, True]
    assert port.calls == [1, 1, 1]
    port.end()


def test_a_layer_on_another_device_gets_the_step_there() -> None:
    """Moved once a step, and again in the next."""
    meta = torch.device("meta")
    specs, modules = [spec(), spec(device=meta), spec(device=meta, window=4)], [Module() for _ in SPECS]
    backend = Noting()
    port = AttentionPort(modules, specs, backend, KVCache(specs, 5, 4))
    moved = []
    for _ in range(2):
        port.begin((STEP,))
        for module in modules:
            port.serve(module, Q, K, V, None)
        port.end()
        steps = [call[2] for call in backend.calls[-3:]]
        assert steps[0] is STEP
        assert steps[1] is steps[2]
        tensors = (steps[1].cu_seqlens_q, steps[1].seq_lens_k, steps[1].block_table, steps[1].slot_mapping)
        assert {tensor.device for tensor in tensors} == {meta}
        assert steps[1].query_lens == STEP.query_lens
        moved.append(steps[1])
    assert moved[0] is not moved[1]
    assert [call[0].k.device for call in backend.calls[:3]] == [CPU, meta, meta]


def test_plans_and_counts_last_for_a_step(made: Made) -> None:
    port, backend, modules, _ = made
    for _ in range(2):
        port.begin((STEP,))
        for _ in range(2):
            port.serve(modules[0], Q, K, V, None)
        assert port.calls == [2, 0, 0]
        port.end()
    assert backend.plans == [SPECS[0]] * 2


def test_layers_of_one_spec_are_entered_together(made: Made) -> None:
    port, backend, modules, cache = made
    wanted = torch.tensor([0])
    port.begin((STEP,), wanted)
    together = port.together([modules[2], modules[0]])
    assert together is not None
    kept = [*cache.layers[2], *cache.layers[0]]
    assert len(together.caches) == 4
    assert all(one is other for one, other in zip(together.caches, kept, strict=True))
    assert together.step is STEP
    assert together.plan == ("plan", 1)
    assert together.wanted is wanted
    assert port.calls == [1, 0, 1]
    port.end()
    port.begin((STEP,))
    assert port.together(modules[:1]).wanted is None  # type: ignore[union-attr]
    port.end()
    with pytest.raises(RuntimeError, match="outside a step"):
        port.together(modules[::2])
    assert backend.calls == []


def test_layers_of_several_groups_are_not() -> None:
    modules, specs = [Module(), Module()], [spec(), spec()]
    layout = KVLayout(((0,), (1,)), ((None, None), (4, None)))
    port = AttentionPort(modules, specs, Noting(), KVCache(specs, 5, 4, layout))
    port.begin((STEP, STEP))
    assert port.together(modules) is None
    assert port.calls == [0, 0]
    port.end()


def test_a_call_outside_a_step_is_refused(made: Made) -> None:
    port, backend, modules, _ = made
    with pytest.raises(RuntimeError, match="outside a step"):
        port.serve(modules[0], Q, K, V, None)
    port.begin((STEP,))
    port.end()
    with pytest.raises(RuntimeError, match="outside a step"):
        port.serve(modules[0], Q, K, V, None)
    assert backend.calls == []


def test_a_module_that_is_not_known_is_refused(made: Made) -> None:
    port = made[0]
    port.begin((STEP,))
    with pytest.raises(KeyError):
        port.serve(Module(), Q, K, V, None)
    port.end()


def test_modules_and_specs_must_pair_up() -> None:
    with pytest.raises(ValueError, match="zip"):
        AttentionPort([Module()], SPECS, Noting(), KVCache(SPECS, 5, 4))


# -- the cache ------------------------------------------------------------------------------------------------------------


def test_every_layer_has_its_own_shape_and_dtype() -> None:
    specs = [spec(), spec(num_kv_heads=1, head_size=16, value_head_size=4, dtype=torch.bfloat16)]
    cache = KVCache(specs, 5, 4)
    assert [(kv.k.shape, kv.v.shape, kv.k.dtype) for kv in cache.layers] == [  # and a block of zeros, and one of scratch
        ((7, 4, 2, 8), (7, 4, 2, 6), torch.float32),
        ((7, 4, 1, 16), (7, 4, 1, 4), torch.bfloat16),
    ]
    assert all(not kv.k.any() and not kv.v.any() for kv in cache.layers)
    sizes = [t.numel() * t.itemsize for kv in cache.layers for t in kv]
    assert sum(sizes) == 7 * 4 * sum(s.bytes_per_token for s in specs)


# -- the runner -----------------------------------------------------------------------------------------------------------


def runner_of(forward: Any, port: AttentionPort) -> ModelRunner:
    return ModelRunner(forward, port, 4, CPU)


def test_the_runner_samples_the_rows_that_caught_up(made: Made) -> None:
    port, _, modules, _ = made

    def forward(ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The next token is the last one plus its position."""
        assert torch.is_inference_mode_enabled()
        port.serve(modules[0], Q, K, V, None)
        return torch.nn.functional.one_hot((ids + positions)[0, indices], 50).float()

    runner = runner_of(forward, port)
    for request_id, row in enumerate([(5, 6), (9,), (20,)]):
        runner.add(Request(row, 5, request_id=request_id))
    step = output(
        ScheduledRow(0, 0, (5, 6), RowMemory((1,)), 0),
        ScheduledRow(1, 3, (9,), RowMemory((2,)), 1),
        ScheduledRow(2, 7, (20,), RowMemory((3, 4)), 1),
    )
    result = runner.execute(step)
    assert (result.tokens, result.errors) == ({1: (12,), 2: (27,)}, {})
    assert runner.model_seconds > 0
    assert runner.execute(output(ScheduledRow(0, 0, (5, 6), RowMemory((1,)), 0))).tokens == {}
    with pytest.raises(RuntimeError, match="outside a step"):
        port.serve(modules[0], Q, K, V, None)


def test_a_step_that_failed_can_be_executed_again(made: Made) -> None:
    port, _, modules, _ = made
    failing = [True]

    def forward(ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if failing:
            failing.pop()
            raise ArithmeticError("a bad step")
        return torch.zeros(len(indices), 50)

    runner, other = runner_of(forward, port), runner_of(forward, port)
    request = Request((5,), 5, sampling=SamplingParams(do_sample=True, seed=3), request_id=0)
    for each in (runner, other):
        each.add(request)
    step = output(ScheduledRow(0, 0, (5,), RowMemory((1,)), 1))
    with pytest.raises(ArithmeticError, match="a bad step"):
        runner.execute(step)
    with pytest.raises(RuntimeError, match="outside a step"):
        port.serve(modules[0], Q, K, V, None)
    assert runner.execute(step).tokens == other.execute(step).tokens


def test_a_rows_own_error_is_its_own(made: Made) -> None:
    port = made[0]

    def forward(ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(indices), 50)
        logits[0] = float("nan")
        return logits

    runner = runner_of(forward, port)
    for request_id in (0, 1):
        runner.add(Request((5,), 5, sampling=SamplingParams(do_sample=True, seed=3), request_id=request_id))
    result = runner.execute(output(ScheduledRow(0, 0, (5,), RowMemory((1,)), 1), ScheduledRow(1, 0, (5,), RowMemory((2,)), 1)))
    assert list(result.errors) == [0]
    assert list(result.tokens) == [1]


def test_a_forgotten_request(made: Made) -> None:
    runner = runner_of(lambda ids, positions, indices: torch.zeros(len(indices), 50), made[0])
    runner.remove(7)
    runner.add(Request((5,), 5, request_id=7))
    runner.remove(7)
    with pytest.raises(KeyError):
        runner.execute(output(ScheduledRow(7, 0, (5,), RowMemory((1,)), 1)))
