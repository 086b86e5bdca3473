"""DecodeGraphs by themselves: which sizes, how often until they are captured, and what is dropped when."""

from __future__ import annotations

from collections.abc import Iterator

import graph_emulator
import pytest
import torch
from graph_emulator import Device

from hf_cb.attention.step import LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.runtime.graphs import DecodeGraphs, Sizes
from hf_cb.runtime.input_batch import InputBatch, build_input_batch
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.streams import streams_of

CPU = torch.device("cpu")
SPEC = LayerSpec(2, 1, 8, 8, torch.float32, CPU, 0.5)
BLOCK_SIZE = 16


def batch(*lens: int, new: int = 1) -> InputBatch:
    """Rows with so many keys, of which `new` are computed; a token's id is its row's number of keys."""
    rows, block = [], 0
    for i, keys in enumerate(lens):
        count = -(-keys // BLOCK_SIZE)
        rows.append(ScheduledRow(i, keys - new, (keys,) * new, RowMemory(tuple(range(block, block + count))), 1))
        block += count
    return build_input_batch(SchedulerOutput(tuple(rows), new * len(lens)), BLOCK_SIZE, streams_of(CPU))


class Subject:
    """Graphs of a forward whose logits are [id, position]."""

    def __init__(self, **options: object) -> None:
        self.baked: object = "as it was"
        self.eager = 0
        cache = KVCache([SPEC], 8, BLOCK_SIZE)
        port = AttentionPort([object()], [SPEC], None, cache)  # type: ignore[arg-type]
        usual = {"limit": 1 << 20, "max_rows": 8, "baked": lambda: self.baked}
        self.graphs = DecodeGraphs(self.forward, port, cache, **{**usual, **options})  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids[0], positions[0]], dim=1)[indices].float()

    def ran(self, step: InputBatch) -> bool:
        """Whether a graph computed the step: rightly, if so."""
        with torch.inference_mode():
            logits = self.graphs.run(step)
        if logits is not None:
            want = torch.stack([step.input_ids[0], step.position_ids[0]], dim=1)[step.logits_indices].float()
            assert torch.equal(logits, want)
        return logits is not None


@pytest.fixture
def device() -> Iterator[Device]:
    with graph_emulator.emulated() as device:
        yield device


@pytest.mark.parametrize(
    ("lens", "sizes"),
    [
        ((1,), (1, 256)),
        ((5,) * 3, (4, 256)),
        ((256,), (1, 256)),
        ((257, 3), (2, 512)),
        ((2,) * 70, (96, 256)),
        ((2,) * 300, (512, 256)),
    ],
)
def test_sizes_are_rounded_up(lens: tuple[int, ...], sizes: tuple[int, int]) -> None:
    assert Sizes.of(batch(*lens).steps[0]) == sizes


def test_the_third_time(device: Device) -> None:
    subject = Subject()
    assert [subject.ran(batch(keys, 2 * keys, 3)) for keys in (5, 6, 7, 8)] == [False, False, True, True]
    assert subject.ran(batch(9, 9, 9, 9)), "four rows fit as well"
    assert subject.ran(batch(4, 5, 6)), "and three again, beside a row that was there before"
    assert not subject.ran(batch(5, 6)), "two are another size"
    assert subject.graphs.count == 1


def test_only_decode_steps_of_bounded_size(device: Device) -> None:
    subject = Subject()
    assert not any(subject.ran(batch(7, 8, new=2)) for _ in range(5))
    assert not any(subject.ran(batch(*[3] * 9)) for _ in range(5))
    assert "capture" not in device.events


def test_rows_that_take_no_sample(device: Device) -> None:
    subject, step = Subject(), batch(5, 6, 7)
    some = InputBatch(step.input_ids, step.position_ids, torch.tensor([2, 0]), (2, 0), step.steps)
    none = InputBatch(step.input_ids, step.position_ids, torch.tensor([], dtype=torch.int64), (), step.steps)
    assert [subject.ran(some) for _ in range(3)][-1]
    assert subject.ran(none)


def test_results_stay(device: Device) -> None:
    subject = Subject()
    with torch.inference_mode():
        results = [subject.graphs.run(batch(keys)) for keys in range(3, 9)]
    assert [None if r is None else r.tolist() for r in results] == [None, None, *([[keys, keys - 1]] for keys in range(5, 9))]


def test_what_was_baked_in_has_changed(device: Device) -> None:
    subject = Subject()
    assert [subject.ran(batch(5)) for _ in range(3)][-1]
    subject.baked = "otherwise"
    assert [subject.ran(batch(5)) for _ in range(3)] == [False, False, True]
    before = subject.graphs._cache.tensors  # kept, so that the new ones lie elsewhere
    subject.graphs._cache.release()
    subject.graphs._cache.restore()
    assert [subject.ran(batch(5)) for _ in range(3)] == [False, False, True]
    assert device.events.count("capture") == 3
    assert before is not subject.graphs._cache.tensors


def test_off(device: Device) -> None:
    subject = Subject(off="for a reason")
    assert not any(subject.ran(batch(5)) for _ in range(4))
    assert subject.graphs.reason == "for a reason"
