"""Fair: tenants share the engine by what they are served, not by how much they ask for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from typing_extensions import override

from hf_cb.core.policy import Policy
from hf_cb.core.sequence import Sequence

PROMPT_COST, OUTPUT_COST = 1, 2  # per token, as in the paper: an output token takes a step, prompt tokens share one
_MOST_IDLE = 1024  # tenants whose counter is kept although they ask for nothing


class Fair(Policy):
    """Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).

    Each tenant has a counter of the tokens that it was served, weighted by kind. Next comes the first request of the waiting
    tenant with the lowest counter. A tenant that comes back after it asked for nothing is lifted to the lowest of those that
    wait: idle time cannot be saved up. Of two tenants that both have requests waiting, neither is ever served more than
    2 x max(PROMPT_COST x longest prompt, OUTPUT_COST x most tokens in a batch) more than the other (theorem 4.4).

    Preempted is the latest of the running tenant that was served most. A request without a tenant belongs to one that all
    such requests share.
    """

    def __init__(self) -> None:
        self._queues: dict[str | None, OrderedDict[int, Sequence]] = {}  # of tenants with something waiting
        self._served: dict[str | None, int] = {}
        self._last: str | None = None  # the tenant whose queue was the latest to become empty
        self._count = 0

    @override
    def enqueue(self, seq: Sequence) -> None:
        self._queue(seq)[seq.request_id] = seq
        self._count += 1

    @override
    def put_back(self, seq: Sequence) -> None:
        queue = self._queue(seq)
        queue[seq.request_id] = seq
        queue.move_to_end(seq.request_id, last=False)
        self._count += 1

    @override
    def remove(self, seq: Sequence) -> None:
        tenant = seq.request.service.tenant
        queue = self._queues[tenant]
        del queue[seq.request_id]
        self._count -= 1
        if not queue:
            del self._queues[tenant]
            self._last = tenant

    @override
    def next_waiting(self) -> Sequence | None:
        if not self._queues:
            return None
        tenant = min(self._queues, key=self._served.__getitem__)
        return next(iter(self._queues[tenant].values()))

    @override
    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (self._served.get(seq.request.service.tenant, 0), seq.arrival))

    @override
    def charge(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        tenant = seq.request.service.tenant
        cost = PROMPT_COST * prompt_tokens + OUTPUT_COST * output_tokens
        self._served[tenant] = self._served.get(tenant, 0) + cost

    def __len__(self) -> int:
        return self._count

    def _queue(self, seq: Sequence) -> OrderedDict[int, Sequence]:
        tenant = seq.request.service.tenant
        if tenant not in self._queues:
            self._lift(tenant)
            self._queues[tenant] = OrderedDict()
        return self._queues[tenant]

    def _lift(self, tenant: str | None) -> None:
        level = min((self._served[t] for t in self._queues), default=self._served.get(self._last, 0))
        self._served[tenant] = max(self._served.get(tenant, 0), level)
        if len(self._served) > _MOST_IDLE + len(self._queues):
            # Those below the level would be lifted to it anyway when they come back.
            keep = {tenant, self._last, *self._queues}
            self._served = {t: n for t, n in self._served.items() if t in keep or n > level}
