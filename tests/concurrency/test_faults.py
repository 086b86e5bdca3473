"""Every call that the engine's thread makes out of its loop can fail in five ways: nobody hangs, and who survives is right.

`python -m pytest tests/concurrency/test_faults.py -k soak --fault-requests 2000` runs the soak for longer.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import inside
import models
import pytest
from faults import KINDS, Faults, Site, at_random, once, recorded
from serving import plain, rows, submit, together
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, EngineClosedError, EngineDeadError, GenerationHandle, RequestFailedError
from hf_cb.hf import build

pytestmark = pytest.mark.timeout(300)

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 32, "max_batch_tokens": 48, "max_batch_size": 6, "queue_timeout": 30.0}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40}
SOON = 10.0  # seconds
# What these call is done for one request, which alone ends by it.
FOR_ONE = frozenset({"_add", "_expire_one", "_for_one", "_emit", "_end", "add", "admit", "close", "give", "open"})


@pytest.fixture
def served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe for all engines of a test, which come one after another: it takes most of an installation's time."""
    examine, found = build.examine, []

    def examine_once(*args: Any, **options: Any) -> Any:
        if not found:
            found.append(examine(*args, **options))
        return found[0]

    monkeypatch.setattr(build, "examine", examine_once)


def sampled(engine: Engine, index: int, length: int) -> GenerationHandle:
    return submit(engine, rows()[index], max_new_tokens=length, seed=index, **SAMPLING)


@pytest.fixture(scope="module")
def truths() -> dict[int, tuple[int, ...]]:
    """Of `sampled`."""
    model, some = models.tiny("llama"), [(index, rows()[index]) for index in range(8, 12)]
    return {index: plain(model, row.prompt, len(row.tokens), seed=index, **SAMPLING) for index, row in some}


class Asked(NamedTuple):
    """A request and the tokens that it is to have."""

    handle: GenerationHandle
    tokens: tuple[int, ...]

    def failure(self) -> BaseException | None:
        """What it ended with, if that was a failure; else its tokens are right, as far as they go. Fails if it doesn't end."""
        end = time.monotonic() + SOON
        while not self.handle.done:
            assert time.monotonic() < end, "a request was never answered"
            time.sleep(0.0005)
        shared = min(len(self.tokens), len(self.handle.tokens))
        assert self.handle.tokens[:shared] == self.tokens[:shared]
        try:
            assert self.handle.result().tokens == self.tokens
        except (RequestFailedError, EngineDeadError) as error:
            return error
        except (hf_cb.RequestCancelledError, hf_cb.RequestTimeoutError, EngineClosedError):
            return None
        return None


def everything(
    model: PreTrainedModel, engine: Engine, truths: dict[int, tuple[int, ...]], asked: list[Asked], replace: bool
) -> None:
    """Requests that end in every way there is, over a pool that is too small for all. Raises EngineDeadError at any point."""
    few = 7
    asked += [Asked(submit(engine, row, max_new_tokens=few), row.tokens[:few]) for row in rows()[2:5]]
    asked.append(Asked(sampled(engine, 8, few), truths[8][:few]))
    asked.append(Asked(submit(engine, rows()[9], max_new_tokens=100, timeout=0.004), rows()[9].tokens))
    cancelled = submit(engine, rows()[10], max_new_tokens=100)
    asked.append(Asked(cancelled, rows()[10].tokens))
    with contextlib.suppress(RequestFailedError):
        next(iter(cancelled), None)
    cancelled.cancel()
    engine.reset_prefix_cache()
    with engine.pause(release_kv=True):
        asked.append(Asked(submit(engine, rows()[11], max_new_tokens=few), rows()[11].tokens[:few]))
    for one in asked:
        one.failure()
    if replace:
        inside.intake(engine).serve(build.build(model, hf_cb.CBConfig(**SMALL, overlap=inside.core(engine).overlaps), {}))
        asked.append(Asked(submit(engine, rows()[1], max_new_tokens=few), rows()[1].tokens[:few]))


