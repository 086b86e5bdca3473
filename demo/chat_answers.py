"""From a conversation to its answer, as text that grows: a request of the engine for each turn, for many users at once."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import hf_cb

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}"""

_MOST_READERS = 4096  # threads are made as they are needed; one that waits for a token costs next to nothing


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is chosen. A temperature of 0 takes the most probable token each time."""

    max_new_tokens: int = 256
    temperature: float = 0.2
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """Those of `Engine.submit`."""
        draws = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            **(draws if self.temperature > 0 else {"do_sample": False}),
        }


class ChatError(Exception):
    """An answer that can't be given. The message is for the user."""


class Answers:
    """Answers of one engine. `stream` and `leave` are for one event loop."""

    def __init__(self, engine: hf_cb.Engine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._encoder = copy.deepcopy(tokenizer)  # a fast tokenizer may not be set up for a text while others decode with it
        self._encoding = threading.Lock()
        self._readers = ThreadPoolExecutor(_MOST_READERS, thread_name_prefix="chat-reader")
        self._running: defaultdict[str, set[hf_cb.GenerationHandle]] = defaultdict(set)  # by user

    async def stream(self, user: str, conversation: Sequence[Message], sampling: Sampling) -> AsyncIterator[str]:
        """The answer so far, each time that there is more of it. Raises ChatError.

        Whoever ends it early, or whose task is cancelled, frees what the engine holds for it.
        """
        try:
            handle = self._engine.submit(self._encode(conversation), **sampling.options())
        except hf_cb.HFCBError as error:
            raise ChatError(in_words(error)) from error
        self._running[user].add(handle)
        pieces = hf_cb.stream_text(handle, self._tokenizer)
        answer = ""
        try:
            while piece := await asyncio.get_running_loop().run_in_executor(self._readers, next, pieces, ""):
                answer += piece
                yield answer
        except hf_cb.RequestCancelledError:
            return  # the user has left
        except hf_cb.HFCBError as error:
            raise ChatError(in_words(error)) from error
        finally:
            handle.cancel()
            self._running[user].discard(handle)
            if not self._running[user]:
                del self._running[user]

    def leave(self, user: str) -> None:
        """End all that runs for a user who is gone, what still waits for its first token too."""
        for handle in self._running.pop(user, ()):
            handle.cancel()

    def close(self) -> None:
        """End everything."""
        for user in list(self._running):
            self.leave(user)
        self._readers.shutdown()

    def _encode(self, conversation: Sequence[Message]) -> list[int]:
        try:
            with self._encoding:
                encoded = self._encoder.apply_chat_template(list(conversation), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program of the model's, and refuses in ways of its own
            raise ChatError(f"The model's chat template does not take this conversation: {error}") from error
        return list(encoded["input_ids"])


def in_words(error: hf_cb.HFCBError) -> str:
    """What a user can do about it."""
    if isinstance(error, hf_cb.RequestTooLongError):
        return f"This conversation has become too long for the model. Begin a new one, or ask for a shorter answer. ({error})"
    if isinstance(error, hf_cb.EngineOverloadedError):
        return f"Too many people are waiting at the moment. Try again in a little while. ({error})"
    if isinstance(error, hf_cb.RequestTimeoutError):
        return f"The answer took too long and was given up. ({error})"
    if isinstance(error, hf_cb.InvalidArgumentError):
        return f"One of the settings can't be used: {error}"
    if isinstance(error, (hf_cb.EngineDeadError, hf_cb.EngineClosedError)):
        return f"The model has stopped. Whoever runs this page has to start it again. ({error})"
    return f"The answer could not be computed: {error}"
