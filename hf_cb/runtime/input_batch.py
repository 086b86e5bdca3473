"""InputBatch: a scheduled step as the tensors that the model and the attention take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_cb.attention.step import AttentionStep
from hf_cb.core.output import UNKNOWN, ScheduledRow, SchedulerOutput
from hf_cb.runtime.state_pool import StateGroup, group_states
from hf_cb.runtime.streams import Streams


class PromptPart(NamedTuple):
    """Positions `first` .. `first + length - 1` of a prompt, whose logits its request wants for themselves."""

    request_id: int
    first: int
    length: int


class DraftPart(NamedTuple):
    """Guesses at the end of a row, whose logits are at `first` .. `first + len(tokens) - 1` of the batch's."""

    request_id: int
    first: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T packed tokens of N rows, of which n ask for logits."""

    input_ids: torch.Tensor  # [1, T] int64; 0 where they are not known on the host, see `follow`
    position_ids: torch.Tensor  # [1, T] int64
    logits_indices: torch.Tensor  # [m] int64: packed positions; that of the last known token of n rows, then the parts'
    sampling_ids: tuple[int, ...]  # request ids of the n rows, in the order of logits_indices
    steps: tuple[AttentionStep, ...]  # for each group of layers: they differ in where the keys and values are
    draft_parts: tuple[DraftPart, ...] = ()
    prompt_parts: tuple[PromptPart, ...] = ()
    states: tuple[StateGroup, ...] = ()  # which states its rows read and write, of a model that has some
    unknown: tuple[torch.Tensor, torch.Tensor] | None = None  # packed positions, and which tokens of the step before go there

    def follow(self, tokens: torch.Tensor) -> None:
        """Fill in the tokens [n] that the step before sampled, by the order of its `sampling_ids`; they stay on the device."""
        if self.unknown is not None:
            places, sources = self.unknown
            # A row that failed has -1, which is no token. It is computed for nothing.
            self.input_ids[0].index_copy_(0, places, tokens.index_select(0, sources).clamp_(min=0))


Wanted = Callable[[int, int], range]
"""(start, end) -> the positions among them whose logits are wanted."""


def build_input_batch(
    output: SchedulerOutput,
    block_size: int,
    streams: Streams,
    wanted: Mapping[int, Wanted] | None = None,
    num_groups: int = 1,
    before: Sequence[int] = (),
) -> InputBatch:
    """Pack the rows one after another: no padding tokens. Built with numpy, taken to the device at the end.

    `wanted`: request id -> which of its positions' logits to compute beside the last one's. `num_groups`: of layers; a block
    table holds a block of each in turn. `before`: the `sampling_ids` of the step before, whose tokens may be UNKNOWN here.
    """
    rows = output.rows
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    lens = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
    ends, key_lens = np.cumsum(lens), starts + lens
    ids = np.fromiter((token for row in rows for token in row.token_ids), np.int64, int(ends[-1]))
    row_of = np.repeat(np.arange(len(rows)), lens)
    positions = np.arange(len(ids)) + (starts - (ends - lens))[row_of]  # token t of row i: start_i + t - its first place
    asked = _ask(rows, ends, wanted)
    starts_q = np.concatenate([[0], ends]).astype(np.int32)
    arrays: list[np.ndarray] = [ids, positions, asked.indices, starts_q, key_lens.astype(np.int32)]
    arrays += _places(rows, row_of, positions, block_size, num_groups)
    unknown = _take_unknown(rows, ids, row_of, before)
    arrays += unknown
    input_ids, position_ids, logits_indices, cu_seqlens, seq_lens, *rest = streams.upload(arrays)
    common: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens,
        "seq_lens_k": seq_lens,
        "query_lens": tuple(lens.tolist()),
        "key_lens": tuple(key_lens.tolist()),
        "max_seqlen_q": int(lens.max()),
        "max_seqlen_k": int(key_lens.max()),
        "block_size": block_size,
    }
    return InputBatch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        logits_indices=logits_indices,
        sampling_ids=asked.sampling_ids,
        steps=tuple(
            AttentionStep(block_table=rest[2 * group], slot_mapping=rest[2 * group + 1], **common)
            for group in range(num_groups)
        ),
        draft_parts=asked.drafts,
        prompt_parts=asked.prompts,
        states=group_states(rows, streams.device) if rows[0].memory.states else (),
        unknown=(rest[-2], rest[-1]) if unknown else None,
    )


def _take_unknown(rows: Sequence[ScheduledRow], ids: np.ndarray, row_of: np.ndarray, before: Sequence[int]) -> list[np.ndarray]:
    """Put zeros in the place of tokens that are not known; where those are, and which tokens of the step before they are."""
    places = np.flatnonzero(ids == UNKNOWN)
    if not len(places):
        return []
    ids[places] = 0
    index = {request_id: i for i, request_id in enumerate(before)}
    return [places, np.array([index[rows[row].request_id] for row in row_of[places]])]


class _Asked(NamedTuple):
    """Which logits of a step are wanted."""

    indices: np.ndarray  # [m] packed positions
    sampling_ids: tuple[int, ...]
    drafts: tuple[DraftPart, ...]
    prompts: tuple[PromptPart, ...]


def _ask(rows: Sequence[ScheduledRow], ends: np.ndarray, wanted: Mapping[int, Wanted] | None) -> _Asked:
    """`ends` [N]: of the rows, packed."""
    num_logits = np.fromiter((row.num_logits for row in rows), np.int64, len(rows))
    asking = np.flatnonzero(num_logits)
    indices, drafts, prompts = [ends[asking] - num_logits[asking]], [], []
    num_asked = len(asking)
    for drafting in map(int, np.flatnonzero(num_logits > 1)):
        row = rows[drafting]
        drafts.append(DraftPart(row.request_id, num_asked, row.drafts))
        indices.append(np.arange(ends[drafting] - len(row.drafts), ends[drafting]))
        num_asked += len(row.drafts)
    for row, end in zip(rows, ends, strict=True) if wanted else ():
        if (
            wanted
            and row.request_id in wanted
            and (positions := wanted[row.request_id](row.start, row.start + len(row.token_ids)))
        ):
            prompts.append(PromptPart(row.request_id, positions.start, len(positions)))
            indices.append(np.asarray(positions) - row.start + end - len(row.token_ids))
    return _Asked(np.concatenate(indices), tuple(rows[int(i)].request_id for i in asking), tuple(drafts), tuple(prompts))


def _places(
    rows: Sequence[ScheduledRow], row_of: np.ndarray, positions: np.ndarray, block_size: int, num_groups: int
) -> list[np.ndarray]:
    """For each group of layers its block table [N, width] int32, and the slots [T] int64 of the packed tokens."""
    tables = [row.memory.block_table for row in rows]
    block_table = np.zeros((len(rows), max(map(len, tables))), np.int32)  # 0 beyond the used blocks: a valid id
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = table
    stretches, offsets = positions // block_size * num_groups, positions % block_size
    arrays = []
    for group in range(num_groups):
        arrays.append(np.ascontiguousarray(block_table[:, group::num_groups]))
        arrays.append(block_table[row_of, stretches + group].astype(np.int64) * block_size + offsets)
    return arrays