def check(asked: list[Asked], engine: Engine, fault: BaseException, site: Site) -> None:
    """After a fault: those who failed know it as their cause; the engine serves on, or is dead for everybody."""
    failures = [failure for one in asked if (failure := one.failure()) is not None]
    causes = {id(failure.__cause__) for failure in failures}
    if not engine.is_open:
        assert site.caller not in FOR_ONE
        with pytest.raises(EngineDeadError) as caught:
            engine.submit([5, 6])
        assert causes | {id(caught.value.__cause__)} == {id(fault)}
        assert all(isinstance(failure, EngineDeadError) for failure in failures)
        return
    assert causes <= {id(fault)}
    assert all(isinstance(failure, RequestFailedError) for failure in failures)
    assert len(failures) <= 1 or site.file.endswith("core.py")  # of a step, which has many rows
    assert submit(engine, rows()[0]).result(timeout=SOON).tokens == rows()[0].tokens
    scheduler = inside.scheduler(engine)
    scheduler.check()
    assert scheduler.memory.blocks_used == 0


@pytest.mark.usefixtures("served_at_once")
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.soak), True])
def test_every_call_out_of_the_loop(llama: PreTrainedModel, truths: dict[int, tuple[int, ...]], overlap: bool) -> None:
    seen: Counter[Site] = Counter()

    def attempt(faults: Faults, site: Site | None = None) -> None:
        asked: list[Asked] = []
        with faults.at_work(), hf_cb.continuous_batching(llama, overlap=overlap, **SMALL) as engine:
            try:
                everything(llama, engine, truths, asked, replace=site is None or "_exchange" in site)
            except EngineDeadError:
                assert faults.raised
            if faults.raised:
                assert site is not None
                check(asked, engine, faults.raised[0], site)
            else:
                assert [one.failure() for one in asked] == [None] * len(asked)

    attempt(recorded(seen))
    assert {"_add", "_expire_one", "_emit", "admit", "_exchange"} <= {site.caller for site in seen}
    hits, tried = 0, 0  # how often each is called hangs on who comes first: a few are not met
    for i, site in enumerate(sorted(seen)):
        for j, kind in enumerate(KINDS if not overlap else KINDS[i % len(KINDS) :][:1]):
            faults = once(site, kind, nth=1 + (i + j) % 3 * seen[site] // 4)
            attempt(faults, site)
            hits, tried = hits + bool(faults.raised), tried + 1
    assert hits > tried * 0.8


class Replaced:
    """The engine of a model; a dead one is replaced by the first thread that meets it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._lock = model, threading.Lock()
        self.deaths = -1
        self.engine = self.after(None)

    def after(self, dead: Engine | None) -> Engine:
        with self._lock:
            if dead is not None and self.engine is dead:
                hf_cb.uninstall(self._model)
            if dead is None or self.engine is dead:
                self.deaths += 1
                self.engine = hf_cb.install(self._model, **SMALL)
            return self.engine


@pytest.mark.usefixtures("served_at_once")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a generator that is being closed
def test_soak(request: pytest.FixtureRequest, llama: PreTrainedModel, truths: dict[int, tuple[int, ...]]) -> None:
    """Faults at random, at any depth, while many threads ask; a dead engine is installed anew."""
    num_requests, ends, places = request.config.getoption("--fault-requests"), Counter[str](), itertools.count()
    faults = at_random(random.Random(7), lambda site: 2_500 if site.caller in FOR_ONE else 400_000)

    def accepted(chance: random.Random) -> tuple[Engine, Asked]:
        while True:
            engine, row, index = replaced.engine, chance.choice(rows()), chance.choice([*truths])
            try:
                if chance.random() < 0.2:
                    return engine, Asked(sampled(engine, index, len(truths[index])), truths[index])
                return engine, Asked(submit(engine, row, timeout=chance.choice([None, None, 5.0, 0.004])), row.tokens)
            except (EngineDeadError, EngineClosedError):
                replaced.after(engine)

    def ask(chance: random.Random) -> str:
        engine, asked = accepted(chance)
        if chance.random() < 0.1:
            asked.handle.cancel()
        failure = asked.failure()
        if failure is None:
            return asked.handle.finish_reason.value
        assert any(failure.__cause__ is fault for fault in faults.raised) or "drawn" in str(failure)
        if isinstance(failure, EngineDeadError):
            assert not engine.is_open
        return type(failure).__name__

    def asker() -> None:
        while (place := next(places)) < num_requests:
            ends[ask(random.Random(place))] += 1

    with faults.at_work():
        replaced = Replaced(llama)
        results = together([asker] * 12, timeout=280)
        hf_cb.uninstall(llama)
    assert results == [None] * 12
    print(f"{len(faults.raised)} faults, {replaced.deaths} deaths, {dict(ends)}")
    assert ends.total() >= num_requests - 12  # two threads may count at once
    assert faults.raised
    assert ends["length"] > num_requests / 3
