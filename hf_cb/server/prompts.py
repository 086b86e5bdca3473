"""From what a client sent to token ids: chats through the model's template, texts through its tokenizer."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from typing import Any

from hf_cb.server.errors import refused, too_long
from hf_cb.server.protocol import ChatBody, CompletionBody, Message
from hf_cb.text import has_byte_pieces


class Prompts:
    """A tokenizer of its own, since a fast one may not be set up for a text while others decode with it; from any thread.

    The methods take as long as a text is long, but for one that has more than `limit` tokens for sure: they are not for an
    event loop. They raise ApiError.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._longest = _longest_piece(tokenizer)
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}

    def chat(self, body: ChatBody, limit: int) -> list[int]:
        """The ids of a conversation, at whose end an answer is expected."""
        variables = body.chat_template_kwargs or {}
        if taken := sorted(self._reserved & variables.keys()):
            raise refused("chat_template_kwargs", f"takes variables of the template's own; got {taken[0]}")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else []
        with self._lock:
            template = self._template(tools)
            if tools and "tools" not in template:
                raise refused("tools", "takes none with this model, whose chat template has no place for them")
            messages = [_for_template(i, message, template) for i, message in enumerate(body.messages)]
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **variables
                )
            except Exception as error:  # a template is a program of the model's, and refuses in ways of its own
                raise refused("messages", f"the model's chat template does not take them: {error}") from error
            return self._ids(text, "messages", limit, add_special_tokens=False)

    def completion(self, body: CompletionBody, limit: int) -> list[list[int]]:
        """The ids of each prompt."""
        found = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                with self._lock:
                    prompt = self._ids(prompt, "prompt", limit)
            found.append(prompt)
        return found

    def _template(self, tools: list[Any]) -> str:
        try:
            return str(self._tokenizer.get_chat_template(tools=tools or None))
        except ValueError:
            raise refused("messages", "this model has no chat template; use /v1/completions", "no_template") from None

    def _ids(self, text: str, param: str, limit: int, **options: Any) -> list[int]:
        if self._longest is not None and len(text) > limit * self._longest:
            raise too_long(param, limit, f"a text of {len(text)} characters")
        try:
            ids = list(self._tokenizer(text, **options)["input_ids"])
        except Exception as error:  # as for half of a surrogate pair
            raise refused(param, f"the model's tokenizer does not take this text: {error}") from error
        if not ids:
            raise refused(param, "takes at least one token")
        return ids


def _for_template(index: int, message: Message, template: str) -> dict[str, Any]:
    """A message as templates expect it: one text, and the arguments of tool calls as objects."""
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    named = message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    found: dict[str, Any] = {"role": role, "content": content or "", **named}
    if message.tool_calls:
        place = f"messages[{index}].tool_calls"
        if "tool_calls" not in template:
            raise refused(place, "takes none with this model, whose chat template has no place for them")
        calls = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        for number, call in enumerate(calls):
            call["function"]["arguments"] = _arguments(f"{place}[{number}]", call["function"]["arguments"])
        found["tool_calls"] = calls
    return found


def _arguments(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise refused(f"{place}.function.arguments", "takes JSON") from None


def _longest_piece(tokenizer: Any) -> int | None:
    """The most characters that a token may stand for; None: that can't be told."""
    if not has_byte_pieces(tokenizer) or any(t.lstrip or t.rstrip for t in tokenizer.added_tokens_decoder.values()):
        return None
    composed = {"NoneType": 1, "NFC": 4}.get(type(tokenizer.backend_tokenizer.normalizer).__name__)
    return None if composed is None else composed * max(map(len, tokenizer.get_vocab()))
