"""What the demo measured, as numbers and as a table. Pure: data in, data out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


class Step(Protocol):
    """What is read of a StepRecord."""

    @property
    def rows(self) -> Sequence[tuple[int, int]]: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def tokens_stored(self) -> int: ...
    @property
    def block_size(self) -> int: ...


@dataclass(slots=True)
class Answer:
    """One question's answer. Times are in seconds on time.perf_counter's clock; None: not yet.

    `tokens`: ids, the one that ends the answer included; while it runs, those that came so far.
    """

    number: int
    num_prompt_tokens: int
    asked_at: float
    tokens: list[int]
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One way to answer the questions: `seconds` from the first question to the last answer. None: not known."""

    name: str
    answers: Mapping[int, Answer]  # by number
    seconds: float
    mean_batch: float | None = None
    kv_waste: float | None = None  # share of the KV memory in use that holds no token which is still needed


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; a None is shown as a dash."""

    name: str
    requests: int
    tokens: int
    seconds: float
    speed_up: float
    first_token_median: float | None = None
    first_token_max: float | None = None
    identical: tuple[int, int] | None = None  # (rows with the baseline's tokens, rows that both have)
    mean_batch: float | None = None
    kv_waste: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def num_tokens(answers: Iterable[Answer]) -> int:
    """Output tokens of all the answers together."""
    return sum(len(answer.tokens) for answer in answers)


def identical_rows(ours: Mapping[int, Answer], theirs: Mapping[int, Answer]) -> tuple[int, int]:
    """How many answers that both have are the same, token for token; and how many both have."""
    both = ours.keys() & theirs.keys()
    return sum(ours[number].tokens == theirs[number].tokens for number in both), len(both)


def mean_batch(steps: Sequence[Step]) -> float:
    """Requests per step."""
    return sum(len(step.rows) for step in steps) / max(1, len(steps))


def kv_waste(steps: Sequence[Step]) -> float:
    """Share of the room in the blocks in use that holds no token, over all steps; 0 to 1."""
    room = sum(step.blocks_used * step.block_size for step in steps)
    return 1 - sum(step.tokens_stored for step in steps) / room if room else 0.0


def static_kv_waste(answers: Sequence[Answer], num_slots: int) -> float:
    """The same for padded batches: padding counts, and rows whose request has ended; over all iterations."""
    room = needed = 0
    for first in range(0, len(answers), num_slots):
        batch = answers[first : first + num_slots]
        width = max(answer.num_prompt_tokens for answer in batch)
        for i in range(max(len(answer.tokens) for answer in batch)):
            room += len(batch) * (width + i)
            needed += sum(answer.num_prompt_tokens + i for answer in batch if i < len(answer.tokens))
    return 1 - needed / room if room else 0.0


def extrapolate(row: Row, requests: int, tokens: int, name: str) -> Row:
    """`row` as if it had made `tokens` tokens at the same rate; what cannot be told from the rate is left open."""
    return replace(
        row,
        name=name,
        requests=requests,
        tokens=tokens,
        seconds=tokens / row.tokens_per_second,
        first_token_median=None,
        first_token_max=None,
        identical=None,
    )


def rows_of(baseline: Run, others: Sequence[Run]) -> list[Row]:
    """The table's lines: the baseline, extrapolated to all the questions where it answered fewer, then the others."""
    base_rate = num_tokens(baseline.answers.values()) / baseline.seconds
    rows = [_row(baseline, baseline, base_rate)]
    whole = max(others, key=lambda run: len(run.answers))
    if len(baseline.answers) < len(whole.answers):
        tokens = num_tokens(whole.answers.values())
        rows.append(extrapolate(rows[0], len(whole.answers), tokens, "   for all, extrapolated by tokens"))
    return rows + [_row(run, baseline, base_rate) for run in others]


def _row(run: Run, baseline: Run, base_rate: float) -> Row:
    tokens = num_tokens(run.answers.values())
    waits = [a.first_token_at - a.asked_at for a in run.answers.values() if a.first_token_at is not None]
    return Row(
        name=run.name,
        requests=len(run.answers),
        tokens=tokens,
        seconds=run.seconds,
        speed_up=tokens / run.seconds / base_rate,
        first_token_median=statistics.median(waits) if waits else None,
        first_token_max=max(waits, default=None),
        identical=None if run is baseline else identical_rows(run.answers, baseline.answers),
        mean_batch=run.mean_batch,
        kv_waste=run.kv_waste,
    )


_HEAD = (
    ("", "answers", "tokens", "time", "tokens/s", "speed-up", "first token", "", "tokens as", "mean", "KV"),
    ("", "", "", "", "", "", "median", "max", "plain", "batch", "waste"),
)


def table(rows: Sequence[Row]) -> str:
    """The lines as text, numbers to the right."""
    cells = [*_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD[0]))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    return "\n".join([*lines[:2], "─" * max(map(len, lines)), *lines[2:]])


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return (
        row.name,
        str(row.requests),
        str(row.tokens),
        f"{row.seconds:.1f} s",
        f"{row.tokens_per_second:.1f}",
        f"{row.speed_up:.1f}x",
        text(row.first_token_median, "{:.2f} s"),
        text(row.first_token_max, "{:.2f} s"),
        "-" if row.identical is None else f"{row.identical[0]}/{row.identical[1]}",
        text(row.mean_batch, "{:.1f}"),
        text(row.kv_waste, "{:.0%}"),
    )
