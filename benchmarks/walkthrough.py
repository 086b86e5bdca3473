"""The pictures of docs/how-a-token-is-made.md, each of a run of the real engine.

python -m benchmarks.walkthrough --out docs/pictures
python -m benchmarks.walkthrough --only blocks,chunks
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks import pictures
from benchmarks.peers import installed
from benchmarks.trace import BETWEEN, Trace, shared_blocks, traced
from demo import slots
from demo.packaged_model import load
from demo.slots import INK, MUTED, WASTED, Panel, colour

BLOCK = 16
SLOTS = 4
BUDGET = 64  # tokens of a step, where a long prompt comes in chunks
_RECORDS = 10_000


class Run:
    """A model, and random prompts for it."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self._chance = model, random.Random(seed)
        model.generation_config.eos_token_id = None

    def prompt(self, length: int) -> list[int]:
        return self._chance.choices(range(self.model.get_input_embeddings().num_embeddings), k=length)

    def engine(self, **options: Any) -> Any:
        return installed(self.model, record_steps=_RECORDS, block_size=BLOCK, overlap=False, **options)


def step(run: Run) -> Figure:
    """Where the time of a step goes, with eight sequences that decode."""
    with run.engine() as engine:
        engine.generate_batch([run.prompt(4)], max_new_tokens=2)
        with traced() as trace:
            engine.generate_batch([run.prompt(40) for _ in range(8)], max_new_tokens=48, do_sample=False)
    return draw_step(trace.decode_milliseconds())


def draw_step(milliseconds: dict[str, float]) -> Figure:
    """Bars one after the other; the forward pass, which would hide all the others, is cut short."""
    shown = {**milliseconds, "forward": 0.6 * (sum(milliseconds.values()) - milliseconds["forward"])}
    whole, begin = sum(milliseconds.values()), 0.0
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for row, (phase, width) in enumerate(shown.items()):
        kind = "prefill" if phase == "forward" else "decode"
        axes.barh(row, width, left=begin, height=0.7, color=WASTED if phase == BETWEEN else colour(0, kind))
        label = f"{milliseconds[phase]:.2f} ms" + (f", {milliseconds[phase] / whole:.0%} (cut)" if phase == "forward" else "")
        axes.text(begin + width, row, f"  {label}", va="center", fontsize="small", color=INK)
        begin += width
    names = ["in between" if phase == BETWEEN else phase for phase in shown]
    axes.set(yticks=range(len(shown)), yticklabels=names, xticks=[], xlim=(0, 1.25 * begin))
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.set_title(f"A step in which eight sequences decode: {whole:.1f} ms, medians", fontsize="medium", loc="left")
    return figure


def batch_slots(run: Run) -> Figure:
    """Who sat in which of four slots while ten requests were served."""
    lengths = [(30, 24), (60, 8), (20, 40), (90, 14), (40, 30), (16, 6), (70, 20), (24, 34), (50, 10), (36, 18)]
    with run.engine(max_batch_size=SLOTS) as engine:
        began = time.perf_counter()
        handles = [engine.submit(run.prompt(prompt), max_new_tokens=new, do_sample=False) for prompt, new in lengths]
        for handle in handles:
            handle.result()
        seconds = time.perf_counter() - began
        steps = engine.steps()
    numbers = {handle.request_id: i for i, handle in enumerate(handles)}
    timeline = slots.continuous_timeline(steps, SLOTS, numbers)
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots()
    slots.draw_panel(axes, Panel("Ten requests, four slots", "", timeline, seconds), timeline.num_iterations)
    axes.set_xlabel("step", color=INK)
    return figure


def chunks(run: Run) -> Figure:
    """A long prompt that comes in pieces beside four sequences that decode."""
    with run.engine(max_batch_tokens=BUDGET, prefix_cache=False) as engine:
        handles = [engine.submit(run.prompt(8), max_new_tokens=24, do_sample=False) for _ in range(4)]
        for _, _ in zip(range(4), handles[-1], strict=False):
            pass
        handles.append(engine.submit(run.prompt(6 * BUDGET), max_new_tokens=8, do_sample=False))
        for handle in handles:
            handle.result()
        steps = engine.steps()
    return draw_chunks([step.rows for step in steps], [handle.request_id for handle in handles])


