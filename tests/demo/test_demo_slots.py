import io
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.slots import Panel, Span, Timeline, continuous_timeline, draw, static_timeline
from hf_cb import StepRecord


def step(*rows: tuple[int, int], preempted: tuple[int, ...] = ()) -> StepRecord:
    return StepRecord(
        started=0.0,
        seconds=0.0,
        model_seconds=0.0,
        rows=rows,
        sampled=tuple(request for request, _ in rows),
        preempted=preempted,
        num_waiting=0,
        blocks_used=0,
        tokens_stored=0,
        block_size=16,
    )


def covered(timeline: Timeline) -> list[tuple[int, int]]:
    return sorted((span.slot, i) for span in timeline.spans for i in range(span.start, span.stop))


def area(timeline: Timeline) -> list[tuple[int, int]]:
    return [(slot, i) for slot in range(timeline.num_slots) for i in range(timeline.num_iterations)]


def test_static_batches_wait_for_their_longest_row():
    timeline = static_timeline([3, 1, 2], num_slots=2)
    assert timeline == Timeline(
        2,
        5,
        (
            Span(0, 0, 0, 1, "prefill"),
            Span(0, 0, 1, 3, "decode"),
            Span(0, 2, 3, 4, "prefill"),
            Span(0, 2, 4, 5, "decode"),
            Span(1, 1, 0, 1, "prefill"),
            Span(1, None, 1, 5, "wasted"),
        ),
    )
    assert timeline.useful_share == pytest.approx(6 / 10)


def test_a_freed_slot_goes_to_the_next_request():
    steps = [step((10, 5), (11, 5)), step((10, 1), (11, 1)), step((10, 1), (12, 7)), step((12, 1))]
    timeline = continuous_timeline(steps, 2, {10: 0, 11: 1, 12: 2})
    assert timeline.spans == (
        Span(0, 0, 0, 1, "prefill"),
        Span(0, 0, 1, 3, "decode"),
        Span(0, None, 3, 4, "wasted"),
        Span(1, 1, 0, 1, "prefill"),
        Span(1, 1, 1, 2, "decode"),
        Span(1, 2, 2, 3, "prefill"),
        Span(1, 2, 3, 4, "decode"),
    )
    assert timeline.useful_share == pytest.approx(7 / 8)


def test_a_prompt_read_in_chunks_is_one_prefill():
    timeline = continuous_timeline([step((4, 8)), step((4, 3)), step((4, 1))], 1, {4: 0})
    assert timeline.spans == (Span(0, 0, 0, 2, "prefill"), Span(0, 0, 2, 3, "decode"))


def test_the_slots_of_the_preempted_are_free_and_they_come_back_in_another():
    steps = [step((1, 4), (2, 4)), step((1, 1), preempted=(2,)), step((1, 1), (3, 4)), step((2, 5), (3, 1))]
    timeline = continuous_timeline(steps, 2, {1: 0, 2: 1, 3: 2})
    assert [(span.slot, span.start) for span in timeline.spans if span.number == 1] == [(0, 3), (1, 0)]


def test_a_running_request_that_sits_out_a_step_keeps_its_slot():
    timeline = continuous_timeline([step((1, 4), (2, 4)), step((2, 1)), step((1, 1), (2, 1))], 2, {1: 0, 2: 1})
    assert {span.slot for span in timeline.spans if span.number == 0} == {0}
    assert Span(0, None, 1, 2, "wasted") in timeline.spans


def test_steps_of_others_are_left_out():
    timeline = continuous_timeline([step((7, 9)), step((8, 4)), step((8, 1)), step((9, 2))], 1, {8: 0})
    assert timeline.num_iterations == 2


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(lengths, st.integers(1, 5))
def test_both_timelines_cover_their_area_once_and_hold_every_token(lengths, num_slots):
    static = static_timeline(lengths, num_slots)
    continuous = continuous_timeline(_first_free(lengths, num_slots), num_slots, {100 + i: i for i in range(len(lengths))})
    for timeline in (static, continuous):
        assert covered(timeline) == area(timeline)
        assert timeline.useful_share * len(area(timeline)) == pytest.approx(sum(lengths))
        for number, length in enumerate(lengths):
            spans = [span for span in timeline.spans if span.number == number]
            assert sum(span.stop - span.start for span in spans) == length
            assert len({span.slot for span in spans}) == 1
    assert continuous.num_iterations <= static.num_iterations


def _first_free(lengths, num_slots):
    """The steps of a scheduler that admits a request as soon as one has ended."""
    waiting, running, steps, number = list(lengths), {}, [], count(100)
    while waiting or running:
        while waiting and len(running) < num_slots:
            running[next(number)] = [waiting.pop(0), 3]
        steps.append(step(*((request, num_tokens) for request, (_, num_tokens) in running.items())))
        running = {request: [left - 1, 1] for request, (left, _) in running.items() if left > 1}
    return steps


def test_the_picture_says_what_it_shows():
    lengths = [4, 30, 9, 2, 12, 30]
    static = static_timeline(lengths, 2)
    continuous = continuous_timeline(_first_free(lengths, 2), 2, {100 + i: i for i in range(6)})
    figure = draw(Panel("Static", "padded", static, 2.0), Panel("Continuous", "ours", continuous, 1.0), "Six questions")
    png = io.BytesIO()
    figure.savefig(png)
    assert png.getvalue().startswith(b"\x89PNG")
    upper, lower = figure.axes
    for ax, timeline in ((upper, static), (lower, continuous)):
        assert len(ax.patches) == len(timeline.spans)
        texts = [text.get_text() for text in ax.texts]
        assert f"{timeline.useful_share:.0%} of slots useful" in texts
        assert ax.get_xlim() == (0, static.num_iterations)
        assert ax.get_ylabel() == "batch slot"
    assert f"{static.num_iterations - continuous.num_iterations} iterations fewer" in [text.get_text() for text in lower.texts]
    assert figure.get_suptitle() == "Six questions"
    assert len(figure.legends[0].get_texts()) == 3
