"""Reading: turns the tokens of a request into the text, stops and log-probabilities of its answer, as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from hf_cb.handle import GenerationHandle
from hf_cb.request import FinishReason
from hf_cb.server.stops import StopStrings
from hf_cb.text import GrowingText, TextDecoder

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: `text`, in whole characters, and the tokens from `first` to before `end`, which are told of with it
    though their text may come later. `offset`: where in the answer's text they begin. `finish_reason`: set on the last one."""

    text: str
    first: int
    end: int
    offset: int
    finish_reason: str | None = None


class Reading:
    """One answer, read once. `by_token`: in a piece for each token, however slowly it is read."""

    def __init__(self, handle: GenerationHandle, decoder: TextDecoder, stops: StopStrings, by_token: bool) -> None:
        self.handle = handle
        self.num_tokens = 0  # that the answer is made of so far: what comes after a stop string doesn't count
        self._text = GrowingText(decoder)
        self._stops = stops
        self._by_token = by_token
        self._sent = 0  # characters
        self._told = (0, 0)  # tokens that came with a piece, and where their text ended

    async def whole(self) -> Piece:
        """The answer in one piece. Raises what the handle raises."""
        if not self._stops:
            await self.handle
            return self._last(self.handle.tokens)
        pieces = [piece async for piece in self.pieces()]
        return Piece("".join(piece.text for piece in pieces), 0, self.num_tokens, 0, pieces[-1].finish_reason)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer as it comes: pieces that have text, or, if each is to have one, a token. Raises what the handle raises,
        after the pieces that came before."""
        async for _ in self.handle:
            for tokens in self._fresh():
                text = self._text.settled(tokens)
                piece = self._piece(text, len(tokens), None)
                if piece.finish_reason:
                    self.handle.cancel()
                    yield piece
                    return
                if piece.text or self._by_token:
                    self._told = (len(tokens), len(text))
                    yield piece
        yield self._last(self.handle.tokens)

    def _fresh(self) -> Iterator[tuple[int, ...]]:
        """The tokens so far, if there are new ones: all of them, or, where each one counts, up to each of the new ones."""
        tokens = self.handle.tokens
        if self._by_token or self._stops:
            yield from (tokens[:end] for end in range(self.num_tokens + 1, len(tokens) + 1))
        elif len(tokens) > self.num_tokens:
            yield tokens

    def _last(self, tokens: tuple[int, ...]) -> Piece:
        reason = self.handle.finish_reason
        assert reason is not None
        return self._piece(self._text.whole(tokens), len(tokens), _REASONS[reason])

    def _piece(self, text: str, end: int, reason: str | None) -> Piece:
        """What is new in the answer `text` of `end` tokens."""
        cut = self._stops.find(text, self._sent)
        if cut is not None:
            text, reason = text[:cut], "stop"
        safe = len(text) if reason else max(self._sent, len(text) - self._stops.held(text))
        first, offset = self._told
        piece = Piece(text[self._sent : safe], first, end, offset, reason)
        self._sent, self.num_tokens = safe, end
        return piece
