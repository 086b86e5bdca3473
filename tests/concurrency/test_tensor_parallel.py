"""A model split over two real processes: the same tokens as whole, and nobody hangs when one of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import ranks
import torch

import hf_cb

pytestmark = pytest.mark.timeout(120)  # two processes that import torch and transformers
pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers splits models otherwise")

TESTS = Path(__file__).parents[1]


@contextlib.contextmanager
def started(what: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, without a launcher that would end one when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, ranks.__file__, what, str(folder)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(TESTS.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outcome(process: subprocess.Popen[str], timeout: float = 90) -> dict:
    printed, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


@pytest.fixture
def folder(tmp_path):
    models.tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def test_the_ranks_answer_as_plain_generate_does_alone(folder):
    with started("answers", folder) as processes:
        leader, follower = map(outcome, processes)
    model = models.tiny("llama")
    greedy = [ranks.generate(model, prompt, **ranks.GREEDY) for prompt in ranks.PROMPTS]
    assert leader["greedy"] == greedy
    assert leader["after_release"] == greedy[:3]
    for seed, (prompt, got) in enumerate(zip(ranks.PROMPTS, leader["sampled"], strict=True)):
        torch.manual_seed(seed)
        assert got == ranks.generate(model, prompt, **ranks.SAMPLED)
    with hf_cb.continuous_batching(model) as engine:
        scored = engine.submit(ranks.PROMPTS[3], max_new_tokens=2, prompt_logprobs=0).result().prompt_logprobs
    assert leader["prompt_logprobs"][1:] == pytest.approx([entry.logprob for entry in scored[1:]], abs=1e-3)
    assert leader["num_blocks"] == follower["num_blocks"] == 60
    assert leader["preemptions"] > 0
    assert leader["batch"] > 2
    assert leader["native"] == {}
    assert leader["beams"] == [ranks.generate(model, prompt, **ranks.BEAMS) for prompt in ranks.PROMPTS[4:8]]
    assert "plain generate() needs all ranks" in leader["plainly"]
    assert leader["lead"].startswith("UnsupportedCallError: follow: is for the ranks other than 0")
    assert follower["submit"] == follower["generate"] == "UnsupportedCallError: rank 1 of 2 follows: rank 0 takes the requests"
    assert follower["follow"] == "none"


@pytest.mark.parametrize(("what", "victim"), [("for ever", 0), ("for ever", 1), ("idle", 0)])
def test_a_lost_rank_ends_everybody_with_an_error(folder, what, victim):
    with started(what, folder) as processes:
        end = time.monotonic() + 60
        while not (folder / "at-work").exists():
            assert time.monotonic() < end, "never at work"
            assert all(process.poll() is None for process in processes), processes[0].communicate()
            time.sleep(0.01)
        processes[victim].kill()
        left = outcome(processes[1 - victim], timeout=20)
    dead = "EngineDeadError: "
    if victim == 0:
        assert left["follow"].startswith(f"{dead}a rank of the tensor-parallel model is lost")
    else:
        for error in left["waiting"]:
            assert error.startswith(dead)
            assert "a rank of the tensor-parallel model is lost" in error
        assert left["later"].startswith(dead)
