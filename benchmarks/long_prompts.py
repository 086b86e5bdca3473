"""Long prompts dropped into streams that decode: `python -m benchmarks.long_prompts [--target-itl-ms 150] [--json FILE]`.

The same requests with prompts computed whole, with the default budget, and with `target_itl_ms`: the time between two tokens of
the streams while the prompts come in, and the throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_cb
from demo.packaged_model import load


@dataclass(frozen=True, slots=True)
class Round:
    """Times are on `time.perf_counter()`'s clock."""

    times: list[list[float]]  # of each stream's tokens
    dropped: float  # when the long prompts came
    done: float  # when the last of them was answered
    seconds: float  # of the whole
    first_tokens: list[float]  # seconds from each long prompt to its first token

    def gaps(self) -> list[tuple[float, float]]:
        """(seconds since the prompts came, seconds between two tokens of a stream), while the prompts came in."""
        pairs = (pair for ts in self.times for pair in itertools.pairwise(ts))
        return sorted((b - self.dropped, b - a) for a, b in pairs if self.dropped <= b <= self.done)

    def figures(self, args: argparse.Namespace) -> dict[str, float]:
        gaps = [gap for _, gap in self.gaps()]
        if len(gaps) < 2:
            raise SystemExit("the streams ended before the long prompts were through: take more --stream-tokens")
        tokens = args.streams * (16 + args.stream_tokens) + args.prompts * (args.prompt_tokens + 4)
        return {
            "itl_ms_median": 1e3 * statistics.median(gaps),
            "itl_ms_p99": 1e3 * statistics.quantiles(gaps, n=100)[98],
            "tokens_per_s": tokens / self.seconds,
            "long_first_token_s": statistics.median(self.first_tokens),
        }


def ways(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """CBConfig fields by name."""
    whole = {"max_batch_tokens": args.prompts * args.prompt_tokens + args.streams}
    return {"whole": whole, "default": {}, "target": {**whole, "target_itl_ms": args.target_itl_ms}}


def run(model: Any, args: argparse.Namespace, **options: Any) -> Round:
    """One round with these CBConfig fields."""
    rng = random.Random(args.seed)
    vocab = model.get_input_embeddings().num_embeddings
    with hf_cb.continuous_batching(model, prefix_cache=False, **options) as engine:
        engine.submit([1, 2, 3], max_new_tokens=2).result()
        streams = [rng.choices(range(vocab), k=16) for _ in range(args.streams)]
        prompts = [rng.choices(range(vocab), k=args.prompt_tokens) for _ in range(args.prompts)]
        began = time.perf_counter()
        handles = [engine.submit(prompt, max_new_tokens=args.stream_tokens) for prompt in streams]
        times: list[list[float]] = [[] for _ in handles]
        readers = [threading.Thread(target=_read, args=pair) for pair in zip(handles, times, strict=True)]
        for reader in readers:
            reader.start()
        while min(map(len, times)) < 4:
            time.sleep(0.001)
        dropped = time.perf_counter()
        long = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
        first_tokens = [(result := handle.result()).first_token_at - result.submitted_at for handle in long]
        done = time.perf_counter()
        for reader in readers:
            reader.join()
        return Round(times, dropped, done, time.perf_counter() - began, first_tokens)


def _read(handle: hf_cb.GenerationHandle, times: list[float]) -> None:
    times.extend(time.perf_counter() for _ in handle)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--target-itl-ms", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    model, _ = load(args.model)
    model.generation_config.eos_token_id = None
    figures = {name: run(model, args, **options).figures(args) for name, options in ways(args).items()}
    figures["target / whole"] = {key: figures["target"][key] / value for key, value in figures["whole"].items()}
    for name, values in figures.items():
        print(f"{name:<16}" + "".join(f"{key} {value:<12.4g}" for key, value in values.items()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
