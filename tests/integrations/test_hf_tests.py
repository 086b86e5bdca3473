"""The command that runs transformers' own tests: on a checkout of two files, whose tests pass whatever the engine answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from integrations.hf_tests import __main__ as command
from integrations.hf_tests import expected
from integrations.hf_tests.differences import differences
from integrations.hf_tests.outcomes import Run, differing, found

FILE = """
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import hf_cb.continuous


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()


def answer(model, **options):
    ids = torch.arange(5, 12)[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)


class Closed(BaseStreamer):
    def put(self, value):
        raise RuntimeError("closed")

    def end(self):
        pass


def test_right(model):
    assert answer(model).shape == (1, 10)
    answer(model, do_sample=True)
    answer(model, position_ids=torch.arange(1, 8)[None])  # natively
    with pytest.raises(RuntimeError, match="closed"):
        answer(model, streamer=Closed())


def test_wrong(model, monkeypatch):
    served = hf_cb.continuous.generate
    monkeypatch.setattr(hf_cb.continuous, "generate", lambda *args: served(*args) + 1)
    assert answer(model).shape == (1, 10)
"""


@pytest.mark.timeout(300)
def test_calls_are_compared_whatever_the_test_looks_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_fake.py").write_text(FILE)
    before = sorted(tmp_path.rglob("*"))
    status = command.main(["--transformers", str(tmp_path / "tests"), "--files", "test_fake.py"])
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("test_fake.py"))
    assert row == ["test_fake.py", "2", "2", "2", "4", "1", "1", "1", "differ"]
    assert "4 calls were served, each repeated plainly and compared; 1 ran natively, of which\n1 were made again" in shown
    assert "DIFFERS: tests/test_fake.py::test_wrong\n  a call's tokens: [[6, 7, 8" in shown
    assert "1 differences, and 0 more that are expected" in shown
    assert status == 1
    assert sorted(tmp_path.rglob("*")) == before  # it's the user's


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a checkout that has the folder tests"):
        command.main(["--transformers", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main([])


def written(path: Path, status: int, *entries: dict[str, Any]) -> Run:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return Run.read(path, status)


def test_outcomes_that_differ(tmp_path: Path) -> None:
    passed = [{"test": name, "outcome": "passed", "said": ""} for name in "acd"]
    plain = written(tmp_path / "plain", 1, *passed, {"test": "b", "outcome": "failed", "said": "offline"})
    installed = written(
        tmp_path / "installed",
        -11,
        {"test": "a", "outcome": "failed", "said": "assert 1 == 2"},
        {"test": "a", "outcome": "passed", "said": ""},  # by its teardown
        {"test": "b", "outcome": "failed", "said": "offline, too"},
        {"test": "c", "outcome": "skipped", "said": "no model"},
        {"test": "c", "native_calls": {"beams": 2}},
        {"test": "c", "native_calls": {"beams": 1}},
        {"test": "d", "call": "native"},
    )
    assert differing(plain, installed) == ["a", "c", "d"]
    assert list(found(plain, installed)) == [
        ("installed", "pytest ended with status -11"),
        ("a", "failed where plain is passed: assert 1 == 2"),
        ("c", "skipped where plain is passed: no model"),
        ("d", "not run where plain is passed: "),
    ]
    assert (plain.passed, installed.calls, installed.reasons) == (3, Counter(native=1), Counter(beams=3))


def test_what_is_expected_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Run(outcomes={"a::x": ("passed", ""), "a::y": ("passed", "")})
    installed = Run(outcomes={"a::x": ("failed", "it is slow"), "a::y": ("failed", "it is slow")})
    monkeypatch.setattr(expected, "EXPECTED", (expected.Expected("::x$", "slow", "it may be"),))
    totals = command.Totals()
    assert totals.take(plain, installed) == "1 differ, 1 differ, as expected"
    assert [(test, why) for test, _, why in totals.expected] == [("a::x", "it may be")]
    assert [test for test, _ in totals.wrong] == ["a::y"]
    assert totals.take(Run(), Run()) == "nothing, but nothing was served"


IDS, INFINITE = torch.tensor([[1, 2, 3]]), torch.full((1, 5), -torch.inf)


def result(**parts: Any) -> GenerateDecoderOnlyOutput:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    return GenerateDecoderOnlyOutput(**{"sequences": IDS, "scores": (torch.ones(1, 5),), "cache": cache, **parts})


@pytest.mark.parametrize(
    ("got", "want", "said"),
    [
        (IDS, IDS.clone(), []),
        (IDS, IDS + 1, ["tokens: [[1, 2, 3]] where plain has [[2, 3, 4]]"]),
        (IDS, IDS[:, :2], ["tokens: [1, 3] int64 on cpu where plain has [1, 2] int64 on cpu"]),
        (IDS, result(), ["a Tensor where plain has a GenerateDecoderOnlyOutput"]),
        (result(), result(), []),
        (result(), result(scores=(torch.ones(1, 5) + 1e-5,)), []),
        (result(), result(scores=(torch.ones(1, 5) + 1e-3,)), ["scores.0: off by 0.001"]),
        (result(), result(scores=(INFINITE,)), ["scores.0: infinite elsewhere than plain's, in 5 of 5 numbers"]),
        (result(), result(scores=None), ["scores is too much"]),
        (result(), result(logits=(torch.ones(1, 5),)), ["logits is missing"]),
        (result(cache=DynamicCache()), result(), ["cache.0 is missing"]),
        (ValueError("no"), ValueError("no"), []),
        (ValueError("no"), IDS, ["ValueError: no where plain has an answer"]),
        (IDS, KeyError("no"), ["an answer where plain has KeyError: 'no'"]),
    ],
)
def test_differences(got: Any, want: Any, said: list[str]) -> None:
    assert differences(got, want) == said


def test_differences_of_what_was_drawn() -> None:
    assert differences(IDS, IDS + 1, values=False) == []
    assert differences(result(), result(sequences=IDS + 1), values=False) == []
    assert differences(result(), result(logits=(torch.ones(1, 5),)), values=False) == ["logits is missing"]
