"""lm-eval on an installed model: `make evaluate`, or `python -m integrations.evaluation` where lm-eval is installed.

The same tasks with lm-eval's own model, plain and in padded batches, and with `ServedLM` on an installed model: answers and
scores side by side, and the seconds that the answers took. It fails if an answer differs from that of the plain model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import hf_cb
from demo.packaged_model import load

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: `make evaluate` sets up an environment with lm-eval, or pip install lm_eval") from None

TASKS = Path(__file__).parent / "tasks"


class ServedLM(HFLM):
    """lm-eval's HFLM for an installed model: each row of a batch is a call of its own, so that one that has met its `until`
    doesn't wait for the others, and all of them share the engine's batches. Choose a large `batch_size`: nothing is padded.
    """

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """`context` [B, T], left-padded, and `attention_mask` among the options -> [B, at most max_length]."""
        mask = options.pop("attention_mask")
        # Puts the fast tokenizer out of the padding of the batch: while nobody changes its state, many threads may read it.
        self.tokenizer.encode("", add_special_tokens=False)

        def row(i: int) -> torch.Tensor:
            part = slice(i, i + 1)
            return super(ServedLM, self)._model_generate(
                context=context[part], max_length=max_length, stop=stop, attention_mask=mask[part], **options
            )[0]

        with ThreadPoolExecutor(len(context)) as threads:
            rows = list(threads.map(row, range(len(context))))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)


def run(lm: HFLM, tasks: list[str], limit: int | None) -> dict[str, Any]:
    """Answers in order, scores by task, and the seconds that the answers took."""
    answer, seconds = lm.generate_until, 0.0

    def timed(*args: Any, **options: Any) -> list[str]:
        nonlocal seconds
        began = time.perf_counter()
        answers: list[str] = answer(*args, **options)
        seconds += time.perf_counter() - began
        return answers

    lm.generate_until = timed
    manager = TaskManager(include_path=str(TASKS))
    found = simple_evaluate(lm, tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True)
    return {
        "seconds": seconds,
        "scores": {task: {k: v for k, v in scores.items() if k != "alias"} for task, scores in found["results"].items()},
        "answers": [sample["resps"][0][0] for task in tasks for sample in found["samples"][task]],
    }


def compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The runs by name, the plain model's first."""
    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    runs = {}
    for size in dict.fromkeys((1, args.padded)):
        plain = HFLM(model, tokenizer=tokenizer, batch_size=size)
        runs["plain" if size == 1 else f"plain, batches of {size}"] = run(plain, args.tasks, args.limit)
    with hf_cb.continuous_batching(model) as engine:
        runs["hf_cb"] = run(ServedLM(model, tokenizer=tokenizer, batch_size=args.batch_size), args.tasks, args.limit)
        runs["hf_cb"]["native_calls"] = engine.stats().native_calls
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integrations.evaluation", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tasks", nargs="+", default=["capitals"], help="generate_until tasks: of integrations/tasks, or lm-eval's"
    )
    parser.add_argument("--limit", type=int, help="the first so many questions of each task")
    parser.add_argument("--batch-size", type=int, default=64, help="questions in flight with hf_cb")
    parser.add_argument("--padded", type=int, default=16, help="rows of the plain model's padded batches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    runs = compare(args)
    want = runs["plain"]
    for name, found in runs.items():
        equal = sum(a == b for a, b in zip(found["answers"], want["answers"], strict=True))
        scores = ", ".join(f"{task} {key.partition(',')[0]} {value:.3f}" for task, value, key in _scores(found))
        print(
            f"{name:<22}{found['seconds']:7.1f} s  x{want['seconds'] / found['seconds']:<6.2f}"
            f"{equal} of {len(want['answers'])} answers equal  {scores}"
        )
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    if runs["hf_cb"]["answers"] != want["answers"] and args.dtype == "float32":
        sys.exit("the answers differ")


def _scores(found: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [
        (task, value, key)
        for task, scores in found["scores"].items()
        for key, value in scores.items()
        if isinstance(value, float) and "stderr" not in key
    ]


if __name__ == "__main__":
    main()
