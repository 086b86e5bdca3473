"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import TypedDict

from hf_cb.request import TokenLogprobs
from hf_cb.text import has_byte_pieces

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST = -9999.0  # OpenAI's figure for what has no probability: JSON has none for minus infinity, and none for NaN


class TopLogprob(TypedDict):
    """One of the most probable tokens. `bytes`: its part of the text in UTF-8, which may be less than a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message, or of a piece of it."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Lists of the same length. `text_offset`: where each token's text begins in the choice's; None: before the first token of
    an echoed prompt comes nothing that it could have a probability after."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenTexts:
    """What each token of a tokenizer stands for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)  # they have no place in an answer's text
        self._added = frozenset(tokenizer.get_added_vocab().values())
        self._bytes_of = _byte_alphabet() if has_byte_pieces(tokenizer) else None

    def bytes_of(self, token: int) -> bytes:
        """Its part of the text, in UTF-8."""
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if token in self._added:
            return bytes(piece.encode())
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char, char.encode()) for char in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return bytes(piece.replace("▁", " ").encode())

    def text_of(self, token: int) -> str:
        r"""Its text; one that is less than a character as "bytes:\xe2\x80", as OpenAI's API has it."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Log-probabilities in the form of chats."""
        content: list[TokenLogprob] = [
            {
                **self._top(token, found.logprob),
                "top_logprobs": [self._top(*top) for top in zip(found.top_ids, found.top_logprobs, strict=True)],
            }
            for token, found in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int) -> CompletionLogprobs:
        """The form of completions, of tokens whose text begins at `offset`. The token that came is always among the most
        probable ones."""
        return {
            "tokens": [self.text_of(token) for token in tokens],
            "token_logprobs": [None if found is None else _finite(found.logprob) for found in logprobs],
            "top_logprobs": [
                None if found is None else self._tops(token, found) for token, found in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": list(self._offsets(tokens, offset)),
        }

    def _offsets(self, tokens: Sequence[int], offset: int) -> Iterator[int]:
        """Where each token's text begins; a character belongs to the token that completes it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield offset
            if token not in self._special:
                offset += len(decoder.decode(self.bytes_of(token)))

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return {"token": self.text_of(token), "logprob": _finite(logprob), "bytes": list(self.bytes_of(token))}

    def _tops(self, token: int, found: TokenLogprobs) -> dict[str, float]:
        pairs = [*zip(found.top_ids, found.top_logprobs, strict=True), (token, found.logprob)]
        return {self.text_of(top): _finite(logprob) for top, logprob in pairs}


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # NaN too


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's: printable characters of Latin-1 stand for themselves, the other bytes for characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): bytes([byte]) for byte in plain} | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
