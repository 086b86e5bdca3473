"""Replies: OpenAI's response objects, whole and in chunks."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from hf_cb.server.host import Asked, Host
from hf_cb.server.logprobs import ChatLogprobs, CompletionLogprobs
from hf_cb.server.protocol import ChatBody, CompletionBody
from hf_cb.server.reading import Piece


class PromptTokens(TypedDict):
    """Details of the prompt tokens of a usage."""

    cached_tokens: int


class Usage(TypedDict):
    """In tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class AnswerMessage(TypedDict):
    """What the model says. Calls of tools are in its text, in whatever form the model has for them."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(TypedDict):
    """The reply to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(TypedDict):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(TypedDict):
    """The reply to a prompt, and each chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Reply(abc.ABC):
    """The reply to one request. Only what a subclass says differs between the endpoints."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: ChatBody | CompletionBody, host: Host, asked: Asked, request_id: str) -> None:
        self.asked = asked
        self._body = body
        self._host = host
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": host.model.name}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All in one. `pieces`: each choice's."""
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a choice, as an event of the stream."""
        choice = self._chunk_choice(index, piece)
        usage = {"usage": None} if self._body.wants_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": [choice], **usage}

    def last_chunk(self) -> dict[str, Any] | None:
        """What follows when all choices have ended."""
        if not self._body.wants_usage:
            return None
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}

    def _usage(self) -> Usage:
        prompt, output = sum(map(len, self.asked.prompts)), self.asked.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.asked.num_cached_tokens},
        }

    def _choice(self, index: int, piece: Piece) -> Any:
        """A choice as the whole reply has it."""
        return self._chunk_choice(index, piece)

    @abc.abstractmethod
    def _chunk_choice(self, index: int, piece: Piece) -> Any:
        """A choice as an event of the stream has it."""


class ChatReply(Reply):
    """Replies of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, piece: Piece) -> Any:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self._end(index, piece)}

    def _chunk_choice(self, index: int, piece: Piece) -> Any:
        role = {"role": "assistant"} if piece.first == 0 else {}
        return {"index": index, "delta": {**role, "content": piece.text}, **self._end(index, piece)}

    def _end(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._body.num_logprobs is not None:
            handle, tokens = self.asked.readings[index].handle, slice(piece.first, piece.end)
            logprobs = self._host.texts.chat(handle.tokens[tokens], handle.logprobs[tokens])
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}


class CompletionReply(Reply):
    """Replies of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _chunk_choice(self, index: int, piece: Piece) -> Any:
        echo = self._echo(index) if self._is_echo and piece.first == 0 else ""
        logprobs = None if self._body.num_logprobs is None else self._logprobs(index, piece, echo)
        text = echo + piece.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    @property
    def _is_echo(self) -> bool:
        return isinstance(self._body, CompletionBody) and bool(self._body.echo)

    def _echo(self, index: int) -> str:
        assert isinstance(self._body, CompletionBody)
        given = self._body.prompts()[index // self.asked.samples]
        return given if isinstance(given, str) else self._host.decoder.decode(given)

    def _logprobs(self, index: int, piece: Piece, echo: str) -> CompletionLogprobs:
        handle, texts = self.asked.readings[index].handle, self._host.texts
        tokens = handle.tokens[piece.first : piece.end]
        found = texts.completion(tokens, handle.logprobs[piece.first : piece.end], len(echo) + piece.offset)
        if not self._is_echo or piece.first > 0:
            return found
        before = texts.completion(self.asked.prompts[index // self.asked.samples], handle.prompt_logprobs or (), 0)
        return {name: [*before[name], *found[name]] for name in before}  # type: ignore[return-value, literal-required]
