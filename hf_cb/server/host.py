"""Host: what a server does with one of its models, from a request's body to its readings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_cb.errors import HFCBError
from hf_cb.server.errors import api_error, refused, too_long
from hf_cb.server.logprobs import TokenTexts
from hf_cb.server.models import ServedModel
from hf_cb.server.prompts import Prompts
from hf_cb.server.protocol import SAMPLING_FIELDS, ChatBody, CompletionBody
from hf_cb.server.reading import Reading
from hf_cb.server.settings import ServerSettings
from hf_cb.server.stops import StopStrings
from hf_cb.text import TextDecoder

_COLDEST = 1e-5  # below it a temperature leaves nothing but the best token, and float32 no room to divide by it


@dataclass(frozen=True, slots=True)
class Asked:
    """A request underway: `readings` are of the choices in order, `samples` of each of the `prompts`."""

    prompts: Sequence[Sequence[int]]
    readings: Sequence[Reading]
    samples: int

    def cancel(self) -> None:
        """Cancel the choices that have not ended."""
        for reading in self.readings:
            reading.handle.cancel()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(reading.num_tokens for reading in self.readings)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache had."""
        return sum(reading.handle.num_cached_tokens for reading in self.readings[:: self.samples])


class Host:
    """One model's. For one event loop."""

    def __init__(self, model: ServedModel, settings: ServerSettings) -> None:
        self.model = model
        self.texts = TokenTexts(model.tokenizer)
        self.decoder = TextDecoder(model.tokenizer)
        self._prompts = Prompts(model.tokenizer)
        self._settings = settings
        self._turn = asyncio.Lock()  # one thread for each model: a long text of one does not hold up another's

    async def ask(self, body: ChatBody | CompletionBody, service: Mapping[str, Any]) -> Asked:
        """Queue what a request asks for. `service`: how it is served, as options of `Engine.submit`. Raises ApiError."""
        async with self._turn:
            return await asyncio.to_thread(self._submit, body, service)

    def _submit(self, body: ChatBody | CompletionBody, service: Mapping[str, Any]) -> Asked:
        samples = body.n or 1
        if samples > self._settings.max_n:
            raise refused("n", f"takes at most {self._settings.max_n}; got {samples}")
        prompts = self._prompts_of(body)
        options = {**self._sampling(body), **service, "max_new_tokens": self._max_new_tokens(body, prompts)}
        try:
            handles = self.model.engine.submit_batch(prompts, samples, **options)
        except HFCBError as error:
            raise api_error(error, _params(body)) from error
        stops, by_token = StopStrings(body.stops), body.num_logprobs is not None
        return Asked(prompts, [Reading(handle, self.decoder, stops, by_token) for handle in handles], samples)

    def _prompts_of(self, body: ChatBody | CompletionBody) -> list[list[int]]:
        room = self.model.engine.max_tokens - 1
        limit = min(room, self._settings.max_prompt_tokens or room)
        if isinstance(body, ChatBody):
            prompts = [self._prompts.chat(body, limit)]
        else:
            if len(body.prompts()) > self._settings.max_prompts:
                raise refused("prompt", f"takes at most {self._settings.max_prompts} at once; got {len(body.prompts())}")
            prompts = self._prompts.completion(body, limit)
        longest = max(map(len, prompts))
        if longest > limit:
            raise too_long(_params(body)["input_ids"], limit, str(longest))
        return prompts

    def _max_new_tokens(self, body: ChatBody | CompletionBody, prompts: Sequence[Sequence[int]]) -> int:
        """As many as asked for, which the engine may find too many; by default as many as there is room for."""
        most, given = self._settings.max_new_tokens, body.max_new_tokens
        if given is not None:
            if most is not None and given > most:
                raise refused(_params(body)["max_new_tokens"], f"takes at most {most}; got {given}")
            return given
        room = self.model.engine.max_tokens - max(map(len, prompts))
        return min(value for value in (room, most, body.default_new_tokens) if value is not None)

    def _sampling(self, body: ChatBody | CompletionBody) -> dict[str, Any]:
        """Options of `Engine.submit`; what is left out comes from the model's generation config."""
        given = {
            **{name: getattr(body, field) for name, field in SAMPLING_FIELDS.items() if name not in ("temperature", "top_k")},
            "seed": body.seed,
            "cache_salt": body.cache_salt,
            "logprobs": body.num_logprobs,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if body.logit_bias:
            options["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        if body.ignore_eos:
            options["eos_token_id"] = None
        if isinstance(body, CompletionBody) and body.echo:
            options["prompt_logprobs"] = body.logprobs
        if body.temperature is not None and body.temperature < _COLDEST:
            return {**options, "do_sample": False}
        heat = {} if body.temperature is None else {"temperature": body.temperature}
        return {**options, **heat, "do_sample": True, "top_k": self._top_k(body)}

    def _top_k(self, body: ChatBody | CompletionBody) -> int:
        """Off by default, unlike transformers' own: OpenAI's API draws from all tokens, unless the model says otherwise."""
        if body.top_k is not None:
            return max(0, body.top_k)
        return getattr(getattr(self.model.model, "generation_config", None), "top_k", None) or 0


def _params(body: ChatBody | CompletionBody) -> dict[str, str]:
    """The engine's arguments -> the fields that they come from."""
    is_new = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return {
        "input_ids": "messages" if isinstance(body, ChatBody) else "prompt",
        "max_new_tokens": "max_completion_tokens" if is_new else "max_tokens",
        **SAMPLING_FIELDS,
        "timeout": "x-request-timeout",
        "priority": "x-priority",
        "tenant": "x-tenant",
    }
