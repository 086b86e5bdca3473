"""The live panel: what the engine does now, in figures, and who has sat in which batch slot lately, as a picture."""

from __future__ import annotations

import html
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable

import hf_cb
from demo.slots import INK, MUTED, WASTED, Kind, Timeline, colour, merge

RECORDED_STEPS = 1024  # for CBConfig.record_steps: more than an engine makes between two looks at it
_COLUMNS = 96  # steps in the picture
_FEWEST_SLOTS = 8  # drawn
_MOST_SLOTS = 32
_WINDOW = 5.0  # seconds that the tokens per second are a mean of


class History:
    """Who sat where in the latest steps. A request keeps its slot from its first step to its last."""

    def __init__(self) -> None:
        self._latest = 0.0  # when the latest step began that is in here
        self._slots: dict[int, int] = {}
        self._columns: deque[dict[int, tuple[int, Kind]]] = deque(maxlen=_COLUMNS)

    def add(self, steps: Iterable[hf_cb.StepRecord]) -> None:
        """Take in those that are new; `steps` in order."""
        for step in steps:
            if step.started > self._latest:
                self._latest = step.started
                self._columns.append(self._column(step))

    def _column(self, step: hf_cb.StepRecord) -> dict[int, tuple[int, Kind]]:
        present = {request for request, _ in step.rows}
        self._slots = {request: slot for request, slot in self._slots.items() if request in present}
        column: dict[int, tuple[int, Kind]] = {}
        for request, num_tokens in sorted(step.rows):
            if request not in self._slots:
                taken = set(self._slots.values())
                self._slots[request] = next(slot for slot in itertools.count() if slot not in taken)
            column[self._slots[request]] = (request, "prefill" if num_tokens > 1 else "decode")
        return column

    def timeline(self) -> Timeline:
        """The latest steps, the newest at the right end."""
        missing = _COLUMNS - len(self._columns)
        cells = {(slot, missing + i): cell for i, column in enumerate(self._columns) for slot, cell in column.items()}
        num_slots = max(_FEWEST_SLOTS, 1 + max((slot for slot, _ in cells), default=0))
        return merge(cells, num_slots, _COLUMNS)


class Panel:
    """The panel of one engine, for any number of viewers: it is made anew at most every `interval` seconds."""

    def __init__(self, engine: hf_cb.Engine, interval: float = 0.5) -> None:
        self._engine = engine
        self._interval = interval
        self._history = History()
        self._lock = threading.Lock()
        self._made_at = float("-inf")
        self._html = ""

    def html(self) -> str:
        """As it is now."""
        with self._lock:
            now = time.perf_counter()
            if now - self._made_at >= self._interval:
                self._made_at = now
                steps = self._engine.steps()
                self._history.add(steps)
                self._html = _render(self._engine.stats(), tokens_per_second(steps, now), self._history.timeline())
            return self._html


def tokens_per_second(steps: Iterable[hf_cb.StepRecord], now: float) -> float:
    """Mean over the last few seconds; `now` on the steps' clock."""
    recent = [step for step in steps if step.started + step.seconds > now - _WINDOW]
    if not recent:
        return 0.0
    return sum(len(step.sampled) for step in recent) / max(now - recent[0].started, 1e-3)


def _render(stats: hf_cb.EngineStats, speed: float, timeline: Timeline) -> str:
    share = stats.blocks_used / max(1, stats.num_blocks)
    figures = (
        ("running", f"{stats.running}", "requests in the batch"),
        ("waiting", f"{stats.waiting}", "requests that wait for a place"),
        ("tokens/s", f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}", "all users together"),
        ("KV cache", f"{share:.1%}", f"{stats.blocks_used:,} of {stats.num_blocks:,} blocks"),
    )
    tiles = "".join(
        f'<div class="cb-tile" title="{html.escape(hint)}"><b data-figure="{name}">{value}</b><span>{name}</span></div>'
        for name, value, hint in figures
    )
    bar = f'<div class="cb-bar"><i style="width:{100 * share:.2f}%"></i></div>'
    total = (
        f"{stats.output_tokens:,} tokens in {stats.steps:,} steps so far · attention: {html.escape(stats.attention_backend)}"
    )
    return f'<div class="cb-tiles">{tiles}</div>{bar}{svg(timeline)}<div class="cb-foot">{total}</div>'


def svg(timeline: Timeline) -> str:
    """The picture: a row per slot, a column per step. Each request has a colour of its own; dark where its prompt is read."""
    shown = min(timeline.num_slots, _MOST_SLOTS)
    row, gap, width = 15, 3, 480
    step = width / timeline.num_iterations
    height = shown * (row + gap)
    parts = []
    for span in timeline.spans:
        if span.slot >= shown:
            continue
        x, y, w = span.start * step, span.slot * (row + gap), (span.stop - span.start) * step
        kind = span.kind if span.number is not None else "free"
        fill = WASTED if span.number is None else _hex(colour(span.number, span.kind))
        parts.append(
            f'<rect class="cb-{kind}" x="{x:.1f}" y="{y}" width="{w:.1f}" height="{row}" rx="2" fill="{fill}">'
            f"<title>{'free' if span.number is None else f'request {span.number}'}</title></rect>"
        )
        if span.number is not None and span.kind == "decode" and w > 26:
            parts.append(f'<text x="{x + w / 2:.1f}" y="{y + row - 4}" fill="{INK}">{span.number}</text>')
    more = f" · {timeline.num_slots - shown} more slots are not drawn" if timeline.num_slots > shown else ""
    return (
        f'<div class="cb-caption">batch slots, the last {timeline.num_iterations} steps<span>now →</span></div>'
        f'<svg class="cb-slots" viewBox="0 0 {width} {height}" role="img" aria-label="who sat in which batch slot">'
        f"{''.join(parts)}</svg>"
        f'<div class="cb-foot">dark: reads its prompt · light: a token per step · grey: free{more}</div>'
    )


def _hex(rgb: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


CSS = f"""
.cb-side {{ background: var(--block-background-fill); border-radius: var(--block-radius); padding: 16px !important; }}
.cb-tiles {{ display: grid; grid-template-columns: repeat(4, 1fr); gap: 8px; }}
.cb-tile {{ border-radius: 8px; padding: 8px 4px; text-align: center; }}
.cb-tile b {{ display: block; font-size: 22px; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.cb-tile span, .cb-foot, .cb-caption {{ color: var(--body-text-color-subdued); font-size: 12px; }}
.cb-bar, .cb-tile {{ background: var(--background-fill-secondary); }}
.cb-bar {{ height: 5px; border-radius: 3px; margin: 8px 0 14px; overflow: hidden; }}
.cb-bar i {{ display: block; height: 100%; min-width: 2px; background: {MUTED}; }}
.cb-caption {{ display: flex; justify-content: space-between; margin-bottom: 4px; }}
.cb-slots {{ width: 100%; height: auto; display: block; }}
.cb-slots text {{ font: 10px system-ui, sans-serif; text-anchor: middle; }}
.cb-slots .cb-free {{ fill: var(--border-color-primary); opacity: 0.45; }}
.cb-foot {{ margin-top: 6px; }}
"""
