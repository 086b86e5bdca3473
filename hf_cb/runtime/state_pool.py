"""StatePool: the states of sequences, in slots: a tensor for each state of each mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_cb.core.output import ScheduledRow
from hf_cb.runtime.kv_cache import lazy_zeros
from hf_cb.runtime.streams import to_device


class StateSpec(NamedTuple):
    """One state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Of one sequence."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class StatePool:
    """`num_slots` slots for the states of each mixer: `states[mixer][i]` is [num_slots, *shape]."""

    def __init__(self, specs: Sequence[Sequence[StateSpec]], num_slots: int) -> None:
        """Allocate zeroed memory; on a CPU, pages take room only from when they are first written."""
        self.num_slots = num_slots
        self.specs = tuple(tuple(own) for own in specs)
        self.states: tuple[tuple[torch.Tensor, ...], ...] = ()
        self._host: tuple[tuple[torch.Tensor, ...], ...] = ()
        self.restore()

    def add_host_slots(self, num_slots: int) -> None:
        """Take memory of the host for the states of sequences that wait."""
        self._host = tuple(tuple(_host_zeros(spec, num_slots) for spec in own) for own in self.specs)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, over all mixers."""
        return slot_bytes(self.specs)

    def release(self) -> None:
        """Give the memory back; what was in it is lost."""
        self.states = ()

    def restore(self) -> None:
        """Take the memory (again), zeroed."""
        self.states = tuple(tuple(_zeros(spec, self.num_slots) for spec in own) for own in self.specs)

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (slot, host slot) each."""
        _copy(self.states, self._host, pairs)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host slot, slot) each."""
        _copy(self._host, self.states, pairs)


def _zeros(spec: StateSpec, num_slots: int) -> torch.Tensor:
    if spec.device.type == "cpu":
        return lazy_zeros((num_slots, *spec.shape), spec.dtype)
    return torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, device=spec.device)


def _host_zeros(spec: StateSpec, num_slots: int) -> torch.Tensor:
    if spec.device.type == "cpu":
        return lazy_zeros((num_slots, *spec.shape), spec.dtype)
    return torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, pin_memory=True, device="cpu")


def _copy(
    sources: Sequence[Sequence[torch.Tensor]], targets: Sequence[Sequence[torch.Tensor]], pairs: Sequence[tuple[int, int]]
) -> None:
    for source, target in pairs:
        for own, others in zip(sources, targets, strict=True):
            for state, other in zip(own, others, strict=True):
                other[target].copy_(state[source], non_blocking=True)


def slot_bytes(specs: Sequence[Sequence[StateSpec]]) -> int:
    """Bytes of the states of one sequence."""
    return sum(spec.num_bytes for own in specs for spec in own)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Parts of a step's rows that a mixer computes in one call: B rows of L tokens each."""

    places: torch.Tensor | None  # [B * L] int64: packed positions; None: those of the whole step, in its order
    num_rows: int
    length: int
    reads: Slots | None  # None: these rows begin
    writes: Slots


@dataclass(frozen=True, slots=True)
class Slots:
    """Of B rows. `first`: that of the first, where they follow one another."""

    index: torch.Tensor  # [B] int64
    first: int | None

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """Their states [B, ...]: a view where they follow one another, else a copy."""
        return states.index_select(0, self.index) if self.first is None else states.narrow(0, self.first, len(self.index))

    def put(self, states: torch.Tensor, values: torch.Tensor) -> None:
        """Write their states [B, ...]."""
        if self.first is None:
            states.index_copy_(0, self.index, values.to(states.dtype))
        else:
            states.narrow(0, self.first, len(self.index)).copy_(values)


class _Part(NamedTuple):
    """Tokens of a row from one state to the next."""

    first: int  # packed position of its first token
    read: int | None
    write: int


def group_states(rows: Sequence[ScheduledRow], device: torch.device) -> tuple[StateGroup, ...]:
    """The parts of a step's rows in groups, in an order in which no state is read before it is written."""
    groups: dict[tuple[int, int, bool], list[_Part]] = {}  # by which part of its row, length, and whether it begins
    packed = 0
    for row in rows:
        at, read = row.start, row.memory.state
        for i, (position, slot) in enumerate(row.memory.states):
            groups.setdefault((i, position - at, read is None), []).append(_Part(packed, read, slot))
            packed += position - at
            at, read = position, slot
    return tuple(
        _group(parts, length, device, packed) for (_, length, _), parts in sorted(groups.items(), key=lambda item: item[0][0])
    )


def _group(parts: list[_Part], length: int, device: torch.device, num_tokens: int) -> StateGroup:
    parts.sort(key=lambda part: part.write)
    first = np.array([part.first for part in parts], np.int64)
    places = (first[:, None] + np.arange(length)).ravel()
    is_whole = len(places) == num_tokens and bool((np.diff(places) == 1).all())
    reads = [part.read for part in parts if part.read is not None]
    return StateGroup(
        None if is_whole else to_device(places, torch.int64, device),
        len(parts),
        length,
        _slots(reads, device) if reads else None,
        _slots([part.write for part in parts], device),
    )


def _slots(slots: list[int], device: torch.device) -> Slots:
    follow = slots == list(range(slots[0], slots[0] + len(slots)))
    return Slots(to_device(np.array(slots, np.int64), torch.int64, device), slots[0] if follow else None)
