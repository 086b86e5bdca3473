"""Who sat in which batch slot at each iteration: timelines from data, and the picture that compares them.

An iteration is one forward pass of the model. A slot is one of the rows that a batch has room for.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

Kind = Literal["prefill", "decode", "wasted"]

INK, MUTED, WASTED, HATCH = "#1f2933", "#616e7c", "#eef0f2", "#c3cad1"


class Step(Protocol):
    """What is read of a StepRecord."""

    @property
    def rows(self) -> Sequence[tuple[int, int]]: ...
    @property
    def preempted(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One slot from iteration `start` up to, not including, `stop`. `number`: whose; None: nobody's."""

    slot: int
    number: int | None
    start: int
    stop: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every slot did at every iteration: the spans cover the whole area, once."""

    num_slots: int
    num_iterations: int
    spans: tuple[Span, ...]

    @property
    def useful_share(self) -> float:
        """Share of the area in which somebody's token was computed, 0 to 1."""
        useful = sum(span.stop - span.start for span in self.spans if span.kind != "wasted")
        return useful / max(1, self.num_slots * self.num_iterations)


def static_timeline(output_lengths: Sequence[int], num_slots: int) -> Timeline:
    """Batches of `num_slots` rows, in order, each as long as its longest row. `output_lengths`: tokens per row, EOS included.

    The first iteration of a batch reads the prompts and gives the first tokens.
    """
    cells: dict[tuple[int, int], tuple[int, Kind]] = {}
    begin = 0
    for first in range(0, len(output_lengths), num_slots):
        batch = output_lengths[first : first + num_slots]
        for slot, length in enumerate(batch):
            for i in range(length):
                cells[slot, begin + i] = (first + slot, "decode" if i else "prefill")
        begin += max(batch)
    return merge(cells, num_slots, begin)


def continuous_timeline(steps: Iterable[Step], num_slots: int, numbers: Mapping[int, int]) -> Timeline:
    """The slots of a continuous run. `numbers`: request id to the number shown; steps of other requests only are left out.

    A request takes the lowest free slot at its first step, in the order of the ids, and keeps it until it ends or is preempted.
    """
    ours = [step for step in steps if any(request in numbers for request, _ in step.rows)]
    last = {request: i for i, step in enumerate(ours) for request, _ in step.rows}
    slots: dict[int, int] = {}
    cells: dict[tuple[int, int], tuple[int, Kind]] = {}
    for i, step in enumerate(ours):
        for request in step.preempted:
            slots.pop(request, None)
        for request, num_tokens in sorted(step.rows):
            if request not in slots:
                slots[request] = min(set(range(num_slots)) - set(slots.values()))
            # One token is a decode, more are a piece of the prompt: so close that a picture need not tell the odd one.
            cells[slots[request], i] = (numbers[request], "prefill" if num_tokens > 1 else "decode")
        slots = {request: slot for request, slot in slots.items() if last[request] > i}
    return merge(cells, num_slots, len(ours))


