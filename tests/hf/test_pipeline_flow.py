"""How the items of an installed pipeline flow: lazily, bounded, past failures, and not beyond the caller's interest."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import StoppingCriteria
from two_pipes import Pipes, pipe_of, pipes, texts

import hf_cb

pytestmark = pytest.mark.timeout(20)

TEXTS = texts(3, 17, 1, 9, 30, 5, 12, 2, 8)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7}
LONG = 4000  # output tokens: for calls that must not end by themselves while a test looks on


@pytest.fixture
def both() -> Iterator[Pipes]:
    with pipes(options={"max_batch_size": 2}) as made:
        yield made


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# -- laziness ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_bounded_number_is_read_ahead(both: Pipes, batch_size: int) -> None:
    read = 0

    def source() -> Iterator[str]:
        nonlocal read
        for text in TEXTS * 10:
            read += 1
            yield text

    results = iter(both.served(source(), batch_size=batch_size, **GREEDY))
    assert read == 1  # transformers looks at the first itself
    bound = 2 * 2  # rows: twice max_batch_size
    for taken in range(1, 12):
        next(results)
        assert read <= taken - taken % batch_size + bound + batch_size
    wait_until(lambda: read >= 11 + bound - batch_size)  # and no fewer than there is room for
    time.sleep(0.05)
    assert read <= 11 + bound + batch_size
    assert sum(1 for _ in results) == len(TEXTS) * 10 - 11


def test_a_result_does_not_wait_for_the_next_item(both: Pipes) -> None:
    """As when prompts come from a queue: the next one may depend on the last answer."""
    asked: Queue[str | None] = Queue()
    asked.put(TEXTS[0])  # which transformers looks at itself
    results = iter(both.served(iter_queue(asked), **GREEDY))
    answers = [next(results)]
    for text in TEXTS[1:4]:
        asked.put(text)
        answers.append(next(results))
    asked.put(None)
    assert next(results, None) is None
    assert next(results, None) is None  # an iterator that has ended stays so
    assert answers == both.plain(TEXTS[:4], **GREEDY)


def iter_queue(queue: Queue[str | None]) -> Iterator[str]:
    yield from iter(queue.get, None)


@pytest.fixture
def long_one() -> Iterator[Pipes]:
    with pipes(options={"block_size": 16, "num_blocks": 2048}, max_position_embeddings=2 * LONG) as made:
        yield made


def test_results_that_are_closed(long_one: Pipes) -> None:
    results = iter(long_one.served((text for text in TEXTS), do_sample=False, max_new_tokens=LONG))
    with ThreadPoolExecutor(1) as other:
        waiter = other.submit(next, results)
        wait_until(lambda: long_one.engine.stats().running == len(TEXTS))
        results.close()
        with pytest.raises(hf_cb.RequestCancelledError):
            waiter.result()
    wait_until(lambda: not long_one.engine.stats().running and not long_one.engine.stats().blocks_used)
    assert next(results, None) is None


def test_results_that_are_dropped(long_one: Pipes) -> None:
    ended = threading.Event()

    def source() -> Iterator[str]:
        try:
            yield from texts(1999)  # ends after one token
            yield from TEXTS * 100
        finally:
            ended.set()

    results = iter(long_one.served(source(), do_sample=False, max_length=2000))
    next(results)
    wait_until(lambda: long_one.engine.stats().running > 20)
    del results
    gc.collect()
    wait_until(lambda: not long_one.engine.stats().running and not long_one.engine.stats().waiting)
    assert ended.wait(10)


def test_going_on_with_a_generator(both: Pipes) -> None:
    results = both.served((text for text in TEXTS), **GREEDY)
    found = []
    for result in results:
        found.append(result)
        if len(found) == 2:
            break
    iterator = iter(results)
    found.append(next(iterator))
    assert found + list(iterator) == both.plain(TEXTS, **GREEDY)


def test_native_calls_that_nobody_waits_for_don_t_run(both: Pipes) -> None:
    running, go_on = threading.Event(), threading.Event()
    calls = 0
    own = both.served.model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        running.set()
        go_on.wait(10)
        return own(*args, **kwargs)

    results = iter(both.served((text for text in TEXTS), num_beams=2, **{**GREEDY, "max_new_tokens": 1}))
    vars(both.served.model)["prepare_inputs_for_generation"] = prepare
    with ThreadPoolExecutor(1) as other:
        waiter = other.submit(next, results)
        assert running.wait(10)
        results.close()
        go_on.set()
        waiter.exception()
    del vars(both.served.model)["prepare_inputs_for_generation"]
    wait_until(lambda: not any(thread.name == "hf_cb-pipeline" for thread in threading.enumerate()))
    assert calls == 1


def test_an_interrupted_list_is_cancelled(long_one: Pipes) -> None:
    def interrupt() -> None:
        wait_until(lambda: long_one.engine.stats().running == len(TEXTS))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as other:
        done = other.submit(interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            long_one.served(TEXTS, do_sample=False, max_new_tokens=LONG)
        done.result()
    wait_until(lambda: not long_one.engine.stats().running)  # though the traceback still holds what was underway
    assert caught.tb is not None


def test_nobody_waits_for_results_at_exit() -> None:
    program = """
