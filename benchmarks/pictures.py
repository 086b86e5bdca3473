"""Pictures of curves. A peer has the same colour and mark in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLES = {
    "hf_cb": ("hf_cb", "#d62728", "o"),
    "hf_cb_submit": ("hf_cb, engine.submit", "#ff9896", "P"),
    "openvino": ("OpenVINO GenAI", "#9467bd", "v"),
    "vllm": ("vLLM for CPU, compiled", "#1f77b4", "s"),
    "vllm_eager": ("vLLM for CPU, eager", "#7fb2dd", "D"),
    "generate_batch": ("transformers generate_batch", "#2ca02c", "^"),
    "static": ("generate, static batches of 16", "#8c564b", "X"),
    "locked": ("generate behind a lock", "#7f7f7f", "d"),
}
_DOTS_PER_INCH = 150


def draw(result: Mapping[str, Any], file: Path) -> Path:
    """The picture of what `benchmarks.curves` measured, as PNG in `file`; returns `file`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8) if result["kind"] == "concurrency" else (11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    (_concurrency if result["kind"] == "concurrency" else _arrivals)(figure, result["points"])
    facts = result["machine"]
    figure.suptitle(_title(result))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.axes[-1].annotate(
        f"{facts['processor']}, {facts['torch_threads']} threads, torch {facts['torch']}, transformers {facts['transformers']}",
        (1, 1.01),
        xycoords="axes fraction",
        ha="right",
        fontsize="x-small",
        color="0.4",
    )
    figure.savefig(file, dpi=_DOTS_PER_INCH)
    return file


def _title(result: Mapping[str, Any]) -> str:
    arguments = result["arguments"]
    model = arguments.get("shape") or arguments.get("model") or "SmolLM2-135M"
    what = "Throughput" if result["kind"] == "concurrency" else "Latency"
    return f"{what} of {Path(str(model)).name}, {result['dtype']}"


def _concurrency(figure: Any, points: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    _lines(axes, points, "output_tokens_per_second")
    axes.set(xlabel="requests in flight", ylabel="output tokens per second", ylim=(0, None))
    axes.set_xscale("log", base=2)
    _plain_ticks(axes, points)


def _arrivals(figure: Any, points: Sequence[Mapping[str, Any]]) -> None:
    for axes, key, name in zip(
        figure.subplots(1, 2), ("ttft", "inter_token"), ("time to first token", "time between tokens"), strict=True
    ):
        _lines(axes, points, f"{key}_p50")
        _lines(axes, points, f"{key}_p99", linestyle=":", label=None)
        axes.set(xlabel="arrivals per second (Poisson)", ylabel=f"{name}, s  (solid: median, dotted: 99th percentile)")
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        _plain_ticks(axes, points)


def _lines(axes: Any, points: Sequence[Mapping[str, Any]], key: str, linestyle: str = "-", label: str | None = "") -> None:
    for peer in (name for name in _STYLES if name in points[0]["peers"]):
        text, color, marker = _STYLES[peer]
        axes.plot(
            [point["x"] for point in points],
            [point["peers"][peer][key] for point in points],
            linestyle=linestyle,
            color=color,
            marker=marker,
            markersize=5,
            label=text if label is not None else None,
        )


def _plain_ticks(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Ticks at the points measured, as plain numbers."""
    values = [point["x"] for point in points]
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
