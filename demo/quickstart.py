"""Ask one model 32 questions from 32 threads: with plain generate() behind a lock, then with hf_cb.

Shows both live, compares speed and answers, and draws who sat in which batch slot.
"""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from demo import packaged_model, report
from demo.prompts import QUESTIONS
from demo.runs import Setting, run_continuous, run_plain, run_slots, run_static
from demo.slots import Panel, draw

_SLOTS = 8
_SHOWN = (0, 2, 19, 23)  # answers that are printed: short ones, a program, a story


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a log has the lines in order with those of the progress
    setting = _load(args)
    total = len(setting.questions)
    num_plain = total if args.plain == "all" else min(int(args.plain), total)
    print(f"1. plain generate() behind a lock, {num_plain} of the {total} questions, {args.threads} threads")
    plain = run_plain(setting, "generate() behind a lock", num_plain, args.threads)
    print(f"2. the same calls after hf_cb.install(model): all {total} questions, {args.threads} threads")
    main_run, stats = run_continuous(setting, f"hf_cb, {args.threads} threads", args.threads)
    print(
        f"3. for the picture, two more runs with {_SLOTS} slots each: padded batches, then hf_cb with max_batch_size={_SLOTS}"
    )
    static, static_timeline = run_static(setting, f"padded batches of {_SLOTS}", _SLOTS)
    slots, slots_timeline = run_slots(setting, f"hf_cb, at most {_SLOTS} at a time", _SLOTS)

    print("\n" + report.table(report.rows_of(plain, [main_run, static, slots])) + "\n")
    print(f"attention: {stats.attention_backend} ({stats.attention_reason})")
    print(f"calls left to plain generate: {stats.native_calls or 'none'}\n")
    _print_answers(setting, main_run)
    figure = draw(
        Panel("Static batching", f"plain generate() on padded batches of {_SLOTS}", static_timeline, static.seconds),
        Panel("Continuous batching", "hf_cb: a freed slot is filled at the next iteration", slots_timeline, slots.seconds),
        f"{total} questions, {_SLOTS} batch slots: who sits where",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "batch_slots.png")
    print(f"picture of the two runs with {_SLOTS} slots: {args.out / 'batch_slots.png'}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise ValueError
        return value

    def count_or_all(text: str) -> int | str:
        return text if text == "all" else count(text)

    parser = argparse.ArgumentParser(prog="python -m demo.quickstart", description=__doc__)
    parser.add_argument("--model", help="id or folder of a causal language model (default: the packaged one)")
    parser.add_argument("--threads", type=count, default=32, help="threads that call generate() at the same time (%(default)s)")
    parser.add_argument("--max-new-tokens", type=count, default=128, help="length limit of an answer (%(default)s)")
    parser.add_argument(
        "--plain", type=count_or_all, default=8, help="questions that plain generate() answers too, or 'all' (%(default)s)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (%(default)s/)")
    return parser.parse_args(argv)


def _load(args: argparse.Namespace) -> Setting:
    model, tokenizer = packaged_model.load(args.model, getattr(torch, args.dtype))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = f", {torch.get_num_threads()} torch threads" if device.type == "cpu" else ""
    name = args.model or f"{packaged_model.NAME} (packaged)"
    print(f"{name}, {args.dtype}, {device}{threads}; greedy, at most {args.max_new_tokens} tokens per answer")
    return Setting(model.to(device), tokenizer, QUESTIONS, args.max_new_tokens)


def _print_answers(setting: Setting, run: report.Run) -> None:
    for number in _SHOWN:
        text = setting.tokenizer.decode(run.answers[number].tokens, skip_special_tokens=True).strip()
        print(f"{number + 1:>3}. {setting.questions[number]}")
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 100) or [""]]
        print("\n".join(f"     │ {line}" for line in lines))
    print()


if __name__ == "__main__":
    main()
