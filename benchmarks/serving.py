"""What a server does under load: `python -m benchmarks.serving [--parts minute,throughput,burst,sigterm] [--json FILE]`.

minute: 64 openai clients that stream answers for a minute; each answer must be the one that the engine gives for that question.
throughput: 64 streams at once against `engine.generate_batch` on the same questions, in turns. burst: 1,000 connections at
once, each answered rightly or refused with status 429. sigterm: a server that is told to end answers all that it has begun.
It fails if anything is lost, mixed up or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

import hf_cb
from benchmarks import machine
from benchmarks.report import QUIET_CORES, percentile
from benchmarks.server_process import ServerProcess, server
from benchmarks.serving_clients import Answer, Ask, clients, read_all, stream
from demo import packaged_model

Figures = dict[str, Any]


class Bench:
    """The model in this process, which knows the right answers, and the settings of the server's."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = args.model or str(packaged_model.prepare())
        self.name = Path(self.folder).name
        self.model, self.tokenizer = packaged_model.load(self.folder)
        self.engine = hf_cb.install(self.model, **args.engine)

    def server(self) -> Any:
        return server(self.folder, self.name, self.args.engine)

    def prompt(self, ask: Ask) -> list[int]:
        return list(self.tokenizer.apply_chat_template(ask.messages, add_generation_prompt=True)["input_ids"])

    def results(self, asks: Sequence[Ask]) -> list[hf_cb.GenerationResult]:
        """The engine's, all in one batch. `asks` have one length."""
        prompts = [self.prompt(ask) for ask in asks]
        return self.engine.generate_batch(prompts, max_new_tokens=asks[0].max_tokens, do_sample=False)

    def check(self, answers: Iterable[Answer]) -> None:
        """Raise RuntimeError unless each is complete, without an error, and the engine's for its question."""
        answers = list(answers)
        asks = {answer.ask.number: answer.ask for answer in answers}
        results = dict(zip(asks, self.results(list(asks.values())), strict=True))
        wrong = []
        for answer in answers:
            result = results[answer.ask.number]
            text = self.tokenizer.decode(list(result.tokens), skip_special_tokens=True)
            if answer.error is not None:
                wrong.append(f"question {answer.ask.number}: {answer.error}")
            elif (answer.text, answer.finish_reason) != (text, result.finish_reason.value):
                wrong.append(f"question {answer.ask.number}: {answer.text!r} ({answer.finish_reason}) instead of {text!r}")
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(answers)} answers are not right; " + "; ".join(wrong[:3]))


def minute(bench: Bench) -> Figures:
    """Clients that ask one question after the other."""
    args = bench.args

    async def run(at: ServerProcess) -> list[Answer]:
        numbers, answers, end = itertools.count(), [], time.perf_counter() + args.seconds

        async def work(client: Any, bar: Any) -> None:
            while time.perf_counter() < end:
                answers.append(await stream(client, at.model, Ask(next(numbers), args.max_tokens)))
                bar.update()

        with tqdm(desc="minute", unit="answer", file=sys.stderr) as bar:
            async with clients(at.url, args.clients) as made:
                await asyncio.gather(*(work(client, bar) for client in made))
        return answers

    with bench.server() as at, machine.usage(at.process.pid) as usage:
        started = time.perf_counter()
        answers = asyncio.run(run(at))
        seconds = time.perf_counter() - started
    bench.check(answers)
    firsts = [answer.first_token_seconds for answer in answers]
    gaps = [b - a for answer in answers for a, b in itertools.pairwise(answer.times[1:-1])]
    tokens = sum(answer.completion_tokens for answer in answers)
    return {
        "answers": len(answers),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_p50": percentile(firsts, 50),
        "first_token_p99": percentile(firsts, 99),
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "other_cores": usage.other_cores,
    }


