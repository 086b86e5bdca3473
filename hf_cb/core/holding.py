"""Holding: what one sequence has of the KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from hf_cb.core.prefix import PrefixNames


class Start(NamedTuple):
    """What a sequence begins with: blocks that others have computed, and the tokens that they hold for it."""

    blocks: tuple[int, ...]
    num_tokens: int
    state: int | None = None  # the slot with the state after those, of a model with states


@dataclass(slots=True)
class Holding:
    """Written by the memory alone. A sequence that waits holds no blocks, but maybe copies of them on the host."""

    block_table: tuple[int, ...] = ()  # a tuple, so that a step's rows can hold it as it is until it grows
    num_shed: tuple[int, ...] = ()  # stretches of blocks given back, by group of layers that look back only so far
    host_blocks: tuple[int | None, ...] = ()  # where the keys and values of its first `num_swapped_tokens` tokens wait
    num_swapped_tokens: int = 0
    num_published: int | None = 0  # of its blocks; None: no more of what it holds may be published
    names: PrefixNames | None = None  # made when there is a use for them
    states: tuple[tuple[int, int], ...] = ()  # (number of tokens, slot with the state after them), the latest last
    saves: tuple[int, ...] = ()  # numbers of tokens, of which the states are to be found by others
    rolling: Hashable = None  # what the latest state of its output is saved under
    host_state: int | None = None  # the slot of the host in which its state waits
