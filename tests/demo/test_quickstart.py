import threading

import pytest
import tiny_chat
import torch

from demo import quickstart
from demo.live import Clock
from demo.prompts import QUESTIONS
from demo.report import Answer


def test_the_questions_differ():
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 32


def test_the_clock_skips_the_prompt_and_stops_at_eos():
    answers = [Answer(0, 3, 0.0, []), Answer(1, 3, 0.0, [])]
    clock = Clock(answers, frozenset({9}), threading.Event())
    clock.put(torch.zeros(2, 3, dtype=torch.long))
    for tokens in ([5, 9], [6, 9], [7, 9]):
        clock.put(torch.tensor(tokens))
    assert answers[0].finished_at is None
    clock.end()
    assert [answer.tokens for answer in answers] == [[5, 6, 7], [9]]
    assert 0 < answers[1].first_token_at <= answers[1].finished_at < answers[0].finished_at


def test_a_stopped_clock_ends_its_call():
    stop = threading.Event()
    clock = Clock([Answer(0, 1, 0.0, [])], frozenset(), stop)
    clock.put(torch.zeros(1, 1, dtype=torch.long))
    stop.set()
    with pytest.raises(InterruptedError):
        clock.put(torch.tensor([1]))


@pytest.fixture
def tiny_model(tmp_path):
    return tiny_chat.save(tmp_path / "tiny")


def test_the_whole_demo_on_a_tiny_model(tiny_model, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--model", str(tiny_model), "--threads", "8", "--max-new-tokens", "5", "--plain", "3", "--out", str(out)]
    quickstart.main(options)
    printed = capsys.readouterr().out
    ours = next(line for line in printed.splitlines() if line.startswith("hf_cb, 8 threads"))
    assert ours.split()[3:5] == ["32", "160"]
    assert "3/3" in ours
    assert "extrapolated" in printed
    assert "calls left to plain generate: none" in printed
    assert (out / "batch_slots.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--plain", "some"])
    assert "--plain" in capsys.readouterr().err