def throughput(bench: Bench) -> Figures:
    """The same questions by generate_batch and through the server, A B A B. No round's questions are another one's."""
    args = bench.args
    rounds = []
    with bench.server() as at, tqdm(total=2 * args.repeats, desc="throughput", unit="run", file=sys.stderr) as bar:
        asyncio.run(read_all(at.url, at.model, [Ask(number, 2) for number in range(4)]))
        bench.results([Ask(number, 2) for number in range(4)])
        for turn in range(args.repeats):
            asks = [Ask(1000 * (turn + 1) + i, args.max_tokens) for i in range(args.clients)]
            with machine.usage(at.process.pid) as usage:
                started = time.perf_counter()
                results = bench.results(asks)
                batch_seconds = time.perf_counter() - started
                bar.update()
                server_seconds, answers = asyncio.run(read_all(at.url, at.model, asks))
                bar.update()
            tokens = sum(len(result.tokens) for result in results)
            rounds.append(
                {
                    "batch_tokens_per_second": tokens / batch_seconds,
                    "server_tokens_per_second": tokens / server_seconds,
                    "ratio": batch_seconds / server_seconds,
                    "other_cores": usage.other_cores,
                }
            )
            bench.check(answers)
    return {key: statistics.median(r[key] or 0.0 for r in rounds) for key in rounds[0]} | {"rounds": rounds}


def burst(bench: Bench) -> Figures:
    """Connections that all come at once."""
    args = bench.args

    async def ask(client: httpx.AsyncClient, ask: Ask, bar: Any) -> tuple[int, Answer | None, str | None]:
        body = {"model": bench.name, "messages": ask.messages, "max_tokens": ask.max_tokens, "temperature": 0}
        started = time.perf_counter()
        response = await client.post("/v1/chat/completions", json=body)
        bar.update()
        if response.status_code != 200:
            return response.status_code, None, response.headers.get("retry-after")
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        times = (started, time.perf_counter())
        answer = Answer(ask, choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"], times)
        return 200, answer, None

    async def run(at: ServerProcess) -> list[tuple[int, Answer | None, str | None]]:
        limits = httpx.Limits(max_connections=None)
        with tqdm(total=args.connections, desc="burst", unit="answer", file=sys.stderr) as bar:
            async with httpx.AsyncClient(base_url=at.url, limits=limits, timeout=600, verify=False, trust_env=False) as client:
                asks = [Ask(number, 4) for number in range(args.connections)]
                return await asyncio.gather(*(ask(client, one, bar) for one in asks))

    with bench.server() as at:
        started = time.perf_counter()
        ends = asyncio.run(run(at))
        seconds = time.perf_counter() - started
    statuses = Counter(status for status, _, _ in ends)
    if set(statuses) - {200, 429} or not all(status == 200 or wait for status, _, wait in ends):
        raise RuntimeError(f"not refused cleanly: {dict(statuses)}")
    bench.check(answer for _, answer, _ in ends if answer is not None)
    return {"answered": statuses[200], "refused": statuses[429], "seconds": seconds}


def sigterm(bench: Bench) -> Figures:
    """SIGTERM when every client has its first piece."""
    args = bench.args

    async def run(at: ServerProcess) -> list[Answer]:
        async with clients(at.url, args.clients) as made:
            begun = [asyncio.Event() for _ in made]
            asks = [Ask(number, args.max_tokens) for number in range(args.clients)]
            tasks = [
                asyncio.create_task(stream(client, at.model, one, event))
                for client, one, event in zip(made, asks, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            running = sum(not task.done() for task in tasks)
            at.tell_to_end()
            print(f"sigterm: sent with {running} of {len(tasks)} answers underway", file=sys.stderr)
            return await asyncio.gather(*tasks)

    with bench.server() as at:
        answers = asyncio.run(run(at))
        status = at.status()
    bench.check(answers)
    if status != 0:
        raise RuntimeError(f"the server ended with status {status}")
    return {"answered": len(answers), "status": status}


PARTS = {"minute": minute, "throughput": throughput, "burst": burst, "sigterm": sigterm}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    bench = Bench(args)
    result: Figures = {"machine": machine.describe(), "arguments": vars(args), "parts": {}}
    for part in args.parts:
        figures = result["parts"][part] = PARTS[part](bench)
        shown = {key: value for key, value in figures.items() if not isinstance(value, list)}
        print(f"{part:<12}" + "  ".join(f"{key} {_short(value)}" for key, value in shown.items()), flush=True)
        if (figures.get("other_cores") or 0) > QUIET_CORES:
            print(f"{part:<12}DISTURBED by other programs, don't compare")
    hf_cb.uninstall(bench.model)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=_parts, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", help="a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="that the minute has (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of throughput; medians are reported")
    parser.add_argument("--connections", type=int, default=1000, help="of the burst")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="fields of CBConfig, for both")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _parts(text: str) -> list[str]:
    if unknown := set(parts := text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    main()
