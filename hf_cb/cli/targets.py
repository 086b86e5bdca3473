"""Targets of `hf-cb bench`: what answers its requests, in this process or behind a URL, and when each token came."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hf_cb.cli.http import Http
from hf_cb.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hf_cb.server.models import ServedModel

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Answered:
    """One request. Times are on `time.perf_counter()`'s clock, in seconds."""

    submitted_at: float
    first_token_at: float
    finished_at: float
    num_prompt_tokens: int
    num_output_tokens: int


class Target(Protocol):
    """Whom requests are put to. `ask` may be called from any number of threads."""

    def ask(self, index: int) -> Answered:
        """Put request number `index`, the same for the same number, and wait for its end."""


class EngineTarget:
    """An engine of this process. Prompts are random tokens, and answers have exactly the length that was asked for."""

    def __init__(self, served: ServedModel, prompt_tokens: int, new_tokens: int) -> None:
        self._served = served
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        special = set(served.tokenizer.all_special_ids)
        self._ids = [token for token in range(len(served.tokenizer)) if token not in special]

    def prompt(self, index: int) -> list[int]:
        """Token ids that no two requests begin with alike."""
        return random.Random(index).choices(self._ids, k=self._prompt_tokens)

    def ask(self, index: int) -> Answered:
        """Answer by `Engine.submit`."""
        options = {"max_new_tokens": self._new_tokens, "eos_token_id": None, "do_sample": False}
        result = self._served.engine.submit(self.prompt(index), **options).result()
        times = (result.submitted_at, result.first_token_at, result.finished_at)
        return Answered(*times, result.num_prompt_tokens, len(result.tokens))

    def plain_rate(self, num_requests: int) -> float:
        """Output tokens per second of the model's own generate, one call after the other, as behind a lock."""
        import torch

        from hf_cb.backend import plain_generate

        generate, device = plain_generate(self._served.model), self._served.model.device
        length = {"max_new_tokens": self._new_tokens, "min_new_tokens": self._new_tokens}
        seconds = 0.0
        for index in range(-1, num_requests):  # the first finds cold caches
            prompt = torch.tensor([self.prompt(max(0, index))], device=device, dtype=torch.int64)
            began = time.perf_counter()
            generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)
            seconds += time.perf_counter() - began if index >= 0 else 0.0
        return num_requests * self._new_tokens / seconds


class ServerTarget:
    """A server that speaks OpenAI's API. Prompts are random words; an answer may end before the length that was asked for."""

    def __init__(self, http: Http, model: str | None, prompt_tokens: int, new_tokens: int) -> None:
        """`model`: the server's first if None. Raises ConnectionError."""
        self._http = http
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self.model = model or _first_model(http)

    def ask(self, index: int) -> Answered:
        """Through /v1/chat/completions, streaming. Raises ConnectionError."""
        words = random.Random(index).choices(_WORDS, k=self._prompt_tokens)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": self._new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        first, usage = None, None
        for event in self._http.stream("/v1/chat/completions", body):
            if "error" in event:
                raise ConnectionError(f"{self._http.url}: {event['error']}")
            usage = event.get("usage") or usage
            if first is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                first = time.perf_counter()
        ended = time.perf_counter()
        if usage is None:
            raise ConnectionError(f"{self._http.url}: an answer came without its usage; it broke off, or the server tells none")
        return Answered(began, first or ended, ended, usage["prompt_tokens"], usage["completion_tokens"])


def _first_model(http: Http) -> str:
    try:
        models: Any = json.loads(http.get("/v1/models"))["data"]
        return str(models[0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise InvalidArgumentError(f"URL: {http.url}/v1/models names no model; is it a server of OpenAI's API?") from None
