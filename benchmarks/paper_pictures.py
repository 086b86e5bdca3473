"""Pictures of what `benchmarks.papers` measured, and the same as text. Pure: data in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import pictures, report

_OURS, _OTHER, _THIRD = "#d62728", "#7f7f7f", "#1f77b4"
_SHARES = (
    ("used", "tokens stored", _OURS),
    ("later", "kept for tokens to come", "#fdae6b"),
    ("wasted", "never used", "#d9d9d9"),
)

Points = Sequence[Mapping[str, Any]]


def draw(result: Mapping[str, Any], file: Path) -> Path:
    """The picture of one part, as PNG in `file`; returns `file`. Raises KeyError for an unknown `kind`."""
    paint, title, size = _PARTS[result["kind"]]
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    paint(figure, result["points"])
    figure.suptitle(pictures.title(result, title), fontsize="medium")
    figure.savefig(file, dpi=pictures.DOTS_PER_INCH)
    return file


def text(result: Mapping[str, Any]) -> str:
    """One line for each point, without what is a list; where peers were compared, a table for each."""
    return "\n".join(
        f"at {point['x']:g}\n{report.table(point['peers'], 0)}" if "peers" in point else "  ".join(_values(point))
        for point in result["points"]
    )


def _values(point: Mapping[str, Any], before: str = "") -> list[str]:
    parts: list[str] = []
    for key, value in point.items():
        if isinstance(value, Mapping):
            parts += _values(value, f"{before}{key} ")
        elif isinstance(value, int | float):
            parts.append(f"{before}{key} {value:.4g}")
        elif isinstance(value, str):
            parts.append(f"{value}:")
    return parts


def _memory(figure: Any, points: Points) -> None:
    axes, left = figure.subplots(), [0.0] * len(points)
    for key, label, color in _SHARES:
        widths = [100 * point[key] for point in points]
        bars = axes.barh(range(len(points)), widths, left=left, label=label, color=color, height=0.65)
        axes.bar_label(bars, [f"{width:.0f}" if width >= 4 else "" for width in widths], label_type="center", fontsize="small")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(yticks=range(len(points)), yticklabels=[point["name"] for point in points], xlabel="% of the KV memory held")
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    pictures.tidy(axes)
    axes.grid(visible=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")


def _sharing(figure: Any, points: Points) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("samples", "beams"), strict=True):
        own = [point for point in points if point["kind"] == kind]
        bars = axes.bar(range(len(own)), [100 * point["saved"] for point in own], color=_OURS, width=0.6)
        axes.bar_label(bars, fmt="%.0f %%")
        axes.set(xlabel=f"{kind} of a prompt", xticks=range(len(own)), xticklabels=[point["width"] for point in own])
        pictures.tidy(axes)
    panels[0].set(ylabel="blocks saved by sharing, %", ylim=(0, 100))


def _lengths(figure: Any, points: Points) -> None:
    axes = figure.subplots()
    pictures.lines(axes, points, "output_tokens_per_second")
    axes.set(xlabel="longest output, tokens (exponential lengths, cut off there)", ylabel="output tokens per second")
    axes.set_ylim(0, None)
    pictures.scale(axes, [point["x"] for point in points])
    axes.legend(frameon=False, fontsize="small")


def _stalls(figure: Any, points: Points) -> None:
    axes = figure.subplots()
    for point, color in zip(points, (_OTHER, _THIRD, _OURS), strict=True):
        seconds, gaps = zip(*point["gaps"], strict=True)
        label = f"{point['name']}: {point['tokens_per_s']:.0f} tokens/s"
        axes.plot(seconds, [1e3 * gap for gap in gaps], ".", markersize=5, color=color, label=label)
    axes.set(xlabel="seconds since the long prompts came", ylabel="time between two tokens of a stream, ms")
    pictures.logarithmic(axes)
    pictures.tidy(axes)
    axes.legend(frameon=False, fontsize="small")


def _prefix(figure: Any, points: Points) -> None:
    panels = (("computed_tokens", "tokens computed", 1.0), ("first_token_s_median", "median time to first token, ms", 1e3))
    for axes, (key, label, factor) in zip(figure.subplots(1, 2), panels, strict=True):
        for shift, (part, color) in zip((-0.2, 0.2), (("off", _OTHER), ("on", _OURS)), strict=True):
            places = [place + shift for place in range(len(points))]
            bars = axes.bar(places, [factor * p[part][key] for p in points], 0.38, color=color, label=f"prefix cache {part}")
            axes.bar_label(bars, fmt="{:,.0f}", fontsize="small")
        axes.set(ylabel=label, xticks=range(len(points)), xticklabels=[point["name"] for point in points])
        pictures.tidy(axes)
    figure.axes[0].legend(frameon=False, fontsize="small")


_PARTS = {
    "memory": (_memory, "What the KV memory in use holds", (9.5, 3.8)),
    "sharing": (_sharing, "KV memory saved by sharing blocks", (8, 3.8)),
    "lengths": (_lengths, "Static against continuous batches", (7.5, 4.4)),
    "stalls": (_stalls, "Long prompts beside eight streams", (8.5, 4.4)),
    "prefix": (_prefix, "Prefix cache", (9, 4)),
}
