"""What choosing tokens costs: `python -m benchmarks.sampler [--steps N] [--model-step-ms MS] [--json FILE]`.

64 rows of mixed settings on a vocabulary of 49152, as the packaged model's, over logits that fall off like a language model's.
The step that the time is set against is the packaged model's own, measured here at 64 rows in float32, or given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hf_cb
from hf_cb.request import Request, SamplingParams
from hf_cb.runtime.sampler import RowState, sample

VOCAB = 49152
ROWS = 64
PROMPT = 128  # tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty": {"repetition_penalty": 1.1},
    "temperature": {"do_sample": True, "temperature": 0.8},
    "top_k": {"do_sample": True, "temperature": 0.7, "top_k": 50},
    "top_k, top_p": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05},
    "top_p": {"do_sample": True, "top_p": 0.95},
    "min_p": {"do_sample": True, "temperature": 1.2, "min_p": 0.05},
    "held back": {"min_new_tokens": 10_000, "suppress_tokens": tuple(range(16))},
}


def logits_like_a_language_models(generator: torch.Generator) -> torch.Tensor:
    """[ROWS, VOCAB]: ranks by Zipf's law with exponents from 1.3 to 2.1, shuffled: nuclei of a dozen tokens to thousands."""
    ranks = torch.arange(1, VOCAB + 1).log()
    rows = [ranks[torch.randperm(VOCAB, generator=generator)] for _ in range(ROWS)]
    return -torch.stack(rows) * torch.linspace(1.3, 2.1, ROWS)[torch.randperm(ROWS, generator=generator)][:, None]


def rows_of(settings: list[dict[str, Any]]) -> list[RowState]:
    prompt = tuple(range(100, 100 + PROMPT))
    params = [SamplingParams(seed=i, **settings[i % len(settings)]) for i in range(ROWS)]
    return [RowState.of(Request(prompt, 10_000, frozenset({2}), p), torch.device("cpu")) for p in params]


def milliseconds(settings: list[dict[str, Any]], steps: int) -> float:
    """Median over steps, of which none sees the logits of the one before."""
    generator, rows, times = torch.Generator().manual_seed(0), rows_of(settings), []
    with torch.inference_mode():
        logits = [logits_like_a_language_models(generator) for _ in range(2)]
        for step in range(steps + 1):
            began = time.perf_counter()
            sample(logits[step % 2], rows)
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])  # the first finds cold caches


def model_step_milliseconds() -> float:
    """The packaged model's forward at 64 rows of one token each."""
    from demo import packaged_model

    model, _ = packaged_model.load(None, torch.float32)
    with hf_cb.continuous_batching(model, record_steps=10_000) as engine:
        engine.generate_batch([[i + 5] * 16 for i in range(ROWS)], max_new_tokens=24, eos_token_id=None, do_sample=False)
        records = [record for record in engine.steps() if len(record.rows) == len(record.sampled) == ROWS]
    return 1e3 * statistics.median(record.model_seconds for record in records)


def measure(steps: int, model_step_ms: float | None = None) -> dict[str, Any]:
    greedy, mixed = milliseconds([{}], steps), milliseconds(list(SETTINGS.values()), steps)
    model = model_step_milliseconds() if model_step_ms is None else model_step_ms
    return {
        "rows": ROWS,
        "vocabulary": VOCAB,
        "threads": torch.get_num_threads(),
        "greedy_ms": greedy,
        "mixed_ms": mixed,
        "mixed_to_greedy": mixed / greedy,
        "model_ms": model,
        "share_of_step": mixed / (mixed + model),
        "alone_ms": {name: milliseconds([setting], max(2, steps // 4)) for name, setting in SETTINGS.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model-step-ms", type=float, help="take this for the model's step, and measure none")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args(argv)
    figures = measure(args.steps, args.model_step_ms)
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
