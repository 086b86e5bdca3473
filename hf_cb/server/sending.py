"""Sending: replies whole and as server-sent events, for as long as the client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hf_cb.errors import HFCBError
from hf_cb.server.errors import api_error
from hf_cb.server.reading import Piece, Reading
from hf_cb.server.replies import Reply
from hf_cb.server.waiting import end, while_there

Ask = Callable[[], Awaitable[Reply]]
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies are not to wait for more


class _LaterReply(Response):
    """A response that asks only when it is called."""

    def __init__(self, ask: Ask) -> None:
        self.background = None
        self._ask = ask


class WholeReply(_LaterReply):
    """Asks, waits for all choices, and answers in one JSON object. When the client leaves, what runs for it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError while nothing was sent."""
        content = await while_there(receive, self._content())
        await JSONResponse(content)(scope, receive, send)

    async def _content(self) -> dict[str, Any]:
        reply = await self._ask()
        try:
            return reply.whole(await asyncio.gather(*(reading.whole() for reading in reply.asked.readings)))
        except HFCBError as error:
            raise api_error(error) from error
        finally:
            reply.asked.cancel()


class StreamedReply(_LaterReply):
    """Asks, and sends each piece as it comes. The status waits for the first piece: what fails before has its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError while nothing was sent."""
        await while_there(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._ask()
        begun = False
        try:
            async with aclosing(_events(reply)) as events:
                async for event in events:
                    if not begun:
                        await send(_start())
                        begun = True
                    await send(_body(event))
        except HFCBError as error:
            failure = api_error(error)
            if not begun:
                raise failure from error
            await send(_body(_event(failure.body())))
        finally:
            reply.asked.cancel()
        await send({"type": "http.response.body", "body": b""})


def _start() -> dict[str, Any]:
    response = Response(headers=_EVENT_HEADERS, media_type="text/event-stream")
    headers = [(name, value) for name, value in response.raw_headers if name != b"content-length"]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(event: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": True}


async def _events(reply: Reply) -> AsyncGenerator[bytes, None]:
    async with aclosing(_merged(reply.asked.readings)) as pieces:
        async for index, piece in pieces:
            yield _event(reply.chunk(index, piece))
    if (last := reply.last_chunk()) is not None:
        yield _event(last)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _merged(readings: Sequence[Reading]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come. The first error ends it."""
    if len(readings) == 1:  # it needs no task for each piece
        async with aclosing(readings[0].pieces()) as only:
            async for piece in only:
                yield 0, piece
        return
    sources = [reading.pieces() for reading in readings]
    waiting = {asyncio.ensure_future(_next(source)): i for i, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, next_piece = waiting.pop(task), task.result()
                if next_piece is not None:
                    yield index, next_piece
                    waiting[asyncio.ensure_future(_next(sources[index]))] = index
    finally:
        await end(waiting)


async def _next(source: AsyncIterator[Piece]) -> Piece | None:
    return await anext(source, None)
