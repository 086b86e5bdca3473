"""What the papers behind this engine showed, shown on it: a JSON file and a picture each.

python -m benchmarks.papers memory sharing lengths stalls prefix --out out
python -m benchmarks.papers memory --scale 0.2                    # quick look
python -m benchmarks.papers --draw out/memory.json                # draw a file again

memory: what KV memory holds under each way to reserve it. sharing: blocks that samples and beams of one prompt share. lengths:
static against continuous batches as output lengths spread. stalls: time between tokens while long prompts come in. prefix: what
the prefix cache saves. `python -m benchmarks.curves normalised` is the sixth: latency against the rate of arrival.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import hf_cb
from benchmarks import lineup, long_prompts, machine, paper_pictures, pictures, prefix, report, subject
from benchmarks.lineup import Lineup
from benchmarks.peers import ALL_STEPS, STATIC_BATCH, inputs, installed
from benchmarks.subject import Subject
from benchmarks.trace import traced
from benchmarks.workload import Item, Workload
from demo.report import Answer, static_kv_waste
from hf_cb.core.output import SchedulerOutput

Points = list[dict[str, Any]]
BLOCK = 16
REQUESTS = 32
_SHARING_REQUESTS = 4
_WIDTHS = (2, 4, 6)  # samples, or beams: the paper's
_PROMPT, _OUTPUT = 64, 32  # tokens; the mean where output lengths spread
CAPS = (8, 32, 128, 384)  # the longest output


def memory(measured: Subject, args: argparse.Namespace) -> Points:
    """Shares of the KV memory that is held, over all steps of one run, by the way in which it is reserved.

    The pages are this engine's own, from its records. What reservations would have held is counted for the same requests in
    the same steps; static batches for the same requests, 16 at a time.
    """
    workload = Workload.make(measured.source, REQUESTS, seed=args.seed, scale=args.scale)
    with installed(measured.model, record_steps=ALL_STEPS, block_size=BLOCK, prefix_cache=False) as engine:
        handles = [engine.submit(item.prompt, max_new_tokens=item.output_length) for item in workload.items]
        for handle in handles:
            handle.result()
        steps = engine.steps()
    lengths = {h.request_id: len(i.prompt) + i.output_length for h, i in zip(handles, workload.items, strict=True)}
    reservations = {
        f"reserved: the model's limit of {measured.max_tokens}": lambda _: measured.max_tokens,
        "reserved: the next power of two": lambda length: 1 << (length - 1).bit_length(),
        "reserved: the exact length, foretold": lambda length: length,
    }
    points = [{"name": name, **reserved_shares(steps, lengths, of)} for name, of in reservations.items()]
    answers = [Answer(i.index, len(i.prompt), 0.0, [0] * i.output_length) for i in workload.items]
    static = static_kv_waste(answers, STATIC_BATCH)
    points.append({"name": f"static batches of {STATIC_BATCH}, padded", "used": 1 - static, "later": 0.0, "wasted": static})
    used = sum(step.tokens_stored for step in steps) / sum(step.blocks_used * step.block_size for step in steps)
    points.append({"name": f"hf_cb: blocks of {BLOCK}", "used": used, "later": 0.0, "wasted": 1 - used})
    return points


def reserved_shares(
    steps: Iterable[hf_cb.StepRecord], lengths: dict[int, int], reservation: Callable[[int], int]
) -> dict[str, float]:
    """Shares of what `reservation(final length)` holds for each running request: tokens stored, room for later, never used."""
    stored: Counter[int] = Counter()
    used = later = held = 0
    for step in steps:
        for request in step.preempted:
            del stored[request]
        stored.update(dict(step.rows))
        for request, tokens in list(stored.items()):
            used += tokens
            later += lengths[request] - tokens
            held += reservation(lengths[request])
            if tokens >= lengths[request] - 1:  # the last token needs no room
                del stored[request]
    return {"used": used / held, "later": later / held, "wasted": 1 - (used + later) / held}


def sharing(measured: Subject, args: argparse.Namespace) -> Points:
    """Blocks that samples, or beams, of one prompt share, as a share of what they would hold each by itself."""
    workload = Workload.make(measured.source, _SHARING_REQUESTS, seed=args.seed, scale=args.scale)
    prompts = [inputs(measured.model, item) for item in workload.items]
    new = max(2, round(96 * args.scale))
    kinds = {"samples": lambda n: {"do_sample": True, "num_return_sequences": n}, "beams": lambda n: {"num_beams": n}}
    points = []
    with installed(measured.model, block_size=BLOCK, prefix_cache=False) as engine:
        for kind, options in kinds.items():
            for width in _WIDTHS:
                call = {"max_new_tokens": new, "pad_token_id": 0, **options(width)}
                with traced() as trace, ThreadPoolExecutor(len(prompts)) as threads:
                    list(threads.map(lambda prompt, call=call: measured.model.generate(**prompt, **call), prompts))
                points.append({"kind": kind, "width": width, "saved": blocks_saved(trace.outputs)})
        if engine.stats().native_calls:
            raise RuntimeError(f"native calls: {dict(engine.stats().native_calls)}")
    return points


def blocks_saved(outputs: Iterable[SchedulerOutput]) -> float:
    """1 - blocks in the tables / the sum of the tables' lengths, over the steps of single tokens."""
    held = alone = 0
    for output in outputs:
        if output.rows and all(len(row.token_ids) == 1 for row in output.rows):
            held += len({block for row in output.rows for block in row.memory.block_table})
            alone += sum(len(row.memory.block_table) for row in output.rows)
    return 1 - held / alone


