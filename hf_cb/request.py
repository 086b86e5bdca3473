"""Request: one row of one call, as data. Frozen, so that any thread may read it."""

from __future__ import annotations

import enum
import itertools
import time
from dataclasses import dataclass, field

_ids = itertools.count()


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # it produced one of its end-of-sequence tokens
    LENGTH = "length"  # it reached max_new_tokens
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy.

    The fields are applied in this order, which is transformers' own: `min_new_tokens`, then, if `do_sample`,
    `temperature`, `top_k` (0: off) and `top_p` (1.0: off).
    `seed` is the seed of this request's own generator, so that its samples depend on nothing else.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """How a request is served; no token depends on it.

    `priority`: lower is sooner, under the policy "priority". `tenant`: whose it is, under the policy "fair".
    `cache_salt`: keys and values are shared only between requests with the same salt. `timeout`: seconds until it ends with
    RequestTimeoutError.
    """

    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def deadline(self) -> float | None:
        """`timeout` from now, on `time.monotonic()`'s clock."""
        return None if self.timeout is None else time.monotonic() + self.timeout


@dataclass(frozen=True, slots=True)
class Request:
    """One row of one call: the prompt, where to stop, how to choose tokens.

    `prompt`: at least one token id. `max_new_tokens`: at least one. `eos_token_ids`: any of these ends the sequence
    (the token itself is part of the result); empty: only the length ends it. `deadline`: on `time.monotonic()`'s clock.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    deadline: float | None = None
    service: Service = Service()
    request_id: int = field(default_factory=lambda: next(_ids))  # unique in the process: nothing a caller can clash

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output together at the longest."""
        return len(self.prompt) + self.max_new_tokens
