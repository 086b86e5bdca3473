"""What the prefix cache saves: `python -m benchmarks.prefix [--scale 0.1] [--json FILE]`.

Two workloads, each with the cache on and off: requests that share a long prefix, all at once after one warmed it; and a chat in
which each turn is the last one with its answer and a new question. All greedy, the lengths forced. Tokens computed are counted
from the engine's step records and compared with the least there could be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_cb
from demo.packaged_model import load

BLOCK = 16
Prompts = list[list[int]]


def measure(model: Any, args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by workload and "on" or "off". Raises RuntimeError if the cache changed a token or computed one too many."""
    model.generation_config.eos_token_id = None
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, run in (("shared prefix", shared_prefix), ("chat", chat)):
        tokens = {}
        figures[name] = {}
        for cache in (True, False):
            with hf_cb.continuous_batching(model, prefix_cache=cache, record_steps=100_000, block_size=BLOCK) as engine:
                engine.submit([1, 2, 3], max_new_tokens=2).result()  # what a first call sets up is not to be in the times
                before = _computed(engine)
                first_tokens, tokens[cache], least = run(engine, model.get_input_embeddings().num_embeddings, args, cache)
                computed = _computed(engine) - before
            if computed != least:
                raise RuntimeError(f"{name}: {computed} tokens were computed, and {least} had to be")
            figures[name]["on" if cache else "off"] = {
                "computed_tokens": computed,
                "first_token_s_median": statistics.median(first_tokens),
                "first_token_s_max": max(first_tokens),
            }
        if tokens[True] != tokens[False] and model.dtype.itemsize == 4:
            raise RuntimeError(f"{name}: the cache changed tokens")
        on, off = figures[name]["on"], figures[name]["off"]
        figures[name]["ratio"] = {key: off[key] / on[key] for key in on}
    return figures


def shared_prefix(
    engine: hf_cb.Engine, vocab: int, args: argparse.Namespace, cache: bool
) -> tuple[list[float], list[tuple[int, ...]], int]:
    """(seconds to each first token, the outputs, the fewest tokens that can be computed)"""
    rng = random.Random(args.seed)
    prefix = rng.choices(range(vocab), k=max(BLOCK, int(512 * args.scale) // BLOCK * BLOCK))
    prompts = [[*prefix, *rng.choices(range(vocab), k=max(2, int(24 * args.scale)))] for _ in range(args.requests + 1)]
    new = max(2, int(16 * args.scale))
    results = engine.generate_batch(prompts[:1], max_new_tokens=new) + engine.generate_batch(prompts[1:], max_new_tokens=new)
    each = len(prompts[0]) + new - 1
    least = each * len(prompts) - (len(prefix) * args.requests if cache else 0)
    return [r.first_token_at - r.submitted_at for r in results[1:]], [r.tokens for r in results], least


def chat(
    engine: hf_cb.Engine, vocab: int, args: argparse.Namespace, cache: bool
) -> tuple[list[float], list[tuple[int, ...]], int]:
    """The same for the turns of one chat, the first without a part in the times."""
    rng = random.Random(args.seed)
    talk: list[int] = []
    times, outputs, least, known = [], [], 0, 0
    new = max(2, int(48 * args.scale))
    for _ in range(args.turns):
        talk += rng.choices(range(vocab), k=max(2, int(120 * args.scale)))
        result = engine.submit(talk, max_new_tokens=new).result()
        times.append(result.first_token_at - result.submitted_at)
        outputs.append(result.tokens)
        talk += result.tokens
        least += len(talk) - 1 - (known if cache else 0)
        known = (len(talk) - 1) // BLOCK * BLOCK
    return times[1:], outputs, least


def _computed(engine: hf_cb.Engine) -> int:
    return sum(tokens for step in engine.steps() for _, tokens in step.rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for quick runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    model, _ = load(args.model)
    figures = measure(model, args)
    for name, parts in figures.items():
        for part, values in parts.items():
            print(f"{name:<15}{part:<7}" + "".join(f"{key} {value:<12.4g}" for key, value in values.items()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
