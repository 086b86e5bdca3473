"""`hf-cb bench`: its figures, of an engine here and of a server."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import fake_server
import numpy as np
import pytest
import tiny_chat

from hf_cb.cli.bench import Figures, lines, put_all
from hf_cb.cli.main import main
from hf_cb.cli.targets import Answered

pytestmark = pytest.mark.timeout(20)

ANSWERS = [Answered(float(i), i + 0.5 + 0.1 * i, i + 2.5 + 0.1 * i, 10, 5) for i in range(4)]


def test_figures() -> None:
    figures = Figures.of(ANSWERS, 2)
    first = [0.5, 0.6, 0.7, 0.8]
    assert figures.first_token == pytest.approx((np.percentile(first, 50), np.percentile(first, 99)))
    assert figures.between_tokens == pytest.approx((0.5, 0.5))  # two seconds, four times the next token
    assert figures.seconds == pytest.approx(5.8)
    assert figures.output_rate == pytest.approx(20 / 5.8)
    assert (figures.requests, figures.prompt_tokens, figures.output_tokens) == (4, 40, 20)
    assert not any("plain" in line for line in lines("m", figures))


def test_so_many_at_a_time_and_each_once() -> None:
    barrier, lock, seen, most, now = threading.Barrier(3), threading.Lock(), [], 0, 0

    class Target:
        def ask(self, index: int) -> Answered:
            nonlocal most, now
            with lock:
                now += 1
                most = max(most, now)
                seen.append(index)
            barrier.wait(10)  # three are there at a time, or this breaks
            with lock:
                now -= 1
            return ANSWERS[0]

    assert len(put_all(Target(), 9, 3)) == 9
    assert sorted(seen) == list(range(9))
    assert most == 3


def test_the_first_error_is_raised() -> None:
    class Target:
        def ask(self, index: int) -> Answered:
            if index == 1:
                raise ConnectionError("gone")
            return ANSWERS[0]

    with pytest.raises(ConnectionError, match="gone"):
        put_all(Target(), 4, 1)


@pytest.mark.timeout(60)
def test_an_engine_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, report = tiny_chat.save(tmp_path / "tiny"), tmp_path / "report.json"
    sizes = ["--concurrency", "3", "--requests", "5", "--prompt-tokens", "7", "--new-tokens", "4", "--plain", "2"]
    assert main(["bench", str(folder), *sizes, "--device", "cpu", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (5, 35, 20)
    assert 0 < figures["first_token"][0] <= figures["first_token"][1] < figures["request"][1] <= figures["seconds"]
    said = capsys.readouterr().out
    assert said.startswith("tiny (torch.float32, cpu)\n5 requests, 3 at a time, in ")
    assert f"{figures['output_rate'] / figures['plain_rate']:.1f}x plain generate() behind a lock" in said


def answer(path: str, headers: dict[str, str], body: bytes) -> fake_server.Answer:
    if path == "/v1/models":
        return 200, '{"data": [{"id": "served"}, {"id": "other"}]}'
    asked = json.loads(body)
    assert (asked["stream"], asked["max_tokens"], len(asked["messages"][0]["content"].split())) == (True, 6, 9)
    if asked["model"] != "served":
        return 404, json.dumps({"error": {"message": f"there is no model {asked['model']}"}})
    parts = [{"choices": [{"delta": {"role": "assistant"}}]}, *({"choices": [{"delta": {"content": text}}]} for text in "ab")]
    return 200, fake_server.events(*parts, {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 6}})


def test_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server.serving(answer) as url:
        sizes = ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "9", "--new-tokens", "6"]
        assert main(["bench", url, *sizes]) == 0
        assert capsys.readouterr().out.startswith(f"served at {url}\n4 requests, 2 at a time, in ")
        assert main(["bench", url, *sizes, "--model", "absent"]) == 1
        assert "404 there is no model absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (fake_server.events({"error": {"message": "broken"}}), "broken"),
        (fake_server.events({"choices": [{"delta": {"content": "a"}}]}), "an answer came without its usage"),
        ('data: {"choices"\n\n', "the answer broke off"),
    ],
)
def test_answers_that_break_off(body: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server.serving(lambda *_: (200, body)) as url:
        assert main(["bench", url, "--model", "m", "--requests", "1"]) == 1
    assert message in capsys.readouterr().err
