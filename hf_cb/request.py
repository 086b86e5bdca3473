"""Request: one row of one call, as data. Frozen, so that any thread may read it."""

from __future__ import annotations

import enum
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

_ids = itertools.count()


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # it produced one of its end-of-sequence tokens, or a criterion of its own was met
    LENGTH = "length"  # it reached max_new_tokens
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy.

    The fields are applied in this order, which is transformers' own where it has them; those from `temperature` on only if
    `do_sample`.
    `seed` is the seed of this request's own generator, so that its samples depend on nothing else.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    repetition_penalty: float = 1.0  # of the tokens of prompt and output so far (Keskar et al., 2019, CTRL); 1.0: off
    frequency_penalty: float = 0.0  # taken off a token's logit for each time that it is in the output so far (OpenAI's API)
    presence_penalty: float = 0.0  # taken off once if it is there
    min_new_tokens: int = 0  # before them no end-of-sequence token comes
    suppress_tokens: tuple[int, ...] = ()  # never come
    begin_suppress_tokens: tuple[int, ...] = ()  # don't come first
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1.0: off
    min_p: float = 0.0  # of the most probable token's probability; 0.0: off
    seed: int = 0


class RowRules(Protocol):
    """What a request brings of its own to choose its tokens by. Called on the engine's thread alone, once per token each, in
    whatever modes that has; it sees to its own.

    An exception in either ends the request, and no other.
    """

    def process(self, logits: Any) -> Any:
        """The scores, float32 [1, vocab], that the fields of SamplingParams go on with; `logits` are not to be changed.

        Scores of another width or dtype are final: the token is chosen by them as they are.
        """

    def accept(self, token: int, scores: Any) -> bool:
        """Take note of the chosen token and the final scores [1, vocab] it was chosen by. True: the request ends with it."""

    def close(self) -> None:
        """The request has ended, in whatever way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a `Search` has chosen after a step: beam i goes on from beam `parents[i]` of before, with `tokens[i]`.

    `best`: set when the search has ended: the output tokens of the best beam. `parents` and `tokens` then mean nothing.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    best: tuple[int, ...] | None = None


class Search(Protocol):
    """Decides how several beams of one request go on, all at once. Called on the engine's thread alone, once per step of all,
    in whatever modes that has; it sees to its own.

    An exception in `choose` ends the request, and no other.
    """

    width: int  # beams
    num_chosen: int  # how often it has chosen: output tokens of each beam

    def choose(self, logits: Any) -> Choice:
        """From the logits [width, vocab] after each beam's last token; [1, vocab] the first time, after the prompt."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability under the model's own distribution (the softmax of its logits, in float32, before
    temperature and all other options), and the `len(top_ids)` most probable tokens with theirs, the most probable first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenNote:
    """What a request's caller gets with one token; `prompt_logprobs` with the first token alone."""

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


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
    `logprobs`, `prompt_logprobs`: how many of the most probable tokens to report at each place of the output, and of the
    prompt; None: nothing. `rules`: applied before the fields of `sampling`. `search`: chooses for several beams of this request
    in the place of `sampling`, `rules` and `eos_token_ids`. `fork_of`: the id of a request with the same prompt, whose blocks
    it begins with if that one is running.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    deadline: float | None = None
    service: Service = Service()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rules: RowRules | None = field(default=None, compare=False, repr=False)
    search: Search | None = field(default=None, compare=False, repr=False)
    fork_of: int | None = None
    request_id: int = field(default_factory=lambda: next(_ids))  # unique in the process: nothing a caller can clash

    @property
    def width(self) -> int:
        """Sequences that it is at the most: its beams, or one."""
        return 1 if self.search is None else self.search.width

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output together at the longest."""
        return len(self.prompt) + self.max_new_tokens

    def ends_with(self, token: int | None, num_tokens: int) -> FinishReason | None:
        """Why it ends with this token, its `num_tokens`-th of prompt and output; None: it goes on."""
        if token in self.eos_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens == self.max_tokens else None
