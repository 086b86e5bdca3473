"""Waiting for something that may come too late, or that nobody wants any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

from hf_cb.server.errors import ClientGoneError

T = TypeVar("T")


async def in_time(work: Awaitable[T], seconds: float | None) -> T:
    """What `work` returns. Raises TimeoutError after so many seconds; then, and if this task is cancelled, so is `work`.

    asyncio's own `wait_for` forgets, up to Python 3.11, a cancellation that comes in the moment in which the work is done.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or ClientGoneError as soon as the client has left; then `work` is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await end([task, gone])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has let go of everything."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
