"""The command on a Ray of its own: one replica that becomes two under load, sessions, a replica that is killed, and the end.

Ray takes about half a minute to start all its processes on two cores, so all of this is one launch, in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny_chat
from processes import Program, kill, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations.ray_replica import HEADER

pytestmark = pytest.mark.timeout(120)

LONG = 1200  # tokens: seconds
QUESTIONS = ("Where is the sea?", "Who are you?")


@dataclass
class Stream:
    """An answer that comes piece by piece. `text` is all of it if `is_complete`."""

    question: str
    replica: str = ""
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    error: str = ""


class Served(Program):
    """The command, and clients of it."""

    def __init__(self, folder: Path, scratch: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        replicas = ("--replicas", 1, "--max-replicas", 2, "--ongoing", 2, "--upscale-delay", 0.5)
        options = ("--model", folder, "--name", "tiny", "--port", self.port, *replicas)
        # Nothing in the user's home.
        ours = {"RAY_TMPDIR": scratch, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        super().__init__(sys.executable, "-m", "integrations.ray_serve", *options, **ours)
        self.url = f"http://127.0.0.1:{self.port}"
        lines = iter(self.process.stdout.readline, "")
        assert any(line.startswith(self.url) for line in lines), self.wait()
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def __exit__(self, *error: object) -> None:
        self.http.close()
        super().__exit__(*error)

    def replica(self, **headers: str) -> str:
        """Who answers."""
        return self.http.get("/v1/models", headers={name.replace("_", "-"): v for name, v in headers.items()}).headers[HEADER]

    def process_of(self, replica: str) -> int:
        """Its id: that of the one which writes the replica's log."""
        return next(pid for pid in self.living() if any(f"_{replica}.log" in target for target in open_files(pid)))

    def stream(self, stream: Stream, begun: threading.Event) -> None:
        """Fill it. What goes wrong is in it, not raised."""
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=asked(stream.question, stream=True)) as response:
                response.raise_for_status()
                stream.replica = response.headers[HEADER]
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        stream.is_complete = True
                    elif line:
                        stream.pieces += [choice["delta"].get("content", "") for choice in json.loads(line[6:])["choices"]]
                        begun.set()
        except httpx.HTTPError as error:
            stream.error = f"{type(error).__name__}: {error}"
        finally:
            begun.set()


def open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)


def asked(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "max_tokens": LONG, "temperature": 0, "ignore_eos": True} | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    scratch = tempfile.mkdtemp(prefix="ray")  # pytest's own are too long for Ray's sockets
    try:
        with Served(folder, scratch) as running:
            yield running
        assert not running.living()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[str, str]:
    """Plain generate's answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = {}
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, max_new_tokens=LONG, do_sample=False, suppress_tokens=[2])
        texts[question] = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def test_a_longer_queue_calls_a_second_replica(served: Served) -> None:
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            served.http.post("/v1/chat/completions", json=asked("Hello")).raise_for_status()

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(ask) for _ in range(8)]
        seen = set()
        try:
            wait_until(lambda: seen.add(served.replica()) or len(seen) == 2, "there is one replica still", 90)
        finally:
            enough.set()
        for future in futures:
            future.result()


def test_a_session_stays_with_its_replica(served: Served) -> None:
    sessions = {f"session {i}": served.replica(x_session_id=f"session {i}") for i in range(64)}
    assert len(set(sessions.values())) == 2
    for session, replica in sessions.items():
        assert served.replica(x_session_id=session) == replica


def test_the_next_turn_finds_the_last_in_the_cache(served: Served) -> None:
    chat = [{"role": "user", "content": "A tale, please."}]
    headers = {"x-session-id": "tale"}
    first = served.http.post("/v1/chat/completions", json=asked("", messages=chat, max_tokens=60), headers=headers).json()
    chat += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    then = served.http.post("/v1/chat/completions", json=asked("", messages=chat, max_tokens=5), headers=headers).json()
    assert then["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] // 2


@pytest.mark.soak
def test_a_killed_replica_loses_nothing_silently(served: Served, right: dict[str, str]) -> None:
    """Its streams end with an error, requests that had no answer yet are tried again by the client, and a new one comes."""
    streams = [Stream(QUESTIONS[i % len(QUESTIONS)]) for i in range(8)]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=8, timeout=60)
    with client, ThreadPoolExecutor(16) as threads:
        whole = [threads.submit(lambda q=q: ask(client, q)) for q in QUESTIONS for _ in range(3)]
        underway = begin(served, threads, streams)
        victim = next(stream for stream, future in zip(streams, underway, strict=True) if not future.done()).replica
        kill([served.process_of(victim)])
        for future in underway:
            future.result()
        answers = [future.result() for future in whole]
    assert answers == [right[question] for question in QUESTIONS for _ in range(3)]
    for stream in streams:
        assert stream.is_complete != bool(stream.error), stream
        assert stream.is_complete or stream.replica == victim, stream
        assert not stream.is_complete or "".join(stream.pieces) == right[stream.question]
    assert any(stream.error for stream in streams)
    seen = set()
    wait_until(lambda: seen.add(served.replica()) or len(seen - {victim}) == 2, "no new replica comes", 60)


def ask(client: openai.OpenAI, question: str) -> str | None:
    """The whole answer. The client tries again by itself what was answered with an error."""
    fields = asked(question)
    ours = {"ignore_eos": fields.pop("ignore_eos")}
    return client.chat.completions.create(**fields, extra_body=ours).choices[0].message.content


def begin(served: Served, threads: ThreadPoolExecutor, streams: list[Stream]) -> list[Future[None]]:
    """Start them all; each has its first piece when this returns."""
    begun = [threading.Event() for _ in streams]
    futures = [threads.submit(served.stream, *pair) for pair in zip(streams, begun, strict=True)]
    for event in begun:
        assert event.wait(60)
    return futures


def test_told_to_end_it_finishes_what_it_has_begun(served: Served, right: dict[str, str]) -> None:
    streams = [Stream(QUESTIONS[i % len(QUESTIONS)]) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        underway = begin(served, threads, streams)
        assert not all(future.done() for future in underway)
        served.process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert stream.is_complete, stream
        assert "".join(stream.pieces) == right[stream.question]
    status, printed = served.wait()
    assert status == 0, printed
    assert not served.living()
