"""Lockstep: the ranks of a tensor-parallel model, which compute the same steps at the same time.

Each rank holds a part of every weight, and of the keys and values; the layers' own collectives join the parts. Rank 0 leads: it
has the scheduler and the sampler, and sends every step before it computes it. The others follow: they compute it too and
forget the logits. A step has the tokens that were sampled before, so nothing else has to be sent. What is sent goes through a
group of its own on the CPU (gloo), where waiting costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_cb.core.output import SchedulerOutput
from hf_cb.errors import EngineDeadError

# A follower may wait as long for the next step; a rank that dies is noticed at once all the same.
_FOR_EVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Step:
    """Compute this. `wanted`: request id -> positions in this step whose logits are wanted beside the last one's."""

    output: SchedulerOutput
    wanted: Mapping[int, range]


@dataclass(frozen=True, slots=True)
class ReleaseKV:
    """Give the memory of the KV cache back until the next step."""


@dataclass(frozen=True, slots=True)
class End:
    """There are no more steps. `error`: why, if that is a failure."""

    error: str | None = None


Order = Step | ReleaseKV | End


class Lockstep:
    """A rank's end of the channel. Made by all ranks of `group`, a model's tensor-parallel group, at the same time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(ranks)
        self._leader = ranks[0]  # its number among all processes
        some = self.size < dist.get_world_size()
        self._channel = dist.new_group(ranks, backend="gloo", timeout=_FOR_EVER, use_local_synchronization=some)
        self._ended = False
        self._lock = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks bring. Called by all."""
        tensor = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._channel)
        return int(tensor)

    def send(self, order: Order) -> None:
        """Rank 0: tell the others what comes next. Raises EngineDeadError when one of them is gone."""
        with self._lock:
            if self._ended:
                return
            self._ended = isinstance(order, End)
            try:
                dist.broadcast_object_list([order], src=self._leader, group=self._channel)
            except RuntimeError as error:
                self._ended = True
                raise lost(error) from error

    def receive(self) -> Order:
        """The others: wait for what comes next. Raises EngineDeadError when rank 0 is gone."""
        received: list[Order] = [End()]
        try:
            dist.broadcast_object_list(received, src=self._leader, group=self._channel)
        except RuntimeError as error:
            raise lost(error) from error
        return received[0]


def lost(error: BaseException) -> EngineDeadError:
    """What every rank raises when one fails: a collective that not all take part in leaves them all without a result."""
    return EngineDeadError(f"a rank of the tensor-parallel model is lost, or failed in a step: {error}")
