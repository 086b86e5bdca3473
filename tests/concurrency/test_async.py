"""Handles in event loops: awaited, iterated, cancelled, in several loops at once, in loops that are closed."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from serving import Gate, Row, assert_ends, long_row, rows, submit, submit_long, together, wait_until

import hf_cb
from hf_cb import Engine, FinishReason, GenerationHandle, RequestCancelledError

pytestmark = pytest.mark.timeout(20)


def truths() -> tuple[tuple[int, ...], ...]:
    return tuple(row.tokens for row in rows()[:8])


async def stream(engine: Engine, row: Row) -> tuple[int, ...]:
    return tuple([token async for token in submit(engine, row)])


async def whole(engine: Engine, row: Row) -> tuple[int, ...]:
    return (await submit(engine, row)).tokens


async def all_at_once(engine: Engine) -> tuple[tuple[int, ...], ...]:
    tokens = await asyncio.gather(*(f(engine, row) for row in rows()[:8] for f in (stream, whole)))
    assert tokens[::2] == tokens[1::2]
    return tuple(tokens[::2])


def assert_ends_cancelled(engine: Engine, handle: GenerationHandle) -> None:
    wait_until(lambda: handle.done)
    assert_ends(handle, RequestCancelledError)
    wait_until(lambda: engine.stats().blocks_used == 0)
    assert engine.stats().finished == {FinishReason.CANCELLED: 1}


def test_two_loops_at_once(engine: Engine) -> None:
    results = together([lambda: asyncio.run(all_at_once(engine))] * 2 + [lambda: submit(engine, rows()[9]).result().tokens])
    assert results == [truths(), truths(), rows()[9].tokens]


def test_one_handle_in_two_loops_and_a_thread(engine: Engine, gate: Gate) -> None:
    handle = submit(engine, rows()[6])
    gate.arrival()

    async def wait() -> tuple[int, ...]:
        return (await handle).tokens

    let = gate.when(lambda: len(handle._queue._tasks) == 2)
    calls = [lambda: asyncio.run(wait())] * 2 + [lambda: handle.result().tokens, lambda: tuple(handle)]
    assert together([*calls, let]) == [rows()[6].tokens] * 4 + [None]


def test_the_loop_goes_on_meanwhile(engine: Engine, gate: Gate) -> None:

    async def main() -> tuple[int, ...]:
        task = asyncio.create_task(whole(engine, rows()[6]))
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert not task.done()
        gate.let(float("inf"))
        return await task

    assert asyncio.run(main()) == rows()[6].tokens


@pytest.mark.parametrize("iterate", [True, False])
def test_a_cancelled_task_cancels_its_request(engine: Engine, iterate: bool) -> None:
    handle = submit_long(engine)

    async def use() -> None:
        if iterate:
            async for _ in handle:
                pass
        else:
            await handle

    async def main() -> None:
        task = asyncio.create_task(use())
        await asyncio.sleep(0)  # it begins, and waits
        while not handle.tokens:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_ends_cancelled(engine, handle)


def test_wait_for(engine: Engine, gate: Gate) -> None:
    handle = submit_long(engine)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.05)

    asyncio.run(main())
    gate.let(float("inf"))
    assert_ends_cancelled(engine, handle)


def test_an_abandoned_iteration(engine: Engine) -> None:

    async def main() -> int:
        async for token in submit_long(engine):
            return token
        raise AssertionError

    assert asyncio.run(main()) == long_row().tokens[0]
    wait_until(lambda: engine.stats().finished == {FinishReason.CANCELLED: 1})


def test_a_loop_that_is_closed_meanwhile(engine: Engine, gate: Gate) -> None:
    handle, neighbour = submit(engine, rows()[6]), submit(engine, rows()[7])
    gate.arrival()

    def wait_and_close() -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # it would log that the task was pending
        task = loop.create_task(handle._wait_or_cancel(0))
        loop.run_until_complete(asyncio.sleep(0.01))
        assert handle._queue._tasks
        loop.close()
        del task

    assert together([wait_and_close]) == [None]
    gate.let(float("inf"))
    assert handle.result().tokens == rows()[6].tokens
    assert neighbour.result().tokens == rows()[7].tokens
    assert asyncio.run(all_at_once(engine)) == truths()


def test_waiting_tasks_use_no_cpu(engine: Engine) -> None:

    async def main() -> float:
        with engine.pause():
            tasks = [asyncio.create_task(whole(engine, rows()[0])) for _ in range(64)]
            await asyncio.sleep(0.05)
            began = time.process_time()
            await asyncio.sleep(0.5)
            used = time.process_time() - began
        assert [await task for task in tasks] == [rows()[0].tokens] * 64
        return used

    assert asyncio.run(main()) < 0.1


def test_errors_reach_the_task(engine: Engine) -> None:

    async def main(handle: GenerationHandle) -> None:
        threading.Timer(0.02, engine.shutdown, kwargs={"drain": False}).start()
        with pytest.raises(hf_cb.EngineClosedError):
            async for _ in handle:
                pass
        with pytest.raises(hf_cb.EngineClosedError):
            await handle

    asyncio.run(main(submit_long(engine)))