def draw_chunks(steps: Sequence[Sequence[tuple[int, int]]], ids: Sequence[int]) -> Figure:
    """Tokens of each step, one colour for each request; the last of `ids` has the long prompt."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for i, rows in enumerate(steps):
        bottom = 0
        for request, tokens in sorted(rows):
            kind = "prefill" if tokens > 1 else "decode"
            axes.bar(i + 1, tokens, bottom=bottom, width=0.85, color=colour(ids.index(request), kind), edgecolor="white")
            bottom += tokens
    axes.axhline(BUDGET, color=MUTED, linestyle=":")
    axes.text(len(steps) + 0.5, BUDGET + 1, f"max_batch_tokens={BUDGET}", ha="right", color=MUTED, fontsize="small")
    axes.set(xlabel="step", ylabel="tokens computed")
    axes.set_title("Dark: chunks of prompts. Light: single tokens, one a sequence", fontsize="medium", loc="left")
    pictures.tidy(axes)
    return figure


def blocks(run: Run) -> Figure:
    """The block tables of two sequences whose prompts begin alike."""
    prefix = run.prompt(4 * BLOCK)
    prompts = [prefix + run.prompt(BLOCK + 4), prefix + run.prompt(8)]
    with traced() as trace, run.engine(num_blocks=24) as engine:
        handles = []
        for prompt in prompts:  # the second comes when the first has its prompt computed
            handles.append(engine.submit(prompt, max_new_tokens=40, do_sample=False))
            next(iter(handles[-1]))
        for handle in handles:
            handle.result()
    return draw_blocks(tables(trace, [handle.request_id for handle in handles]), 24)


def tables(trace: Trace, ids: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """(block table, tokens stored) of each request in the last step in which all had a row."""
    together = [o for o in trace.outputs if set(ids) <= {row.request_id for row in o.rows}][-1]
    rows = {row.request_id: row for row in together.rows}
    return [(rows[key].memory.block_table, rows[key].start + len(rows[key].token_ids)) for key in ids]


def draw_blocks(found: Sequence[tuple[tuple[int, ...], int]], num_blocks: int) -> Figure:
    """Above each sequence's table, below the pool; a line from an entry to the block that it names."""
    (first, _), (second, _) = found
    shared = set(first[: shared_blocks(first, second)])
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    owners = {block: i for i, (table, _) in enumerate(found) for block in table}
    for block in range(num_blocks):
        face = WASTED if block not in owners else colour(2, "prefill") if block in shared else colour(owners[block], "decode")
        _box(axes, block, 0, str(block), face, "white" if block in shared else INK)
    for i, (table, stored) in enumerate(found):
        left = 1 + i * (num_blocks // 2)
        axes.text(left, 4.15, f"sequence {'AB'[i]}: {stored} tokens", color=INK, fontsize="medium", fontweight="bold")
        for place, block in enumerate(table):
            face = colour(2, "prefill") if block in shared else colour(i, "decode")
            _box(axes, left + place, 3, str(block), face, "white" if block in shared else INK)
            line = [left + place + 0.5, block + 0.5], [3, 1]
            axes.plot(*line, color=face, linewidth=1.2, zorder=0)
    axes.text(0, -0.5, f"the pool: {num_blocks} blocks of {BLOCK} tokens; dark: in both tables", color=MUTED, fontsize="medium")
    axes.set(xlim=(-0.2, num_blocks + 0.2), ylim=(-0.8, 4.6))
    axes.axis("off")
    return figure


def _box(axes: Any, left: float, bottom: float, text: str, face: Any, ink: str) -> None:
    axes.add_patch(Rectangle((left + 0.04, bottom), 0.92, 0.9, facecolor=face, linewidth=0))
    axes.text(left + 0.5, bottom + 0.45, text, ha="center", va="center", fontsize=8, color=ink)


PICTURES = {"step": step, "slots": batch_slots, "chunks": chunks, "blocks": blocks}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walkthrough", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_names, default=list(PICTURES), metavar="A,B", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(load(args.model)[0], args.seed)
    for name in args.only:
        PICTURES[name](run).savefig(file := args.out / f"{name}.png", dpi=pictures.DOTS_PER_INCH, facecolor="white")
        print(file)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PICTURES):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    return names


if __name__ == "__main__":
    main()
