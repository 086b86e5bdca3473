"""Text-generation pipelines, plain and installed: `python -m benchmarks.pipeline [--json FILE]`.

Prompts of mixed length through `pipe(list)`, in turns: the plain pipeline, the same in padded batches, and installed. Greedy;
answers end by themselves or at `--new-tokens`. It fails if a text differs from the plain pipeline's (in float32).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TextGenerationPipeline

import hf_cb
from benchmarks import machine, report
from benchmarks.workload import text_source
from demo.packaged_model import load
from demo.prompts import QUESTIONS

Prompts = list[Any]


def mixed_prompts(tokenizer: Any, count: int, seed: int) -> Prompts:
    """Chats: questions of a line, every second one about a text of up to 300 tokens before it. Repeatable."""
    rng = random.Random(seed)
    source = text_source(tokenizer)
    prompts = []
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)]
        if i % 2:
            length = min(300, round(rng.lognormvariate(4.3, 0.8)))
            start = rng.randrange(len(source) - length)
            question = f"{tokenizer.decode(source[start : start + length])}\n\n{question}"
        prompts.append([{"role": "user", "content": question}])
    return prompts


def measure(pipe: TextGenerationPipeline, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, texts and disturbances of each way, round by round."""
    options = {"do_sample": False, "max_new_tokens": args.new_tokens, "return_full_text": False}
    ways = {"plain": 1, **({f"plain, batch_size={args.padded}": args.padded} if args.padded > 1 else {}), "hf_cb": 1}
    rounds: list[dict[str, dict[str, Any]]] = []
    texts: dict[str, list[str]] = {}
    pipe(prompts[:2], **{**options, "max_new_tokens": 2})
    for number in range(args.repeats):
        rounds.append({})
        for name, batch_size in ways.items():
            engine = hf_cb.install(pipe) if name == "hf_cb" else None
            with tqdm(total=len(prompts), desc=f"{number + 1}/{args.repeats} {name}", unit="prompt", leave=False) as bar:
                texts[name], taken, usage = _run(pipe, prompts, {**options, "batch_size": batch_size}, bar)
            rounds[-1][name] = {"seconds": taken, "other_cores": usage.other_cores}
            if engine is not None:
                rounds[-1][name]["native_calls"] = engine.stats().native_calls
                hf_cb.uninstall(pipe)
    return {"rounds": rounds, "texts": texts}


def _run(pipe: TextGenerationPipeline, prompts: Prompts, options: dict[str, Any], bar: tqdm) -> tuple[list[str], float, Any]:
    """As a generator, which is the same work as a list, for the progress bar's sake."""
    with machine.usage() as usage:
        began = time.perf_counter()
        texts = []
        for records in pipe((prompt for prompt in prompts), **options):
            texts.append(records[0]["generated_text"])
            bar.update()
        return texts, time.perf_counter() - began, usage


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds, of ratios taken within a round, and equal texts, by way."""
    rounds, texts = measured["rounds"], measured["texts"]
    return {
        name: {
            "seconds": statistics.median(round_[name]["seconds"] for round_ in rounds),
            "ratio_to_plain": statistics.median(round_["plain"]["seconds"] / round_[name]["seconds"] for round_ in rounds),
            "equal_texts": sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True)),
        }
        for name in rounds[0]
    }


def table(summary: dict[str, Any], count: int) -> str:
    """A line for each way."""
    lines = [f"{'':<24}{'seconds':>9}{'x plain':>9}{'texts as plain':>16}"]
    for name, values in summary.items():
        equal = f"{values['equal_texts']} of {count}"
        lines.append(f"{name:<24}{values['seconds']:>9.1f}{values['ratio_to_plain']:>9.2f}{equal:>16}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48, help="at most")
    parser.add_argument("--repeats", type=int, default=2, help="rounds; medians are reported")
    parser.add_argument("--padded", type=int, default=8, help="batch_size of the padded plain pipeline; 1: without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer, device=model.device)
    prompts = mixed_prompts(tokenizer, args.prompts, args.seed)
    lengths = [len(tokenizer.apply_chat_template(prompt, return_dict=True)["input_ids"]) for prompt in prompts]
    measured = measure(pipe, prompts, args)
    summary = summarize(measured)
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; {args.dtype}")
    print(table(summary, len(prompts)))
    disturbed = report.disturbed(measured["rounds"])
    if disturbed:
        print(f"DISTURBED by other programs, don't compare: round and way {', '.join(disturbed)}")
    if args.json:
        facts = {"machine": machine.describe(), "arguments": vars(args), "prompt_tokens": lengths, "medians": summary}
        args.json.write_text(json.dumps({**facts, **measured}, indent=1, default=str) + "\n")
    if summary["hf_cb"]["equal_texts"] < len(prompts) and args.dtype == "float32":
        sys.exit("a text of the installed pipeline differs from the plain one's")


if __name__ == "__main__":
    main()
