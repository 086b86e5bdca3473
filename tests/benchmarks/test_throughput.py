"""The command, from its arguments to the table and the JSON, on a tiny random model."""

from __future__ import annotations

import json

import pytest
import small
import torch

from benchmarks import throughput
from benchmarks.peers import ignore_end_of_sequence
from benchmarks.subject import Subject
from benchmarks.workload import text_source

pytestmark = pytest.mark.timeout(60)

VOCAB = 64


def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
    return {"input_ids": [ord(character) % VOCAB for character in text]}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command; returns what it wrote as JSON."""

    def load(_model: object, _shape: object, dtype: str, _device: str) -> Subject:
        model = small.llama(vocab_size=VOCAB, initializer_range=0.35).to(getattr(torch, dtype))
        ignore_end_of_sequence(model)
        return Subject(model, "nowhere", text_source(tokenizer))

    monkeypatch.setattr(throughput.subject, "load", load)
    monkeypatch.setattr(throughput.scheduler, "measure", lambda: {"schedule_us": 12.345678})

    def run(*arguments: str) -> dict:
        file = tmp_path / "result.json"
        throughput.main(["--scale", "0.05", "--json", str(file), *arguments])
        return json.loads(file.read_text())

    return run


def test_all_peers_are_compared(command, capsys):
    result = command("--requests", "4", "--repeats", "1", "--dtypes", "float32", "--subset", "locked=2")
    part = result["dtypes"]["float32"]
    assert set(part["medians"]) == {"locked", "static", "generate_batch", "hf_cb"}
    assert part["medians"]["locked"]["measured_requests"] == 2
    assert part["medians"]["hf_cb"]["ratio_to_locked"] > 0
    assert part["medians"]["hf_cb"]["outside_model"] > 0
    assert part["equal_requests"] == {"hf_cb = locked": [2, 2], "hf_cb = static": [4, 4], "hf_cb = generate_batch": [4, 4]}
    assert part["alone"]["same_tokens"]
    assert result["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "locked*" in printed
    assert "same tokens, hf_cb = static: 4 of 4 requests" in printed
    assert "scheduler alone: schedule_us 12.35" in printed
    assert part["roofline"]["limits"]["read"] > 0
    assert set(part["roofline"]["decode"]) == {"1", "8", "48"}
    assert "of the matrix peak" in printed


def test_a_profile_says_where_the_time_goes(command, capsys):
    part = command("--requests", "2", "--dtypes", "float32", "--profile")["dtypes"]["float32"]["profile"]
    assert part["groups"]["linear layers"] > 0
    assert sum(part["groups"].values()) == pytest.approx(part["wall_seconds"], rel=0.01)
    assert "outside the model" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--peers", "nobody"), ("--dtypes", "int8"), ("--subset", "nobody=3")])
def test_an_unknown_name_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        throughput.main(arguments)
    assert "there are" in capsys.readouterr().err
