"""The picture of `hf-cb top`: a panel for each model, from a history of scrapes. Narrow and wide terminals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hf_cb.cli.scrape import Between, History, Scrape

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WIDE, _MIDDLE = 96, 76  # columns from which three blocks of figures stand beside each other, and two
_ENDS = ("stop", "length", "cancelled", "timeout", "failed")


class Bar:
    """A share of a whole, as wide as there is room."""

    def __init__(self, share: float, is_bad_when_full: bool = False) -> None:
        self._share = min(1.0, max(0.0, share))
        self._is_bad = is_bad_when_full

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        filled = max(round(width * self._share), 1 if self._share > 0 else 0)
        is_full, is_nearly = self._is_bad and self._share > 0.95, self._is_bad and self._share > 0.8
        style = "red" if is_full else "yellow" if is_nearly else "green"
        yield Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest `width` values as columns, the highest of them as high as there is."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    levels = [round(8 * value / most) if most > 0 else 0 for value in shown]
    # What is not zero shows.
    return "".join(_EIGHTHS[max(level, 1 if value > 0 else 0)] for level, value in zip(levels, shown, strict=True)).rjust(width)


def picture(history: History, source: str, width: int, note: str = "") -> RenderableType:
    """All of it, for a terminal of `width` columns. `note`: a line at the end, such as what went wrong."""
    parts: list[RenderableType] = [Text(f"hf-cb top  {source}", style="bold", no_wrap=True, overflow="ellipsis")]
    parts += [_panel(history, model, width) for model in sorted(history.latest.values)]
    if note:
        parts.append(Text(note, style="bold red", overflow="fold"))
    return Group(*parts)


def _panel(history: History, model: str, width: int) -> Panel:
    latest, last, window = history.latest, history.last(), history.window()
    blocks = [_rates(history, last, model, width), _latencies(window, model), _ends(latest, last, model)]
    body = Group(_bars(latest, model), *_beside(blocks, width), *_native(latest, model))
    return Panel(body, title=Text(model), title_align="left", width=width)


def _beside(blocks: Sequence[Table], width: int) -> list[RenderableType]:
    """As many beside each other as there is room for."""
    num_columns = 3 if width >= _WIDE else 2 if width >= _MIDDLE else 1
    parts: list[RenderableType] = []
    for start in range(0, len(blocks), num_columns):
        row = blocks[start : start + num_columns]
        table = Table.grid(padding=(0, 3), expand=len(row) > 1)
        table.add_row(*row)
        parts += [Text(), table]
    return parts


def _bars(latest: Scrape, model: str) -> Table:
    running, slots = latest.value(model, "num_requests_running"), latest.value(model, "batch_slots")
    waiting = latest.value(model, "num_requests_waiting")
    used, blocks = latest.value(model, "kv_cache_usage_ratio"), latest.value(model, "kv_cache_blocks")
    bars = Table.grid(padding=(0, 1), expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(ratio=1)
    bars.add_column(no_wrap=True)
    bars.add_row("slots", Bar(running / slots if slots else 0.0), f"{running:.0f} of {slots:.0f}")
    bars.add_row("KV", Bar(used, is_bad_when_full=True), f"{used:.1%} of {blocks:.0f} blocks")
    bars.add_row("queue", Text(f"{waiting:.0f} waiting", style="yellow" if waiting else ""))
    return bars


def _grid(*rows: tuple[str, ...], title: Sequence[str] = ()) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for _ in range(max(map(len, rows)) - 1):
        grid.add_column(justify="right", no_wrap=True)
    if title:
        grid.add_row(*(Text(part, style="dim") for part in title))
    for name, *figures in rows:
        grid.add_row(name, *figures)
    return grid


def _rates(history: History, last: Between, model: str, width: int) -> Table:
    def row(label: str, name: str) -> tuple[str, ...]:
        line = sparkline(history.rates(model, name), 16 if width >= _MIDDLE else min(24, max(0, width - 26)))
        return label, f"{last.rate(model, name):.1f}", f"[cyan]{line}[/]"

    steps = last.rise(model, "engine_steps_total")
    tokens = last.rise(model, "iteration_tokens_sum")
    busy = last.rate(model, "engine_step_seconds_total")
    return _grid(
        row("output", "generation_tokens_total"),
        row("prompt", "prompt_tokens_total"),
        ("per step", f"{tokens / steps:.1f}" if steps else "-", ""),
        ("busy", f"{min(1.0, busy):.0%}", ""),
        title=("", "tokens/s", ""),
    )


def _latencies(window: Between, model: str) -> Table:
    def row(label: str, name: str) -> tuple[str, ...]:
        return label, *(_seconds(window.quantile(model, name, q)) for q in (0.5, 0.99))

    return _grid(
        row("first token", "time_to_first_token_seconds"),
        row("next token", "inter_token_latency_seconds"),
        row("in the queue", "request_queue_time_seconds"),
        row("request", "e2e_request_latency_seconds"),
        title=("latency", "P50", "P99"),
    )


def _ends(latest: Scrape, last: Between, model: str) -> Table:
    rows = []
    for reason in _ENDS:
        ended = latest.value(model, "request_success_total", finished_reason=reason)
        rate = last.rate(model, "request_success_total", finished_reason=reason)
        if ended or reason in ("stop", "length"):
            rows.append((reason, f"{ended:.0f}", f"{rate:.1f}/s"))
    queries, hits = (latest.value(model, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    rows += [("prefix hits", f"{hits / queries:.0%}" if queries else "-", "")]
    for label, name in (("preempted", "num_preemptions_total"), ("refused", "requests_rejected_total")):
        if count := latest.value(model, name):
            rows.append((label, f"{count:.0f}", ""))
    return _grid(*rows, title=("ended", "", ""))


def _native(latest: Scrape, model: str) -> list[RenderableType]:
    calls = sorted(latest.by_label(model, "native_calls_total").items(), key=lambda pair: -pair[1])
    return [
        Text(f"native: {count:.0f} x {reason}", style="dim", overflow="ellipsis", no_wrap=True) for reason, count in calls[:3]
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
