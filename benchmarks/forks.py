"""Beams and samples of one prompt: `python -m benchmarks.forks [--scale 0.1] [--repeats 3] [--json FILE]`.

Calls with `num_beams`, then calls with `num_return_sequences`, from a thread each: plain `generate` behind a lock, and the
engine, in turns, in float32. Every beam must be plain generate's, and every sample of the first prompt that of a call alone.
Blocks are counted beside what the sequences would hold if they shared none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import hf_cb
from benchmarks import machine
from demo.packaged_model import load

BLOCK = 16
PROMPT, NEW = 256, 32  # tokens
WORKLOADS: dict[str, dict[str, Any]] = {
    "4 beams": {"num_beams": 4},
    "4 samples": {"num_return_sequences": 4, "do_sample": True, "temperature": 0.8, "top_k": 50},
}


def measure(model: Any, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures by workload. Raises RuntimeError for an answer that is not plain generate's."""
    chance, vocab = random.Random(args.seed), model.get_input_embeddings().num_embeddings
    model.generation_config.eos_token_id = None
    length, new = max(2, int(PROMPT * args.scale)), max(2, int(NEW * args.scale))
    prompts = [torch.tensor([chance.choices(range(3, vocab), k=length)]) for _ in range(args.requests)]
    figures = {}
    with hf_cb.continuous_batching(model, record_steps=100_000, block_size=BLOCK, prefix_cache=False) as engine:
        for name, options in WORKLOADS.items():
            call = {**options, "max_new_tokens": new, "pad_token_id": 0}
            figures[name] = _compare(engine, model, prompts, call, args.repeats)
            groups = engine.stats().num_blocks // engine.config.num_blocks  # blocks of the pool for a stretch of tokens
            unshared = groups * args.requests * 4 * -(-(length + new - 1) // BLOCK)
            used = max(step.blocks_used for step in engine.steps()[-new:])
            figures[name] |= {"blocks": used, "blocks_unshared": unshared}
    return figures


def _compare(
    engine: hf_cb.Engine, model: Any, prompts: list[torch.Tensor], call: dict[str, Any], repeats: int
) -> dict[str, float]:
    def plain(job: tuple[int, torch.Tensor], call: dict[str, Any] = call) -> torch.Tensor:
        torch.manual_seed(job[0])
        return type(model).generate(model, job[1], **call)  # type: ignore[no-any-return]

    def served(job: tuple[int, torch.Tensor]) -> torch.Tensor:
        return model.generate(job[1], **call, seed=job[0])  # type: ignore[no-any-return]

    def one_by_one() -> list[torch.Tensor]:
        return list(map(plain, enumerate(prompts)))

    def together() -> list[torch.Tensor]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(served, enumerate(prompts)))

    ways: dict[str, Callable[[], list[torch.Tensor]]] = {"locked": one_by_one, "hf_cb": together}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(repeats), desc=" ".join(f"{key}={value}" for key, value in call.items()), unit="round", leave=False):
        answers = {}
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way()
            seconds[name].append(time.perf_counter() - began)
        if "num_beams" not in call:  # plain generate draws for all samples of a call from one generator
            alone = {**call, "num_return_sequences": 1}
            seeds = range(call["num_return_sequences"])
            answers = {"locked": [torch.cat([plain((i, prompts[0]), alone) for i in seeds])], "hf_cb": answers["hf_cb"][:1]}
        if any(not torch.equal(a, b) for a, b in zip(answers["locked"], answers["hf_cb"], strict=True)):
            raise RuntimeError(f"{call}: other tokens than plain generate's")
    if engine.stats().native_calls:
        raise RuntimeError(f"native calls: {engine.stats().native_calls}")
    medians = {f"{name}_s": statistics.median(took) for name, took in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["locked"], seconds["hf_cb"], strict=True))
    return {**medians, "ratio": ratio}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for quick runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    model, _ = load(args.model)
    with machine.usage() as usage:
        figures = measure(model, args)
    for name, values in figures.items():
        print(f"{name:<12}" + "".join(f"{key} {value:<10.4g}" for key, value in values.items()))
    print(f"other programs kept {usage.other_cores or 0:.2f} cores busy")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
