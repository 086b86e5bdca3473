"""`hf-cb bench`: throughput and latency of a model on this machine, or of a server."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hf_cb.cli.arguments import MODEL, Commands, add_api_key, add_command, add_loading, count, load
from hf_cb.cli.http import Http
from hf_cb.cli.targets import Answered, EngineTarget, ServerTarget, Target

_EXAMPLES = """\
  hf-cb bench ~/models/SmolLM2-135M-Instruct
  hf-cb bench ~/models/SmolLM2-135M-Instruct --concurrency 64 --prompt-tokens 512 --new-tokens 128 --json bench.json
  hf-cb bench http://127.0.0.1:8000 --concurrency 64
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out. Times in seconds, rates in tokens per second."""

    requests: int
    concurrency: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_rate: float
    first_token: tuple[float, float]  # P50 and P99, as the next two
    between_tokens: tuple[float, float]  # of each request's mean
    request: tuple[float, float]
    plain_rate: float | None = None
    plain_requests: int = 0

    @classmethod
    def of(cls, answers: Sequence[Answered], concurrency: int) -> Figures:
        """Reckon the figures of all requests of a run."""
        seconds = max(a.finished_at for a in answers) - min(a.submitted_at for a in answers)
        output = sum(a.num_output_tokens for a in answers)
        between = [(a.finished_at - a.first_token_at) / max(1, a.num_output_tokens - 1) for a in answers]
        return cls(
            requests=len(answers),
            concurrency=concurrency,
            seconds=seconds,
            prompt_tokens=sum(a.num_prompt_tokens for a in answers),
            output_tokens=output,
            output_rate=output / seconds,
            first_token=_percentiles([a.first_token_at - a.submitted_at for a in answers]),
            between_tokens=_percentiles(between),
            request=_percentiles([a.finished_at - a.submitted_at for a in answers]),
        )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def add_to(commands: Commands) -> None:
    """Make it one of the commands."""
    about = (
        "Put many requests at once to a model in this process, or to a server of OpenAI's API. In this process\n"
        "they have random tokens and answers of the length asked for; a server gets random words, and may\n"
        "answer shorter."
    )
    parser = add_command(commands, "bench", "measure throughput and latency of a model or a server", about, _EXAMPLES)
    parser.add_argument("target", metavar="MODEL|URL", help=f"{MODEL}, or the address of a server")
    parser.add_argument("--concurrency", type=count, default=32, metavar="N", help="requests at a time (default: 32)")
    parser.add_argument("--requests", type=count, metavar="N", help="in all (default: twice as many)")
    parser.add_argument("--prompt-tokens", type=count, default=128, metavar="N", help="of a request (default: 128)")
    parser.add_argument("--new-tokens", type=count, default=64, metavar="N", help="of an answer (default: 64)")
    parser.add_argument(
        "--plain",
        type=int,
        default=4,
        metavar="N",
        help="requests for plain generate(), one at a time, to compare with; 0 for none (default: 4)",
    )
    parser.add_argument("--model", metavar="NAME", help="of the server's models (default: the first)")
    add_api_key(parser)
    add_loading(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    num_requests = args.requests or 2 * args.concurrency
    if args.target.startswith(("http://", "https://")):
        http = Http(args.target, args.api_key)
        target = ServerTarget(http, args.model, args.prompt_tokens, args.new_tokens)
        figures = _measure(target, num_requests, args.concurrency)
        name = f"{target.model} at {http.url}"
    else:
        served = load(args.target, args)
        name = f"{served.name} ({served.model.dtype}, {served.model.device})"
        try:
            engine_target = EngineTarget(served, args.prompt_tokens, args.new_tokens)
            figures = _measure(engine_target, num_requests, args.concurrency)
            if args.plain > 0:
                print(f"... plain generate(), {args.plain} requests one at a time", file=sys.stderr)
                rate = engine_target.plain_rate(args.plain)
                figures = Figures(**{**asdict(figures), "plain_rate": rate, "plain_requests": args.plain})
        finally:
            served.engine.shutdown(drain=False)
            served.close()
    print("\n".join(lines(name, figures)))
    if args.json:
        args.json.write_text(json.dumps({"target": name, **asdict(figures)}, indent=1) + "\n")
    return 0


def _measure(target: Target, num_requests: int, concurrency: int) -> Figures:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    print("... a first request, which is not measured", file=sys.stderr)
    target.ask(-1)  # what is slow only the first time is not measured
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{concurrency} requests at a time", total=num_requests)
        answers = put_all(target, num_requests, concurrency, lambda: progress.advance(task))
    return Figures.of(answers, concurrency)


def put_all(target: Target, num_requests: int, concurrency: int, on_end: Callable[[], None] = lambda: None) -> list[Answered]:
    """What becomes of requests 0 up to `num_requests`, of which so many are underway at a time. Raises the first error."""
    left = iter(range(num_requests))
    lock, done = threading.Lock(), queue.SimpleQueue[Answered | Exception]()

    def client() -> None:
        while True:
            with lock:
                index = next(left, None)
            if index is None:
                return
            try:
                done.put(target.ask(index))
            except Exception as error:
                done.put(error)

    for _ in range(min(concurrency, num_requests)):
        threading.Thread(target=client, daemon=True).start()  # daemons: Ctrl-C ends the program, whatever they wait for
    answers = []
    for _ in range(num_requests):
        answer = done.get()
        if isinstance(answer, Exception):
            raise answer
        answers.append(answer)
        on_end()
    return answers


def lines(name: str, figures: Figures) -> list[str]:
    """The figures as lines for people to read."""
    f = figures
    said = [
        name,
        f"{f.requests} requests, {f.concurrency} at a time, in {f.seconds:.1f} s: "
        f"{f.prompt_tokens / f.requests:.0f} tokens in and {f.output_tokens / f.requests:.0f} out each",
        "",
        f"{'output':<16}{f.output_rate:10.1f} tokens/s",
        f"{'prompt':<16}{f.prompt_tokens / f.seconds:10.1f} tokens/s",
        f"{'':<16}{'P50':>10}{'P99':>12}",
        *(
            f"{what:<16}{p50:10.3f} s{p99:10.3f} s"
            for what, (p50, p99) in (
                ("first token", f.first_token),
                ("between tokens", f.between_tokens),
                ("request", f.request),
            )
        ),
    ]
    if f.plain_rate:
        said += [
            "",
            f"{f.output_rate / f.plain_rate:.1f}x plain generate() behind a lock, which makes {f.plain_rate:.1f} tokens/s",
        ]
    return said
