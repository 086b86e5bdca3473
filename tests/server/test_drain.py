"""SIGTERM under load, in a process of its own: what was accepted is answered, what comes later is told so, then it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import web

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from hf_cb.server.models import load_model
from hf_cb.server.run import serve
from hf_cb.server.settings import ServerSettings

model = load_model(sys.argv[1], "tiny", device="cpu", dtype="float32", max_batch_size=4)


def metrics():
    stats = model.engine.stats()
    come = stats.running + stats.waiting + sum(stats.finished.values())
    return str(come).encode(), "text/plain"


serve([model], ServerSettings(port=0), metrics=metrics, on_ready=lambda url: print(url, flush=True))
print("closed", model.engine.is_open, flush=True)
"""
LONG: dict[str, Any] = {"model": web.MODEL, "messages": web.HELLO, "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@contextmanager
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as server:
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


def test_nothing_accepted_is_lost(folder: Path) -> None:
    """Twelve at once, four of them in a batch: some run, some wait, some are streams."""
    with process(folder) as (server, url), ThreadPoolExecutor(12) as threads:
        begun = threading.Barrier(13)

        def ask(index: int) -> tuple[int, str]:
            if index % 2 == 0:
                begun.wait()
                reply = httpx.post(f"{url}/v1/chat/completions", json=LONG, timeout=60)
                return reply.status_code, reply.json()["choices"][0]["finish_reason"]
            begun.wait()
            with httpx.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=60) as reply:
                lines = [line for line in reply.iter_lines() if line]
            return reply.status_code, "length" if '"finish_reason":"length"' in lines[-2] else lines[-2]

        with httpx.Client(base_url=url, timeout=20) as client:  # its connection is there before
            assert client.get("/health/ready").status_code == 200
            answers = [threads.submit(ask, index) for index in range(12)]
            begun.wait()
            web.wait_until(lambda: client.get("/metrics").text == "12")
            server.send_signal(signal.SIGTERM)
            web.wait_until(lambda: client.get("/health/ready").status_code == 503)
            assert client.get("/health/live").status_code == 200
            late = client.post("/v1/chat/completions", json=LONG)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
            assert int(late.headers["retry-after"]) >= 1
        assert [answer.result() for answer in answers] == [(200, "length")] * 12
        assert server.wait(30) == 0
        assert server.stdout.read() == "closed False\n"


@pytest.mark.parametrize(
    ("settings", "patience"),
    [({}, [60]), ({"write_timeout": 7.5}, [8]), ({"write_timeout": None}, [None]), ({"drain_timeout": 40.0}, range(20, 41))],
)
def test_an_answer_on_its_way_has_the_time_that_it_always_has(
    folder: Path, settings: dict[str, Any], patience: Sequence[int | None]
) -> None:
    with web.running(web.tiny(folder), **settings) as server:
        server.http.handle_exit(signal.SIGTERM, None)
        web.wait_until(lambda: server.http.should_exit)
        assert server.http.config.timeout_graceful_shutdown in patience


@pytest.mark.parametrize("ends", ["second signal", "drain_timeout"])
def test_what_takes_too_long_is_ended(folder: Path, ends: str) -> None:
    """The client sees that its stream was broken off."""
    with web.running(web.tiny(folder), drain_timeout=None if ends == "second signal" else 0.2) as server:
        forever = {**web.ENDLESS, "messages": web.HELLO, "n": 8, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=forever, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.http.handle_exit(signal.SIGTERM, None)
            if ends == "second signal":
                server.http.handle_exit(signal.SIGTERM, None)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        web.wait_until(lambda: not server.engine.is_open, 30)
