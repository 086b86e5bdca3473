"""Text as it comes: a handle's tokens, decoded piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hf_cb.handle import GenerationHandle

_BROKEN = "\ufffd"  # what decoders put for bytes that are no character, or not yet
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def stream_text(handle: GenerationHandle, tokenizer: Any, *, skip_special_tokens: bool = True, **decode: Any) -> Iterator[str]:
    """Yield the text of a request as it comes, in pieces that are never empty and never hold half a character.

    Joined, they are exactly `tokenizer.decode(tokens, skip_special_tokens=..., **decode)` of all output tokens: a character
    that the whole has as a replacement character, since its bytes are none, is one here too. `tokenizer`: one of transformers',
    slow or fast. Raises what the handle raises, after the text that came before.
    """
    growing = GrowingText(TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens, **decode))
    sent = taken = 0
    for _ in handle:
        tokens = handle.tokens
        if len(tokens) == taken:  # taken with an earlier one: a reader that is slower than the engine decodes less often
            continue
        taken = len(tokens)
        text = growing.settled(tokens)
        if len(text) > sent:
            yield text[sent:]
            sent = len(text)
    rest = growing.whole(handle.tokens)[sent:]
    if rest:
        yield rest


def has_byte_pieces(tokenizer: Any) -> bool:
    """Whether its pieces are written in GPT-2's alphabet, a character for each byte, and read as those bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.decoder).__name__ == "ByteLevel"


class TextDecoder:
    """A tokenizer and how to decode with it. What a token reads as may depend on those before it."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """`options`: of the tokenizer's `decode`."""
        self._tokenizer = tokenizer
        self._options = {"skip_special_tokens": True, **options}
        self._skipped = frozenset(tokenizer.all_special_ids) if self._options["skip_special_tokens"] else frozenset()
        clean = options.get("clean_up_tokenization_spaces")
        self._cleans = tokenizer.clean_up_tokenization_spaces if clean is None else clean

    @property
    def is_additive(self) -> bool:
        """Whether the text of some tokens is that of the first ones and that of the rest, wherever a character ends: where
        pieces are bytes and nothing else."""
        return has_byte_pieces(self._tokenizer) and not self._cleans

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        text: str = self._tokenizer.decode(list(tokens), **self._options)
        return text

    def settled(self, tokens: Sequence[int]) -> str:
        """The part of their text that stays as it is, whatever tokens follow."""
        text = self.decode(tokens[: self._end(tokens)]).rstrip(_BROKEN)
        if self._cleans:  # a word that follows may close up with the last one
            text = text[: max(0, text.rfind(" "))]
        return text

    def _end(self, tokens: Sequence[int]) -> int:
        """Where a run of byte tokens at the end begins: one bad byte would break all of its characters."""
        end = len(tokens)
        for index in range(len(tokens) - 1, -1, -1):
            if tokens[index] in self._skipped:
                continue
            if not _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(tokens[index]) or ""):
                break
            end = index
        return end


class GrowingText:
    """The text of one request's tokens, as they become more. Each is decoded once where texts add up, else all at each turn."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._is_additive = decoder.is_additive
        self._known = ""  # the text of the first `_num_known` tokens, which end with a whole character
        self._num_known = 0

    def settled(self, tokens: Sequence[int]) -> str:
        """The part of their text that stays as it is, whatever tokens follow."""
        if not self._is_additive:
            return self._decoder.settled(tokens)
        text = self._decoder.decode(tokens[self._num_known :])
        if text.endswith(_BROKEN):
            return self._known + text.rstrip(_BROKEN)
        self._known += text
        self._num_known = len(tokens)
        return self._known

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all, when no more will come."""
        return self._known + self._decoder.decode(tokens[self._num_known :])
