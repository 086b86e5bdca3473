from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat

import hf_cb
from benchmarks import serving
from benchmarks.serving_clients import Answer, Ask, _parse

pytestmark = pytest.mark.timeout(120)  # it starts a server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bench(folder: Path) -> Iterator[serving.Bench]:
    bench = serving.Bench(argparse.Namespace(model=str(folder), engine={}))
    yield bench
    hf_cb.uninstall(bench.model)


def right(bench: serving.Bench, number: int) -> Answer:
    ask = Ask(number, 5)
    (result,) = bench.results([ask])
    text = bench.tokenizer.decode(list(result.tokens), skip_special_tokens=True)
    return Answer(ask, text, result.finish_reason.value, len(result.tokens), (0.0, 1.0))


def test_answers_that_are_mixed_up_lost_or_cut_are_found(bench: serving.Bench) -> None:
    first, second = right(bench, 0), right(bench, 1)
    bench.check([first, second])
    mixed = [dataclasses.replace(first, ask=second.ask), dataclasses.replace(second, ask=first.ask)]
    for wrong in (mixed, [dataclasses.replace(first, text="")], [dataclasses.replace(first, error="it broke")]):
        with pytest.raises(RuntimeError, match=r"are not right"):
            bench.check([second, *wrong])


def test_a_stream_without_its_end_is_an_error() -> None:
    line = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n'
    assert _parse(Ask(0, 1), [line], (0.0, 1.0)).error
    assert _parse(Ask(0, 1), [], (0.0, 1.0)).error


def test_a_small_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--clients", "4", "--max-tokens", "5", "--repeats", "1", "--json", str(report)]
    serving.main(["--model", str(folder), "--parts", "throughput,sigterm", *options])
    parts = json.loads(report.read_text())["parts"]
    assert parts["throughput"]["ratio"] > 0
    assert parts["sigterm"] == {"answered": 4, "status": 0}
    assert "sigterm" in capsys.readouterr().out