import sys; sys.path[:0] = ["tests", "tests/hf"]
from two_pipes import pipe_of, texts
import hf_cb
pipe = pipe_of(max_position_embeddings=9000)
hf_cb.install(pipe)
results = iter(pipe((text for text in texts(3, 4, 5) * 100), do_sample=False, max_new_tokens=5))
next(results)
later = iter(pipe((text for text in texts(3, 4, 5) * 100), do_sample=False, max_new_tokens=8000, stop_sequence="w3"))
next(later)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=19)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# -- failures ---------------------------------------------------------------------------------------------------------------

BAD = [TEXTS[0], None, TEXTS[2], TEXTS[3], 5, TEXTS[5], TEXTS[6]]
GOOD = [i for i, item in enumerate(BAD) if isinstance(item, str)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("native", [False, True])
def test_a_list_with_items_that_fail(both: Pipes, batch_size: int, native: bool) -> None:
    options = {**GREEDY, **({"num_beams": 2} if native else {})}
    with pytest.raises(hf_cb.PipelineItemsError, match=r"2 of 7 items failed, the first of them item 1 \(TypeError") as caught:
        both.served(BAD, batch_size=batch_size, **options)
    error = caught.value
    assert error.errors.keys() == {1, 4}
    assert [error.results[i] for i in GOOD] == both.plain([BAD[i] for i in GOOD], **options)
    assert error.results[1] is error.errors[1] is error.__cause__
    assert isinstance(error.errors[4], TypeError)
    with pytest.raises(TypeError):
        both.plain(BAD, batch_size=batch_size, **options)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_items_that_fail_when_they_are_their_turn(both: Pipes, batch_size: int) -> None:
    found = outcomes(iter(both.served((item for item in BAD), batch_size=batch_size, **GREEDY)))
    assert [found[i] for i in GOOD] == both.plain([BAD[i] for i in GOOD], **GREEDY)
    assert [type(found[i]) for i in (1, 4)] == [TypeError, TypeError]
    assert len(found) == len(BAD)


def outcomes(results: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    while True:
        try:
            found.append(next(results))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_one_item_that_does_not_fit(batch_size: int) -> None:
    with pipes(options={"num_blocks": 4, "block_size": 16}) as made:
        items = [TEXTS[0], *texts(80), *TEXTS[2:4], TEXTS[5]]
        found = outcomes(iter(made.served((item for item in items), batch_size=batch_size, **GREEDY)))
        assert isinstance(found.pop(1), hf_cb.RequestTooLongError)
        assert found == made.plain(items[:1] + items[2:], **GREEDY)


class Holed(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> str:
        if i == 1:
            raise KeyError("no such row")
        return TEXTS[i]


def breaking() -> Iterator[str]:
    yield TEXTS[0]
    yield from TEXTS[2:4]
    raise KeyError("the file ended")


@pytest.mark.parametrize(("source", "place"), [(Holed, 1), (breaking, 3)])
def test_a_source_that_fails(both: Pipes, source: Callable[[], Any], place: int) -> None:
    found = outcomes(iter(both.served(source(), **GREEDY)))
    assert isinstance(found.pop(place), KeyError)
    assert found == both.plain([TEXTS[0], *TEXTS[2:4]], **GREEDY)


def test_a_result_that_cannot_be_made(both: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    own = type(both.plain).postprocess

    def postprocess(self: Any, outputs: Any, **parameters: Any) -> Any:
        if outputs["prompt_text"] == TEXTS[1]:
            raise LookupError("that one")
        return own(self, outputs, **parameters)

    monkeypatch.setattr(type(both.plain), "postprocess", postprocess)
    found = outcomes(iter(both.served((text for text in TEXTS[:3]), **GREEDY)))
    assert isinstance(found.pop(1), LookupError)
    assert found == both.plain([TEXTS[0], TEXTS[2]], **GREEDY)


def test_an_engine_that_was_shut_down_fails_every_item(both: Pipes) -> None:
    both.engine.shutdown()
    with pytest.raises(hf_cb.PipelineItemsError) as caught:
        both.served(TEXTS[:3], **GREEDY)
    assert all(isinstance(error, hf_cb.EngineClosedError) for error in caught.value.errors.values())
    assert len(caught.value.errors) == 3


def test_a_processor_of_the_callers_cannot_call_the_pipeline(both: Pipes) -> None:
    class Calls(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            both.served(TEXTS[:2], **GREEDY)

    with pytest.raises(hf_cb.UnsupportedCallError):
        both.served(TEXTS[0], stopping_criteria=[Calls()], **GREEDY)


# -- taken away meanwhile ---------------------------------------------------------------------------------------------------


def test_uninstalled_while_results_are_taken() -> None:
    plain, served = pipe_of(), pipe_of()
    hf_cb.install(served, max_batch_size=2)
    results = iter(served((text for text in TEXTS * 3), **GREEDY))
    found = [next(results)]
    hf_cb.uninstall(served)
    assert type(served) is type(plain)
    found += list(results)
    assert found == plain(TEXTS * 3, **GREEDY)


def test_uninstalled_within_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread that has just entered a method of the installed pipeline, which is a plain one when it goes on."""
    plain, served = pipe_of(), pipe_of()
    hf_cb.install(served, max_batch_size=2)
    inside, gone = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def tokenizing() -> Iterator[None]:
        inside.set()
        assert gone.wait(10)
        yield

    monkeypatch.setattr("hf_cb.hf.pipelines.pipeline.tokenizing", tokenizing)
    with ThreadPoolExecutor() as pool:
        texts = pool.submit(served, TEXTS[:3], **GREEDY)
        assert inside.wait(10)
        hf_cb.uninstall(served)
        gone.set()
        assert texts.result() == plain(TEXTS[:3], **GREEDY)


def test_the_interpreters_end_waits_until_threads_have_freed_what_they_had() -> None:
    """That is the last thing they do, after their results have been read; a tensor that is freed at the end is an abort."""
    script = """
import os, time
from hf_cb.hf.pipelines.in_order import InOrder

class Slow:
    def __del__(self):
        time.sleep(2)
        os.write(1, b"freed ")

list(InOrder((Slow() for _ in range(3)), lambda item: time.sleep(0.2), 3, 0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, 3 * ["freed"], "")


class Thrown(Exception):
    """By another thread into one that waits."""


@pytest.mark.parametrize("whole", [True, False])
def test_an_exception_that_is_thrown_into_the_waiting_thread(both: Pipes, whole: bool) -> None:
    """It is raised soon and is no item's error. A list's items are given up; of an iteration's, the one that was waited for."""
    want = both.plain(TEXTS[:3], **GREEDY)
    outcomes: list[Any] = []

    def read(take: Callable[[], Any]) -> None:
        try:
            outcomes.append(take())
        except BaseException as error:
            outcomes.append(error.with_traceback(None))

    paused = threading.Event()

    def source() -> Iterator[str]:
        yield TEXTS[0]
        paused.wait()
        yield from TEXTS[1:3]

    results = iter(both.served(source(), **GREEDY))
    assert next(results) == want[0]
    with both.engine.pause():
        paused.set()
        take = (lambda: both.served(TEXTS, **{**GREEDY, "max_new_tokens": LONG})) if whole else (lambda: next(results))
        thread = threading.Thread(target=read, args=(take,), daemon=True)
        thread.start()
        time.sleep(0.2)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Thrown)) == 1
        thread.join(0.9)
        assert [type(outcome) for outcome in outcomes] == [Thrown]
    if not whole:
        assert list(results) == [want[2]]
    wait_until(lambda: both.engine.stats().running + both.engine.stats().waiting == 0)
    both.same(TEXTS)
