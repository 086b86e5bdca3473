"""Reading: from a request's tokens to the pieces of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from hf_cb.handle import GenerationHandle
from hf_cb.request import FinishReason
from hf_cb.server.stops import StopStrings
from hf_cb.text import TextDecoder

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: `text`, which has whole characters alone, and the tokens from `first` to before `end`, which come
    with it though their text may come later. `offset`: characters of the answer that were settled before `first`.
    `finish_reason`: set on the last one."""

    text: str
    first: int
    end: int
    offset: int
    finish_reason: str | None = None


class Reading:
    """One answer, read once. `by_token`: a piece for each token, whoever reads how slowly."""

    def __init__(self, handle: GenerationHandle, decoder: TextDecoder, stops: StopStrings, by_token: bool) -> None:
        self.handle = handle
        self.num_tokens = 0  # that the answer is made of: those after a stop string don't count
        self._decoder = decoder
        self._stops = stops
        self._by_token = by_token
        self._sent = self._settled = 0  # characters

    async def whole(self) -> Piece:
        """The answer in one piece."""
        if not self._stops:
            await self.handle
            return self._last(self.handle.tokens)
        pieces = [piece async for piece in self.pieces()]
        return Piece("".join(piece.text for piece in pieces), 0, self.num_tokens, 0, pieces[-1].finish_reason)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes: pieces with text, or with tokens if each is to have one; the last with the reason. Raises
        what the handle raises, after the pieces that came before."""
        async for _ in self.handle:
            for tokens in self._fresh():
                piece = self._next(tokens)
                if piece.text or self._by_token or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    self.handle.cancel()
                    return
        yield self._last(self.handle.tokens)

    def _fresh(self) -> Iterator[tuple[int, ...]]:
        """The tokens so far, where there are new ones: all, or, where each counts, up to each new one."""
        tokens = self.handle.tokens
        step = 1 if self._by_token or self._stops else len(tokens) - self.num_tokens
        return (tokens[:end] for end in range(self.num_tokens + step, len(tokens) + 1, step or 1) if step)

    def _next(self, tokens: tuple[int, ...]) -> Piece:
        return self._piece(self._decoder.settled(tokens), len(tokens), None)

    def _last(self, tokens: tuple[int, ...]) -> Piece:
        reason = self.handle.finish_reason
        assert reason is not None
        return self._piece(self._decoder.decode(tokens), len(tokens), _REASONS[reason])

    def _piece(self, text: str, end: int, reason: str | None) -> Piece:
        first, offset = self.num_tokens, self._settled
        cut = self._stops.find(text, self._sent)
        if cut is not None:
            text, reason = text[:cut], "stop"
        safe = len(text) - (0 if reason else self._stops.held(text))
        piece = Piece(text[self._sent : safe], first, end, offset, reason)
        self._sent, self._settled, self.num_tokens = max(self._sent, safe), len(text), end
        return piece