def merge(cells: Mapping[tuple[int, int], tuple[int, Kind]], num_slots: int, num_iterations: int) -> Timeline:
    """Join neighbouring cells (slot, iteration) of the same sort; what no cell covers is wasted."""
    spans = []
    for slot in range(num_slots):
        start = 0
        for i in range(1, num_iterations + 1):
            here, before = cells.get((slot, i)), cells.get((slot, i - 1))
            if i == num_iterations or here != before:
                number, kind = before or (None, "wasted")
                spans.append(Span(slot, number, start, i, kind))
                start = i
    return Timeline(num_slots, num_iterations, tuple(spans))


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of the picture: `name`, a few words on it, the seconds that the run took."""

    name: str
    text: str
    timeline: Timeline
    seconds: float


def draw(static: Panel, continuous: Panel, title: str) -> Figure:
    """The picture: `static` above, `continuous` below, on the same axis of iterations."""
    layout = ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.14, hspace=0.06)
    figure = Figure(figsize=(14, 7.6), dpi=130, facecolor="white", layout=layout)
    axes = figure.subplots(2, 1, sharex=True)
    end = max(static.timeline.num_iterations, continuous.timeline.num_iterations)
    for ax, panel in zip(axes, (static, continuous), strict=True):
        draw_panel(ax, panel, end)
    saved = static.timeline.num_iterations - continuous.timeline.num_iterations
    if saved > 0.08 * end:
        _draw_saving(axes[1], continuous.timeline, saved)
    axes[1].set_xlabel("iteration (one forward pass of the model)", color=INK, fontsize=11, labelpad=8)
    figure.suptitle(title, x=0.012, ha="left", color=INK, fontsize=17, fontweight="bold")
    figure.legend(handles=_legend(), loc="outside lower left", ncols=3, frameon=False, fontsize=10.5, labelcolor=INK)
    return figure


def draw_panel(ax: Axes, panel: Panel, end: int) -> None:
    timeline = panel.timeline
    for span in timeline.spans:
        _draw_span(ax, span, end)
    ax.set(xlim=(0, end), ylim=(timeline.num_slots - 0.45, -0.55))
    ax.set_yticks(range(timeline.num_slots), [str(slot + 1) for slot in range(timeline.num_slots)])
    ax.set_ylabel("batch slot", color=INK, fontsize=11, labelpad=8)
    ax.tick_params(length=0, colors=MUTED, labelbottom=True)
    ax.spines[:].set_visible(False)
    ax.text(0, 1.035, panel.name, transform=ax.transAxes, color=INK, fontsize=13, fontweight="bold")
    ax.text(0.215, 1.035, panel.text, transform=ax.transAxes, color=MUTED, fontsize=11)
    figures = f"{timeline.num_iterations} iterations · {panel.seconds:.1f} s · "
    share = ax.text(
        1, 1.035, f"{timeline.useful_share:.0%} of slots useful", transform=ax.transAxes, color=INK, fontsize=13, ha="right"
    )
    share.set_fontweight("bold")
    ax.annotate(figures, (0, 0), xycoords=share, color=MUTED, fontsize=11, ha="right", va="bottom")


def _draw_span(ax: Axes, span: Span, end: int) -> None:
    box = (span.start, span.slot - 0.42), span.stop - span.start, 0.84
    if span.number is None:
        ax.add_patch(Rectangle(*box, facecolor=WASTED, edgecolor=HATCH, hatch="////", linewidth=0))
        return
    ax.add_patch(Rectangle(*box, facecolor=colour(span.number, span.kind), linewidth=0))
    if span.kind == "prefill":  # where a request begins: a hair of white parts it from the one before
        ax.plot([span.start] * 2, [span.slot - 0.42, span.slot + 0.42], color="white", linewidth=1)
    elif span.stop - span.start > 0.012 * end:
        middle = (span.start + span.stop) / 2
        ax.text(middle, span.slot, str(span.number + 1), ha="center", va="center", fontsize=8.5, color=INK)


def _draw_saving(ax: Axes, timeline: Timeline, saved: int) -> None:
    end, middle = timeline.num_iterations, (timeline.num_slots - 1) / 2
    ax.annotate("", (end, middle), (end + saved, middle), arrowprops={"arrowstyle": "-|>", "color": MUTED, "linewidth": 1.3})
    ax.text(end + saved / 2, middle - 0.3, f"{saved} iterations fewer", ha="center", va="bottom", color=MUTED, fontsize=11)


def colour(number: int, kind: Kind) -> tuple[float, float, float]:
    """Each request its own hue (neighbours far apart: steps of the golden ratio); prefill dark, decode light."""
    hue = (0.58 + number * 0.618034) % 1.0
    return colorsys.hls_to_rgb(hue, 0.38, 0.60) if kind == "prefill" else colorsys.hls_to_rgb(hue, 0.76, 0.58)


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=colour(0, "prefill"), label="prefill: reads the prompt, gives the first token"),
        Patch(facecolor=colour(0, "decode"), label="decode: one token for one request (its number and colour)"),
        Patch(
            facecolor=WASTED,
            edgecolor=HATCH,
            hatch="////",
            linewidth=0,
            label="wasted: the slot's request has ended, or there is none",
        ),
    ]
