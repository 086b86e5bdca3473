"""A step's tensors: rows one after another, positions and slots from each row's own start and block table."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.runtime.input_batch import InputBatch, build_input_batch
from hf_cb.runtime.streams import streams_of

CPU = torch.device("cpu")


def build(rows: list[ScheduledRow], block_size: int) -> InputBatch:
    return build_input_batch(SchedulerOutput(tuple(rows), sum(len(row.token_ids) for row in rows)), block_size, streams_of(CPU))


def test_by_hand() -> None:
    rows = [
        ScheduledRow(30, 0, (11, 12, 13, 14, 15), RowMemory((7, 2)), 0),  # a prompt's first chunk
        ScheduledRow(10, 6, (21,), RowMemory((5, 3)), 1),  # one token further
        ScheduledRow(20, 2, (31, 32, 33), RowMemory((9, 4)), 1),  # a prompt's last chunk, across a block
    ]
    batch = build(rows, block_size=4)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 31, 32, 33]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 6, 2, 3, 4]]
    assert batch.logits_indices.tolist() == [5, 8]
    assert batch.sampling_ids == (10, 20)
    step = batch.steps[0]
    assert step.cu_seqlens_q.tolist() == [0, 5, 6, 9]
    assert step.seq_lens_k.tolist() == [5, 7, 5]
    assert step.block_table.tolist() == [[7, 2], [5, 3], [9, 4]]
    assert step.slot_mapping.tolist() == [28, 29, 30, 31, 8, 14, 38, 39, 16]
    assert (step.query_lens, step.key_lens) == ((5, 1, 3), (5, 7, 5))
    assert (step.max_seqlen_q, step.max_seqlen_k, step.block_size) == (5, 7, 4)


def test_no_row_samples() -> None:
    batch = build([ScheduledRow(1, 0, (5, 6), RowMemory((0,)), 0)], block_size=4)
    assert (batch.logits_indices.shape, batch.logits_indices.dtype, batch.sampling_ids) == ((0,), torch.int64, ())


def test_unequal_tables_are_filled_with_a_valid_block() -> None:
    batch = build(
        [ScheduledRow(1, 0, (5,), RowMemory((3,)), 1), ScheduledRow(2, 8, (6,), RowMemory((4, 2, 1)), 1)], block_size=4
    )
    assert batch.steps[0].block_table.tolist() == [[3, 0, 0], [4, 2, 1]]


def test_a_table_may_be_longer_than_the_row_needs() -> None:
    batch = build([ScheduledRow(1, 3, (5,), RowMemory((3, 6, 8)), 1)], block_size=4)
    assert batch.steps[0].slot_mapping.tolist() == [15]


def test_types() -> None:
    batch = build([ScheduledRow(1, 0, (5,), RowMemory((3,)), 1)], block_size=4)
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.logits_indices.dtype == torch.int64
    step = batch.steps[0]
    assert step.cu_seqlens_q.dtype == step.seq_lens_k.dtype == step.block_table.dtype == torch.int32
    assert step.slot_mapping.dtype == torch.int64


def test_slots_beyond_32_bits() -> None:
    batch = build([ScheduledRow(1, 0, (5,), RowMemory((1 << 30,)), 1)], block_size=16)
    assert batch.steps[0].slot_mapping.tolist() == [1 << 34]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScheduledRow], int]:
    block_size = draw(st.integers(1, 5))
    shapes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.booleans()), min_size=1, max_size=6))
    needed = [-(-(start + length) // block_size) for start, length, _ in shapes]
    blocks = draw(st.permutations(range(sum(needed))))
    rows = []
    for i, (start, length, samples) in enumerate(shapes):
        tokens = tuple(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)))
        table = tuple(blocks[sum(needed[:i]) : sum(needed[: i + 1])])
        rows.append(ScheduledRow(100 + i, start, tokens, RowMemory(table), int(samples)))
    return rows, block_size


@settings(max_examples=60, deadline=None)
@given(steps())
def test_any_step(case: tuple[list[ScheduledRow], int]) -> None:
    rows, block_size = case
    batch = build(rows, block_size)
    step, bounds = batch.steps[0], batch.steps[0].cu_seqlens_q.tolist()
    assert len(set(step.slot_mapping.tolist())) == bounds[-1]  # nobody writes where another does
    for i, row in enumerate(rows):
        mine = slice(bounds[i], bounds[i + 1])
        positions = [*range(row.start, row.start + len(row.token_ids))]
        assert tuple(batch.input_ids[0, mine].tolist()) == row.token_ids
        assert batch.position_ids[0, mine].tolist() == positions
        want = [row.memory.block_table[p // block_size] * block_size + p % block_size for p in positions]
        assert step.slot_mapping[mine].tolist() == want
        assert step.seq_lens_k[i] == step.key_lens[i] == positions[-1] + 1
        assert step.query_lens[i] == len(row.token_ids)
        assert tuple(step.block_table[i, : len(row.memory.block_table)].tolist()) == row.memory.block_table
    ends = [bounds[i + 1] - 1 for i, row in enumerate(rows) if row.num_logits]
    assert batch.logits_indices.tolist() == ends
    assert batch.sampling_ids == tuple(row.request_id for row in rows if row.num_logits)
    assert (step.max_seqlen_q, step.max_seqlen_k) == (max(step.query_lens), max(step.key_lens))


def test_logits_of_prompts() -> None:
    rows = (
        ScheduledRow(2, 5, (11,), RowMemory((0, 1)), 1),
        ScheduledRow(1, 3, (12, 13, 14, 15), RowMemory((2, 3)), 0),
        ScheduledRow(3, 0, (16, 17), RowMemory((4,)), 1),
    )
    wanted = {1: lambda start, end: range(max(start, 4), min(end, 6)), 3: lambda start, end: range(start, start)}
    batch = build_input_batch(SchedulerOutput(rows, 7), 4, streams_of(CPU), wanted)
    assert batch.sampling_ids == (2, 3)
    assert batch.prompt_parts == ((1, 4, 2),)
    assert batch.logits_indices.tolist() == [0, 6, 2, 3]


def test_groups_of_layers_have_tables_of_their_own() -> None:
    rows = (
        ScheduledRow(1, 3, (5, 6), RowMemory((7, 1, 2, 9, 4, 3)), 1),  # three groups: blocks 7 and 9, 1 and 4, 2 and 3
        ScheduledRow(2, 0, (8,), RowMemory((10, 11, 12)), 1),
    )
    batch = build_input_batch(SchedulerOutput(rows, 3), 4, streams_of(CPU), num_groups=3)
    assert [step.block_table.tolist() for step in batch.steps] == [
        [[7, 9], [10, 0]],
        [[1, 4], [11, 0]],
        [[2, 3], [12, 0]],
    ]
    assert [step.slot_mapping.tolist() for step in batch.steps] == [[31, 36, 40], [7, 16, 44], [11, 12, 48]]
    assert all(step.block_table.is_contiguous() for step in batch.steps)
    assert len({step.key_lens for step in batch.steps}) == 1
