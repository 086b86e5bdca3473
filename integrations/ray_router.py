"""Which replica answers: the one that knows the session's beginning, else the one with less to do."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):
    """Ray's consistent hashing for requests with a session id, the less busy of two replicas for the others.

    A session is what the header `x-session-id` says (Ray reads its name from RAY_SERVE_SESSION_ID_HEADER_KEY). Its turns
    find their keys and values in the prefix cache of the replica that computed them. When that one is full, the next on
    the ring takes the request; when a replica comes or goes, only its own sessions move.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replicas to ask, in ranks; of those in one rank the least busy is taken."""
        if pending_request is None or pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
