import dataclasses

import pytest

from demo.report import Answer, Row, Run, extrapolate, identical_rows, kv_waste, mean_batch, rows_of, static_kv_waste, table
from hf_cb import StepRecord


def answer(number: int, tokens: list[int], *, prompt: int = 4, first: float | None = 1.0) -> Answer:
    return Answer(number, prompt, 10.0, tokens, None if first is None else 10.0 + first, 20.0)


def run(name: str, *answers: Answer, seconds: float) -> Run:
    return Run(name, {a.number: a for a in answers}, seconds, mean_batch=3.0, kv_waste=0.04)


def record(num_rows: int, blocks_used: int, tokens_stored: int) -> StepRecord:
    rows = tuple((request, 1) for request in range(num_rows))
    return StepRecord(0.0, 0.0, 0.0, rows, (), (), 0, blocks_used, tokens_stored, 16)


def test_identical_rows_are_those_that_both_answered_alike():
    ours = {0: answer(0, [1, 2]), 1: answer(1, [3]), 2: answer(2, [4])}
    theirs = {0: answer(0, [1, 2]), 1: answer(1, [3, 3])}
    assert identical_rows(ours, theirs) == (1, 2)


def test_mean_batch_and_kv_waste_of_steps():
    steps = [record(2, 4, 60), record(4, 6, 84)]
    assert mean_batch(steps) == 3.0
    assert kv_waste(steps) == pytest.approx(1 - 144 / 160)
    assert (mean_batch([]), kv_waste([])) == (0.0, 0.0)


def test_static_kv_waste_counts_padding_and_ended_rows():
    # Width 6: the first iteration stores 2 x 6 of which 6 + 4 are needed; at the second the second row has ended.
    batch = [answer(0, [1, 2], prompt=6), answer(1, [1], prompt=4)]
    assert static_kv_waste(batch, 2) == pytest.approx(1 - (10 + 7) / (12 + 14))
    assert static_kv_waste(batch, 1) == 0.0


def test_extrapolation_is_by_tokens():
    row = Row("lock", 8, 400, 20.0, 1.0, 2.0, 9.0, (8, 8), 1.0)
    whole = extrapolate(row, 32, 2000, "all")
    assert (whole.name, whole.requests, whole.tokens, whole.seconds) == ("all", 32, 2000, 100.0)
    assert whole.tokens_per_second == row.tokens_per_second
    assert (whole.first_token_median, whole.first_token_max, whole.identical) == (None, None, None)


def test_rows_of_a_part_and_of_all():
    base = run("lock", answer(0, [1] * 10, first=1.0), seconds=2.0)
    ours = run("ours", answer(0, [1] * 10, first=0.5), answer(1, [2] * 30, first=1.5), seconds=1.0)
    measured, extrapolated, row = rows_of(base, [ours])
    assert (measured.requests, measured.seconds, measured.speed_up, measured.identical) == (1, 2.0, 1.0, None)
    assert (extrapolated.requests, extrapolated.tokens, extrapolated.seconds) == (2, 40, 8.0)
    assert (row.speed_up, row.identical) == (8.0, (1, 1))
    assert (row.first_token_median, row.first_token_max) == (1.0, 1.5)


def test_nothing_is_extrapolated_when_plain_answered_all():
    base = run("lock", answer(0, [1]), answer(1, [2]), seconds=2.0)
    assert [row.name for row in rows_of(base, [dataclasses.replace(base, name="ours")])] == ["lock", "ours"]


def test_the_table_lines_up():
    rows = [Row("lock", 8, 400, 20.0, 1.0), Row("ours", 32, 2000, 12.5, 8.0, 0.25, 1.5, (8, 8), 21.25, 0.036)]
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[3].split() == ["lock", "8", "400", "20.0", "s", "20.0", "1.0x", "-", "-", "-", "-", "-"]
    assert lines[4].split()[1:] == ["32", "2000", "12.5", "s", "160.0", "8.0x", "0.25", "s", "1.50", "s", "8/8", "21.2", "4%"]
