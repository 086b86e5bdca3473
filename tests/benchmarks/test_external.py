"""Peers in environments of their own: how one is made, and the driver's loop with an engine of a few lines."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks import external, machine, peer_environments
from benchmarks.external import Driver, ExternalPeer
from benchmarks.peer_environments import Environment
from benchmarks.workload import Item, Workload

pytestmark = pytest.mark.timeout(20)

_CLIENTS = Path(external.__file__).parent / "drivers" / "clients.py"

# An engine that gives each request one token a step: its prompt's length, then 1 more each time.
ENGINE = """
import sys, time
sys.path.insert(0, {drivers!r})
import clients

class Engine:
    def __init__(self, settings):
        print("a library's own words")
        if settings["model"] == "broken":
            raise ValueError("no such model")
        self.left, self.next, self.seconds = {{}}, {{}}, settings.get("seconds", 0.0)

    def notes(self):
        return "counting"

    def add(self, index, prompt, output_length):
        self.left[index], self.next[index] = output_length, len(prompt)

    def step(self):
        time.sleep(self.seconds)
        outputs = [(index, [self.next[index]]) for index in self.left]
        for index, _ in outputs:
            self.next[index] += 1
            self.left[index] -= 1
        self.left = {{i: n for i, n in self.left.items() if n}}
        return outputs

if __name__ == "__main__":
    clients.main(Engine)
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "run_counting.py"
    file.write_text(textwrap.dedent(ENGINE.format(drivers=str(_CLIENTS.parent))))
    monkeypatch.setitem(external.DRIVERS, "counting", Driver("counting", file, {}))
    monkeypatch.setattr(peer_environments, "python", lambda _: Path(sys.executable))
    return file


@pytest.fixture
def modules(script, monkeypatch):
    """(clients, an engine of 10 ms a step), in this process."""
    monkeypatch.syspath_prepend(str(_CLIENTS.parent))
    spec = importlib.util.spec_from_file_location("run_counting", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.clients, module.Engine({"model": "", "seconds": 0.01})


WORKLOAD = Workload(tuple(Item(i, (0,) * prompt, output) for i, (prompt, output) in enumerate([(3, 2), (5, 4), (2, 3)])))
TOKENS = {0: (3, 4), 1: (5, 6, 7, 8), 2: (2, 3, 4)}


def counting(model: str = "some") -> ExternalPeer:
    return ExternalPeer("counting", model, "float32", 1, 64)


def test_a_peer_serves_several_workloads_and_sleeps_between(script):
    done: list[int] = []
    with counting() as peer:
        for concurrency in (3, 1):
            before = time.perf_counter()
            outcome = peer.run(WORKLOAD, done.append, concurrency).check(WORKLOAD)
            assert {row.item.index: row.tokens for row in outcome.rows} == TOKENS
            assert outcome.steps == (4 if concurrency == 3 else 9)
            assert before <= min(row.sent_at for row in outcome.rows)  # one clock for both processes
            assert max(row.token_times[-1] for row in outcome.rows) <= time.perf_counter()
            assert outcome.notes == "counting"
        if Path("/proc/self/stat").exists():
            spent = machine.cpu_seconds(peer.pid)
            time.sleep(0.3)
            assert machine.cpu_seconds(peer.pid) == spent
    assert peer._process.returncode == 0


def test_a_peer_that_fails_says_why(script):
    with pytest.raises(RuntimeError, match=r"(?s)counting ended with 1.*own words.*no such model"), counting("broken"):
        pass


def test_a_peer_that_dies_in_between_says_so(script):
    with counting() as peer:
        peer._process.kill()
        peer._process.wait()
        with pytest.raises(RuntimeError, match="counting ended with -9"):
            peer.run(WORKLOAD, lambda _: None, 1)


def test_an_environment_that_is_not_there_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"python -m benchmarks\.peer_environments vllm"):
        ExternalPeer("vllm", "some", "float32", 1, 64)


def test_a_request_waits_for_a_free_client_and_that_wait_is_not_in_its_time(modules):
    clients, engine = modules
    requests = [{"index": i, "prompt": [0], "output_length": 3, "arrival": 0.0} for i in range(2)]
    first, second = clients.serve(engine, requests, 1, lambda _: None)["rows"]
    assert second["sent_at"] == first["times"][-1]
    assert second["times"][0] > second["sent_at"]


def test_a_request_is_sent_at_its_arrival(modules):
    clients, engine = modules
    requests = [{"index": i, "prompt": [0], "output_length": 2, "arrival": 0.2 * i} for i in range(2)]
    result = clients.serve(engine, requests, 2, lambda _: None)
    first, second = result["rows"]
    assert second["sent_at"] - first["sent_at"] == pytest.approx(0.2)
    assert second["times"][0] > second["sent_at"]
    assert result["steps"] == 4


def test_what_a_peer_of_ours_takes_is_not_the_others(script):
    if not Path("/proc/stat").exists():
        pytest.skip("only Linux tells what other programs take")
    with counting() as peer, machine.usage(peer.pid) as usage:
        peer.run(WORKLOAD, lambda _: None, 3)
    assert 0 < usage.peak_bytes < machine.resident_bytes()  # its own, not this process's with torch in it


@pytest.mark.timeout(120)  # making an environment copies pip into it
def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path))
    monkeypatch.setitem(peer_environments.ENVIRONMENTS, "small", Environment(("pip",)))  # which every one has: no download
    peer_environments.set_up("small")
    prefix = subprocess.run(
        [peer_environments.python("small"), "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert prefix.stdout.strip() == str(tmp_path / "peers" / "small")
    assert "setting up" in capfd.readouterr().out

    mark = tmp_path / "peers" / "small" / "kept"
    mark.touch()
    peer_environments.set_up("small")
    assert mark.exists()
    assert "setting up" not in capfd.readouterr().out

    monkeypatch.setitem(peer_environments.ENVIRONMENTS, "small", Environment(("pip>=20",)))
    with pytest.raises(FileNotFoundError, match="small is not set up here"):
        peer_environments.python("small")
