import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

from demo.chat_panel import History, svg, tokens_per_second


@dataclass
class Step:
    """What the panel reads of a StepRecord."""

    started: float
    rows: tuple[tuple[int, int], ...]
    sampled: tuple[int, ...] = ()
    seconds: float = 0.1
    preempted: tuple[int, ...] = field(default=())


def slots(history: History) -> list[list[int | None]]:
    """By slot: whose each of the latest columns is, the empty ones on the left cut off."""
    timeline = history.timeline()
    rows: list[list[int | None]] = [[None] * timeline.num_iterations for _ in range(timeline.num_slots)]
    for span in timeline.spans:
        rows[span.slot][span.start : span.stop] = [span.number] * (span.stop - span.start)
    first = min(i for row in rows for i, number in enumerate(row) if number is not None)
    return [row[first:] for row in rows if any(number is not None for number in row)]


def test_a_request_keeps_its_slot_and_a_freed_one_is_filled():
    history = History()
    history.add([Step(1, ((5, 9), (6, 9))), Step(2, ((5, 1), (6, 1))), Step(3, ((6, 1), (7, 9))), Step(4, ((6, 1), (7, 1)))])
    assert slots(history) == [[5, 5, 7, 7], [6, 6, 6, 6]]


def test_steps_that_were_seen_count_once():
    history = History()
    steps = [Step(1, ((5, 9),)), Step(2, ((5, 1),)), Step(3, ((5, 1),))]
    history.add(steps[:2])
    history.add(steps)
    assert slots(history) == [[5, 5, 5]]


def test_only_the_latest_steps_are_kept():
    history = History()
    history.add([Step(1 + i, ((i // 50, 1),)) for i in range(1000)])
    timeline = history.timeline()
    assert {span.number for span in timeline.spans if span.number is not None} == {18, 19}


def test_tokens_per_second_are_those_of_the_last_seconds():
    steps = [Step(10.0 + i, (), sampled=(1, 2, 3)) for i in range(20)]
    assert tokens_per_second(steps, now=30.0) == 5 * 3 / 5
    assert tokens_per_second(steps, now=100.0) == 0
    assert tokens_per_second([], now=1.0) == 0


def test_the_picture_is_well_formed_and_shows_everybody():
    history = History()
    history.add([Step(1 + i, tuple((n, 9 if i == 0 else 1) for n in range(40))) for i in range(96)])
    drawn = svg(history.timeline())
    root = ElementTree.fromstring(f"<div>{drawn}</div>")
    titles = {title.text for title in root.iter("title")}
    assert {f"request {n}" for n in range(32)} <= titles
    assert "8 more slots are not drawn" in drawn