def lengths(measured: Subject, args: argparse.Namespace) -> Points:
    """Output tokens a second of each peer, by the longest output: lengths are exponential and cut off there. With as many slots
    here as static batches have rows, so that what differs is who sits in them, and when."""
    points: Points = []
    with Lineup(measured, args.peers, {"max_batch_size": STATIC_BATCH}) as line:
        for cap in CAPS:
            workload = spread(measured.source, max(1, round(cap * args.scale)), args)
            rounds = []
            if not points:
                line.warm_up(workload)
            for _ in range(args.repeats):
                runs = {name: line.run(name, workload, None, f"at most {cap}, {name}") for name in line.names}
                rounds.append({name: report.figures(outcome, workload, usage) for name, (outcome, usage) in runs.items()})
            points.append({"x": cap, "peers": report.medians(rounds)})
    return points


def spread(source: Sequence[int], cap: int, args: argparse.Namespace) -> Workload:
    """Prompts of one length; outputs by an exponential law, of at most `cap` tokens."""
    drawn = np.random.default_rng(args.seed).exponential(max(1.0, _OUTPUT * args.scale), REQUESTS)
    width = max(1, round(_PROMPT * args.scale))
    return Workload(
        tuple(Item(i, tuple(source[i * width : (i + 1) * width]), min(cap, 1 + int(length))) for i, length in enumerate(drawn))
    )


def stalls(measured: Subject, args: argparse.Namespace) -> Points:
    """Gaps between two tokens of eight streams while four long prompts come in: whole, in chunks, in chunks by time."""
    setting = argparse.Namespace(
        seed=args.seed,
        streams=8,
        stream_tokens=max(100, round(128 * args.scale)),  # they must outlast the prompts
        prompts=4,
        prompt_tokens=max(8, round(1024 * args.scale)),
        target_itl_ms=200.0,
    )
    names = {"whole": "prompts whole", "default": "chunks of the default budget", "target": "target_itl_ms=200"}
    points = []
    for name, options in long_prompts.ways(setting).items():
        round_ = long_prompts.run(measured.model, setting, **options)
        points.append({"name": names[name], "gaps": round_.gaps(), **round_.figures(setting)})
    return points


def prefixes(measured: Subject, args: argparse.Namespace) -> Points:
    """Tokens computed and time to the first token with the prefix cache and without."""
    setting = argparse.Namespace(seed=args.seed, requests=REQUESTS, turns=8, scale=args.scale)
    return [{"name": name, **parts} for name, parts in prefix.measure(measured.model, setting).items()]


PARTS: dict[str, Callable[[Subject, argparse.Namespace], Points]] = {
    "memory": memory,
    "sharing": sharing,
    "lengths": lengths,
    "stalls": stalls,
    "prefix": prefixes,
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.draw:
        print(paper_pictures.draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png")))
        return
    measured = subject.load(args.model, args.shape, args.dtype)
    for part in args.parts or PARTS:
        with machine.usage() as usage:
            points = PARTS[part](measured, args)
        facts = {"machine": machine.describe(), "arguments": vars(args), "other_cores": usage.other_cores}
        result = {"kind": part, "dtype": args.dtype, **facts, "points": points}
        file = pictures.save(result, args.out / f"{part}.json")
        print(f"{paper_pictures.draw(result, file.with_suffix('.png'))}\n{paper_pictures.text(result)}", flush=True)
        if (usage.other_cores or 0) > report.QUIET_CORES:
            print(f"DISTURBED by other programs: {usage.other_cores:.2f} cores; times are not to be compared")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this JSON file again instead")
    parser.add_argument("--peers", type=lineup.names, default=["static", "hf_cb"], metavar="A,B", help="for `lengths`")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of `lengths`; medians are drawn")
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--shape", help="a model of this form with random weights instead, as for benchmarks.throughput")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for quick runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    return parser.parse_args(argv)


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"no {text}; there are {', '.join(PARTS)}")
    return text


if __name__ == "__main__":
    main()
