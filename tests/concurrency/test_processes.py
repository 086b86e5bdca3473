"""What happens to the whole process: its exit, a fork, Ctrl-C. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)  # each starts an interpreter and imports torch; the checks inside have limits of their own

TESTS = Path(__file__).parents[1]
QUICK = 3.0  # seconds from a script's last line to the end of its process

PRELUDE = """
import atexit, contextlib, os, signal, sys, threading, time
# Registered before ours, so that it runs after it.
atexit.register(lambda: print(sum(thread.name == "hf_cb-engine" for thread in threading.enumerate()), "engines run on"))
import torch
torch.set_num_threads(1)
import hf_cb
from serving import LONG, SMALL, ask, long_row, rows, submit, submit_long, tiny_llama, wait_until

def wait_in_a_daemon(call):
    def wait():
        with contextlib.suppress(hf_cb.EngineClosedError):
            call()
    threading.Thread(target=wait, daemon=True).start()

model = tiny_llama()
row = rows(count=4)[2]
engine = hf_cb.install(model, **SMALL)
"""
POSTLUDE = """
print("left at", time.time(), flush=True)
"""


def run(script: str) -> tuple[str, float]:
    """Run to a good end; what it printed after the script's last line, and the seconds it took from there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "concurrency")])}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + script + POSTLUDE],
        capture_output=True,
        text=True,
        timeout=50,
        env=environment,
        check=False,
    )
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    _, _, left = done.stdout.partition("left at ")
    time_left, _, rest = left.partition("\n")
    return rest, ended - float(time_left)


EXITS = {
    "idle": """
assert ask(model, row) == row.tokens
""",
    "busy": """
wait_in_a_daemon(submit_long(engine).result)
wait_in_a_daemon(lambda: model.generate(long_row().ids, max_new_tokens=LONG))
handle = submit_long(engine)
wait_until(lambda: handle.tokens and engine.stats().running == 3)
""",
    "paused": """
handle = submit_long(engine)
wait_until(lambda: handle.tokens)
engine.pause().__enter__()
wait_in_a_daemon(handle.result)
""",
    "a thread still waits": """
thread = threading.Thread(target=lambda: print(ask(model, row) == row.tokens))
thread.start()
""",
}


@pytest.mark.parametrize("script", EXITS.values(), ids=EXITS)
def test_exit(script: str) -> None:
    out, seconds = run(script)
    assert seconds < QUICK
    assert out == ("True\n" if "print" in script else "") + "0 engines run on\n"


FORK = """
running = submit_long(engine)
wait_until(lambda: running.tokens)
child = os.fork()
if child == 0:
    began = time.monotonic()
    for call in (
        lambda: ask(model, row),
        lambda: submit(engine, row),
        lambda: engine.generate_batch([row.prompt]),
        lambda: running.result(),
        lambda: list(running),
        lambda: engine.pause().__enter__(),
    ):
        try:
            call()
        except hf_cb.EngineDeadError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("the child got an answer from nobody")
    assert time.monotonic() - began < 2
    hf_cb.uninstall(model)
    hf_cb.install(model, **SMALL)  # an engine of the child's own
    assert ask(model, row) == row.tokens
    sys.exit(7)
else:
    wait_until(lambda: len(running.tokens) > len(long_row().tokens))
    assert long_row().begins_with(running.tokens)
    running.cancel()
    assert ask(model, row) == row.tokens
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_fork() -> None:
    run(FORK)


INTERRUPT = """
long_row()  # computed here, not while somebody waits for what it is needed for
handles, submit_all = [], engine.submit_all
engine.submit_all = lambda requests: handles.extend(submit_all(requests)) or handles[-len(requests):]
interrupted_at = []

def interrupt(paused):
    wait_until(lambda: handles and handles[-1].tokens, timeout=20)
    with engine.pause():
        held.append(engine.stats().blocks_used)
        interrupted_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        if paused:  # the request must end all the same
            wait_until(lambda: engine.stats().blocks_used == 0)

def stream():
    for token in submit_long(engine):
        pass

waits = {
    "generate": lambda: model.generate(long_row().ids, max_new_tokens=LONG),
    "result": lambda: submit_long(engine).result(),
    "iterate": stream,
    "with a timeout": lambda: submit_long(engine).result(timeout=60),
    "batch": lambda: engine.generate_batch([long_row().prompt] * 3, max_new_tokens=LONG),
}
for name, wait in waits.items():
    held = []
    handles.clear()
    thread = threading.Thread(target=interrupt, args=(name != "generate",), daemon=True)
    thread.start()
    try:
        wait()
    except KeyboardInterrupt:
        assert time.monotonic() - interrupted_at[-1] < 1
    else:
        raise AssertionError("not interrupted")
    thread.join()
    assert held[0] > 0
    wait_until(lambda: engine.stats().blocks_used == 0)
    assert ask(model, row) == row.tokens, name
finished = engine.stats().finished
assert finished[hf_cb.FinishReason.CANCELLED] == 7 and finished[hf_cb.FinishReason.LENGTH] == 5, finished
"""


def test_ctrl_c_in_a_waiting_caller() -> None:
    run(INTERRUPT)
