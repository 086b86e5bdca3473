import json
import multiprocessing
import os
import signal

import pytest

from integrations import answer_log
from integrations.answer_log import AnswerLog, LogError, write_record

SETTINGS = {"model": None, "seed": 0}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "answers.jsonl"


def written(output, *numbers: int) -> AnswerLog:
    """A log with these answers, as a killed run leaves it: its locks went with its process."""
    with AnswerLog(output) as log:
        assert log.begin(SETTINGS) == {}
        with log.open_part("0") as part:
            for number in numbers:
                write_record(part, {"line": number, "text": f"ä{number}"})
    return log


def found(output) -> dict:
    """What a new run finds done."""
    with AnswerLog(output) as log:
        return log.begin(SETTINGS)


def test_a_new_run_finds_what_is_done(output):
    written(output, 3, 1)
    assert found(output) == {n: {"line": n, "text": f"ä{n}"} for n in (1, 3)}


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_line_that_was_cut_off_does_not_count(output, cut):
    log = written(output, 1, 2)
    (part,) = log.folder.glob("part-*")
    whole = part.read_bytes()
    part.write_bytes(whole[:-cut])
    assert found(output).keys() == {1}


def test_the_output_is_in_order_and_the_parts_go(output):
    written(output, 3, 1)
    with AnswerLog(output) as log:
        log.begin(SETTINGS)
        log.finish([1, 2, 3], {2: {"line": 2, "error": "bad"}})
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1, 2, 3]
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_an_output_that_is_there_is_not_touched(output):
    output.write_text("mine")
    with pytest.raises(LogError, match="there already"):
        found(output)
    assert output.read_text() == "mine"


def test_other_settings_are_refused(output):
    written(output, 1)
    with AnswerLog(output) as log, pytest.raises(LogError, match="begun with seed = 0, and this run has 5"):
        log.begin(SETTINGS | {"seed": 5})


def _hold(output, ready):
    log = AnswerLog(output)
    log.begin(SETTINGS)
    ready.send(os.getpid())
    signal.pause()


def _hold_part(output, ready):
    with AnswerLog(output).open_part("x"):
        ready.send(os.getpid())
        signal.pause()


@pytest.mark.parametrize("hold", [_hold, _hold_part])
def test_two_runs_at_one_output_are_refused_until_one_is_killed(output, monkeypatch, hold):
    monkeypatch.setattr(answer_log, "_PATIENCE", 0.3)
    written(output, 1)
    receive, send = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=hold, args=(output, send))
    other.start()
    try:
        receive.recv()
        with pytest.raises(LogError, match="another run"):
            found(output)
    finally:
        other.kill()
        other.join()
    assert found(output).keys() == {1}


def test_a_kill_between_output_and_removal_changes_nothing(output):
    written(output, 1, 2)
    output.write_text("of the same run, before it was killed")
    with AnswerLog(output) as log:
        log.begin(SETTINGS)
        log.finish([1, 2], {})
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1, 2]
