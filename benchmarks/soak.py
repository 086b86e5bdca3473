"""Requests of random kinds for a bounded time: `python -m benchmarks.soak [--seconds 1200] [--json FILE]`.

A tiny random model in float32, one layer with a window and one without, over a pool that is too small, every feature on: prefix
hits, swaps, preemptions, beams, several samples of a prompt, 10 % cancelled, 5 % timing out, 2 % whose row fails. Every
survivor's tokens are compared with those of plain `generate()`, and what is left behind is counted: blocks, threads, memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import hf_cb
from benchmarks.machine import resident_bytes

VOCAB = 64
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 96,
    "max_batch_tokens": 64,
    "max_batch_size": 24,
    "policy": "fair",
    "target_itl_ms": 20,
    "swap_space": "256KiB",
    "max_queue_size": 64,
}


class RowError(Exception):
    """What a request that is to fail fails with."""


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.35,
        use_sliding_window=True,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def of_one_prompt(model: Any, rows: Sequence[tuple[list[int], tuple[int, ...]]]) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Calls of `generate` with beams and with samples of `rows`' prompts, and the true answers."""
    calls: list[dict[str, Any]] = []
    for i, (prompt, output) in enumerate(rows):
        usual = {"inputs": torch.tensor([prompt]), "max_new_tokens": min(12, len(output)), "pad_token_id": 0}
        calls.append({**usual, "num_beams": 2 + i % 3, "do_sample": False, "length_penalty": i % 2})
        calls.append({**usual, "do_sample": True, "temperature": 1.5, "seed": i, "num_return_sequences": 2 + i % 3})
    return [(call, _alone(model, call)) for call in calls]


def _alone(model: Any, call: dict[str, Any]) -> torch.Tensor:
    """By plain `generate`, each sample with its own seed."""
    options = {name: value for name, value in call.items() if name not in ("seed", "num_return_sequences")}
    answers = []
    for i in range(call.get("num_return_sequences", 1)):
        torch.manual_seed(call.get("seed", 0) + i)
        answers.append(type(model).generate(model, **options))
    return torch.cat(answers)


def questions(model: Any, count: int, seed: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """(prompt, true output) of rows that share beginnings; none with a near tie, which would test the rounding of a sum."""
    rng, made = random.Random(seed), []
    beginnings = [rng.choices(range(1, VOCAB), k=24) for _ in range(3)]
    while len(made) < count:
        prompt = [*rng.choice(beginnings)[: rng.randint(0, 24)], *rng.choices(range(1, VOCAB), k=rng.randint(1, 12))]
        out = type(model).generate(
            model,
            torch.tensor([prompt]),
            max_new_tokens=rng.randint(4, 40),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > 1e-3:
            made.append((prompt, tuple(out.sequences[0, len(prompt) :].tolist())))
    return made


class Culprits:
    """Lets the rows of chosen requests fail, by raising from every step that holds one."""

    def __init__(self, engine: hf_cb.Engine) -> None:
        self.ids: set[int] = set()
        runner = engine._intake.worker.core.runner
        self._execute: Callable[..., Any] = runner.execute
        runner.execute = self._run

    def _run(self, output: Any) -> Any:
        for row in output.rows:
            if row.request_id in self.ids:
                raise RowError(f"request {row.request_id}")
        return self._execute(output)


def caller(
    engine: hf_cb.Engine,
    generate: Callable[..., torch.Tensor],
    rows: Sequence[tuple[list[int], tuple[int, ...]]],
    calls: Sequence[tuple[dict[str, Any], torch.Tensor]],
    culprits: Culprits,
    end: float,
    seed: int,
) -> Counter[str]:
    """Ask until `end`. Raises AssertionError for a wrong token or an ending that was not asked for."""
    rng, counts = random.Random(seed), Counter[str]()
    while time.monotonic() < end:
        prompt, want = rng.choice(rows)
        kind = rng.choices(("plain", "of one prompt", "cancel", "timeout", "fail"), (75, 8, 10, 5, 2))[0]
        timeout = rng.uniform(1e-4, 0.05) if kind == "timeout" else None
        try:
            if kind == "of one prompt":
                call, answer = rng.choice(calls)
                assert torch.equal(generate(**call), answer), f"{call}: not {answer}"
                counts["beams and samples"] += 1
                continue
            handle = engine.submit(
                prompt, max_new_tokens=len(want), do_sample=False, tenant=f"t{seed % 5}", timeout=timeout, priority=seed % 3
            )
        except hf_cb.EngineOverloadedError:
            counts["overloaded"] += 1
            time.sleep(0.01)
            continue
        if kind == "fail":
            culprits.ids.add(handle.request_id)
        try:
            if kind == "cancel":
                for _, _ in zip(range(rng.randint(0, 3)), handle, strict=False):
                    pass
                handle.cancel()
            tokens = handle.result().tokens
            assert tokens == want, f"{prompt}: {tokens}, not {want}"
            counts["survived"] += 1
        except hf_cb.RequestCancelledError:
            assert kind == "cancel"
            counts["cancelled"] += 1
        except hf_cb.RequestTimeoutError:
            assert kind == "timeout"
            counts["timed out"] += 1
        except hf_cb.RequestFailedError as error:
            if kind != "fail" or not isinstance(error.__cause__, RowError):
                raise
            counts["failed"] += 1
        assert handle.tokens == want[: len(handle.tokens)]
    return counts


def soak(seconds: float, num_callers: int = 16, seed: int = 0) -> dict[str, Any]:
    """Figures; raises AssertionError for anything wrong or left behind."""
    model = tiny_model()
    rows = questions(model, 40, seed)
    calls = of_one_prompt(model, rows[:12])
    threads_before = set(threading.enumerate())
    counts, errors, memory = Counter[str](), [], []
    with hf_cb.continuous_batching(model, **OPTIONS) as engine:
        culprits = Culprits(engine)
        began = time.monotonic()

        def run(index: int) -> None:
            try:
                counts.update(caller(engine, model.generate, rows, calls, culprits, began + seconds, seed * 1000 + index))
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num_callers)]
        for thread in callers:
            thread.start()
        while any(thread.is_alive() for thread in callers):
            time.sleep(min(1.0, seconds / 20))
            memory.append(resident_bytes())
        if errors:
            raise errors[0]
        stats = engine.stats()
        scheduler = engine._intake.worker.core.scheduler
        scheduler.check()
        assert (scheduler.memory.blocks_used, scheduler.num_waiting, scheduler.num_running) == (0, 0, 0)
        assert not stats.native_calls
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread not in threads_before]
    assert not left, f"threads left: {left}"
    return {
        "seconds": seconds,
        **{f"requests {kind}": count for kind, count in sorted(counts.items())},
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "cached_tokens": stats.cached_tokens,
        "output_tokens": stats.output_tokens,
        "resident_mib_after_a_quarter": memory[len(memory) // 4] / 2**20,
        "resident_mib_at_the_end": memory[-1] / 2**20,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    logging.getLogger("hf_cb").setLevel(logging.CRITICAL)  # it logs each step that fails, and here many are meant to
    figures = soak(args.seconds, args.callers, args.seed)
    for name, value in figures.items():
        print(f"{name:<30}{value:>14,.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
