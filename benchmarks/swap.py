"""What swap space saves: `python -m benchmarks.swap [--lengths 128,512,2048] [--dtype bfloat16] [--out FOLDER]`.

Two measurements at each prompt length, both ways in turns on one engine whose pool is too small. Resume: of two sequences the
second is preempted and, when the first has ended, resumed by computing its keys and values again, or by copying them back; the
time from its admission to its next token. Throughput: requests over a pool with room for half of them, with recomputation alone
and with the engine's own choice between the two. It fails if a token depends on the way, in float32.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import hf_cb
from benchmarks import machine, pictures
from demo.packaged_model import load
from hf_cb.core.swap_cost import SwapCost
from hf_cb.runtime.swap_space import SwapSpace

BLOCK = 16
NEW = 2 * BLOCK  # output tokens of a request: two blocks that it needs beyond its prompt's
STEPS = 10_000
Tokens = list[tuple[int, ...]]
Point = dict[str, float]


def measure(model: Any, args: argparse.Namespace) -> list[Point]:
    """A point for each prompt length, in tokens; times in seconds, medians over the rounds."""
    model.generation_config.eos_token_id = None
    chance, vocab = random.Random(args.seed), model.get_input_embeddings().num_embeddings
    points = []
    for length in tqdm(args.lengths, desc="swap", unit="length", leave=False):
        prompts = [chance.choices(range(vocab), k=length) for _ in range(args.requests)]
        points.append({"prompt_tokens": length, **_resume(model, prompts[:2], args), **_throughput(model, prompts, args)})
    return points


def _resume(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> Point:
    outs: list[float] = []
    copy_out = SwapSpace.copy_out

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        copy_out(*arguments)
        outs.append(time.perf_counter() - began)

    ways = {"recompute": lambda: always(False), "swap": lambda: always(True)}
    with _small_pool(model, prompts) as engine, patch.object(SwapSpace, "copy_out", timed):
        rounds = _in_turns(ways, args.repeats, lambda: _resumed(engine, prompts), model.dtype)
    seconds = {name: statistics.median(took for took, _ in runs) for name, runs in rounds.items()}
    return {"recompute_s": seconds["recompute"], "swap_in_s": seconds["swap"], "swap_out_s": statistics.median(outs)}


def _resumed(engine: hf_cb.Engine, prompts: list[list[int]]) -> tuple[float, Tokens]:
    """Seconds that the steps took which brought the preempted sequence from its admission to its next token."""
    began = time.perf_counter()
    handles = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    tokens = [handle.result().tokens for handle in handles]
    steps = [step for step in engine.steps() if step.started >= began]
    return resume_seconds(steps), tokens


def resume_seconds(steps: Sequence[hf_cb.StepRecord]) -> float:
    """Of the first request that was preempted. Raises RuntimeError if there is none."""
    preempted = next((i for i, step in enumerate(steps) if step.preempted), None)
    if preempted is None:
        raise RuntimeError("no sequence was preempted: the pool was not too small")
    request, seconds = steps[preempted].preempted[0], 0.0
    for step in steps[preempted + 1 :]:
        if request in (row for row, _ in step.rows):
            seconds += step.seconds
        if request in step.sampled:
            return seconds
    raise RuntimeError("the preempted sequence never came back")


def _throughput(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> Point:
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"recompute": lambda: always(False), "own choice": nullcontext}

    def run() -> tuple[tuple[float, int, int], Tokens]:
        before, began = engine.stats(), time.perf_counter()
        tokens = [result.tokens for result in engine.generate_batch(prompts, max_new_tokens=NEW, do_sample=False)]
        seconds, after = time.perf_counter() - began, engine.stats()
        return (seconds, after.preemptions - before.preemptions, after.swaps - before.swaps), tokens

    with _small_pool(model, prompts) as engine:
        rounds = _in_turns(ways, args.repeats, run, model.dtype)
    plain, swapping = ([figures for figures, _ in rounds[name]] for name in ways)
    output_tokens = NEW * len(prompts)
    return {
        "recompute_tokens_per_s": output_tokens / statistics.median(seconds for seconds, _, _ in plain),
        "swap_tokens_per_s": output_tokens / statistics.median(seconds for seconds, _, _ in swapping),
        "ratio": statistics.median(a[0] / b[0] for a, b in zip(plain, swapping, strict=True)),
        "preemptions": statistics.median(preempted for _, preempted, _ in swapping),
        "swaps": statistics.median(swaps for _, _, swaps in swapping),
    }


def _in_turns(
    ways: dict[str, Callable[[], AbstractContextManager[Any]]],
    repeats: int,
    run: Callable[[], tuple[Any, Tokens]],
    dtype: torch.dtype,
) -> dict[str, list[tuple[Any, Tokens]]]:
    """`repeats` rounds of all ways after one that is thrown away: it touches the host's memory the first time."""
    rounds: dict[str, list[tuple[Any, Tokens]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            with way():
                rounds[name].append(run())
    tokens = [answer for runs in rounds.values() for _, answer in runs]
    if dtype == torch.float32 and any(answer != tokens[0] for answer in tokens):
        raise RuntimeError("the way in which a sequence is resumed changed its tokens")
    return {name: runs[1:] for name, runs in rounds.items()}


def always(swap: bool) -> AbstractContextManager[Any]:
    """Every preempted sequence is swapped, or none is."""
    return patch.object(SwapCost, "is_cheaper", lambda *_: swap)


def _small_pool(model: Any, prompts: list[list[int]]) -> AbstractContextManager[hf_cb.Engine]:
    """An engine that admits half of the prompts, two at least."""
    blocks = pool_blocks(len(prompts[0]), max(2, len(prompts) // 2))
    return hf_cb.continuous_batching(
        model, num_blocks=blocks, block_size=BLOCK, swap_space="1GiB", prefix_cache=False, record_steps=STEPS
    )


def pool_blocks(length: int, admitted: int) -> int:
    """Blocks for so many prompts, and for one of the two more that each will need."""
    prompts = admitted * -(-length // BLOCK)
    return prompts + max(admitted, -(-prompts // 99))  # one in a hundred stays free at admission


def draw(points: Sequence[Point], title: str, file: Path) -> Path:
    """The picture, in `file`; returns `file`."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    resume, gain = figure.subplots(1, 2)
    lengths = [point["prompt_tokens"] for point in points]
    swap = [point["swap_out_s"] + point["swap_in_s"] for point in points]
    resume.plot(lengths, [1e3 * point["recompute_s"] for point in points], marker="d", color="#7f7f7f", label="computed again")
    resume.plot(lengths, [1e3 * seconds for seconds in swap], marker="o", color="#d62728", label="copied out and back")
    resume.set(ylabel="time to resume a sequence, ms")
    pictures.logarithmic(resume)
    resume.legend(frameon=False)
    gain.axhline(1, color="0.6", linestyle=":")
    gain.plot(lengths, [point["ratio"] for point in points], marker="o", color="#d62728")
    gain.set(ylabel="throughput with swap space / without", ylim=(0.8, None))
    for axes in (resume, gain):
        axes.set(xlabel="prompt length, tokens")
        pictures.scale(axes, lengths)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=pictures.DOTS_PER_INCH)
    return file


def table(points: Sequence[Point]) -> str:
    """The points as a Markdown table."""
    head = (
        "prompt tokens | computed again | copied out + back | tokens/s without | with swap space | ratio | swaps / preemptions"
    )
    rows = (
        (
            f"{point['prompt_tokens']:.0f}",
            f"{1e3 * point['recompute_s']:.0f} ms",
            f"{1e3 * point['swap_out_s']:.1f} + {1e3 * point['swap_in_s']:.1f} ms",
            *(f"{point[key]:.1f}" for key in ("recompute_tokens_per_s", "swap_tokens_per_s")),
            f"{point['ratio']:.2f}",
            f"{point['swaps']:g} / {point['preemptions']:g}",
        )
        for point in points
    )
    return "\n".join(f"| {line} |" for line in (head, "|".join(["---"] * 7), *map(" | ".join, rows)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--lengths", type=_lengths, default=[32, 128, 512, 2048], metavar="A,B", help="prompt tokens")
    parser.add_argument("--requests", type=int, default=6, help="of the throughput's rounds (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds; medians are reported (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    args = parser.parse_args(argv)
    model, _ = load(args.model, getattr(torch, args.dtype))
    with machine.usage() as usage:
        points = measure(model, args)
    result = {"kind": "swap", "dtype": args.dtype, "machine": machine.describe(), "arguments": vars(args), "points": points}
    file = pictures.save(result, args.out / "swap.json")
    print(table(points))
    print(f"other programs kept {usage.other_cores or 0:.2f} cores busy")
    print(draw(points, pictures.title(result, "Resuming preempted sequences"), file.with_suffix(".png")))


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
