"""Pictures of measurements. A peer has the same colour and mark in all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

STYLES = {
    "hf_cb": ("hf_cb", "#d62728", "o"),
    "hf_cb_submit": ("hf_cb, engine.submit", "#ff9896", "P"),
    "openvino": ("OpenVINO GenAI", "#9467bd", "v"),
    "vllm": ("vLLM for CPU, compiled", "#1f77b4", "s"),
    "vllm_eager": ("vLLM for CPU, eager", "#7fb2dd", "D"),
    "generate_batch": ("transformers generate_batch", "#2ca02c", "^"),
    "static": ("generate, static batches of 16", "#8c564b", "X"),
    "locked": ("generate behind a lock", "#7f7f7f", "d"),
}
DOTS_PER_INCH = 150


def draw(result: Mapping[str, Any], file: Path) -> Path:
    """The picture of what `benchmarks.curves` measured, as PNG in `file`; returns `file`."""
    what, size, panels = _KINDS[result["kind"]]
    figure = Figure(figsize=size, layout="constrained")
    panels(figure, result["points"])
    figure.suptitle(title(result, what), fontsize="medium")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(file, dpi=DOTS_PER_INCH)
    return file


def save(result: Mapping[str, Any], file: Path) -> Path:
    """Write what was measured to `file`, whose folder is made if need be; returns `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return file


def title(result: Mapping[str, Any], what: str) -> str:
    """Two lines: what was measured of which model, and on which machine."""
    arguments, facts = result["arguments"], result["machine"]
    model = arguments.get("shape") or arguments.get("model") or "SmolLM2-135M-Instruct"
    return (
        f"{what}: {Path(str(model)).name}, {result['dtype']}\n"
        f"{facts['processor']}, torch threads: {facts['torch_threads']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}"
    )


def _concurrency(figure: Any, points: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    lines(axes, points, "output_tokens_per_second")
    axes.set(xlabel="requests in flight", ylabel="output tokens per second", ylim=(0, None))
    scale(axes, [point["x"] for point in points])


def _arrivals(figure: Any, points: Sequence[Mapping[str, Any]]) -> None:
    panels = (("ttft", "time to first token, s", 1.0), ("inter_token", "time between two tokens, ms", 1e3))
    for axes, (key, label, factor) in zip(figure.subplots(1, 2), panels, strict=True):
        lines(axes, points, f"{key}_p50", factor)
        lines(axes, points, f"{key}_p99", factor, linestyle=":", labelled=False)
        axes.set_title("solid: median, dotted: 99th percentile", fontsize="small", color="0.4")
        axes.set(xlabel="arrivals per second (Poisson)", ylabel=label)
        logarithmic(axes)
        scale(axes, [point["x"] for point in points])


def _normalised(figure: Any, points: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    lines(axes, points, "normalised_latency")
    axes.set(xlabel="arrivals per second (Poisson)", ylabel="normalised latency, s per output token")
    logarithmic(axes)
    scale(axes, [point["x"] for point in points])


_KINDS = {
    "concurrency": ("Throughput", (7.5, 4.8), _concurrency),
    "arrivals": ("Latency", (11, 5), _arrivals),
    "normalised": ("Normalised latency", (7.5, 4.8), _normalised),
}


def lines(
    axes: Any, points: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0, linestyle: str = "-", labelled: bool = True
) -> None:
    """A line for each peer; the first of `STYLES` lies on top."""
    for depth, (peer, (text, color, marker)) in enumerate(STYLES.items()):
        if peer in points[0]["peers"]:
            values = [point["peers"][peer][key] * factor for point in points]
            style = {"linestyle": linestyle, "color": color, "marker": marker, "markersize": 5, "zorder": 20 - depth}
            axes.plot([point["x"] for point in points], values, label=text if labelled else None, **style)


def logarithmic(axes: Any) -> None:
    """A logarithmic axis of values, with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")


def scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with ticks at the points that were measured, as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    tidy(axes)


def tidy(axes: Any) -> None:
    """A light grid, and no frame above and at the right."""
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
