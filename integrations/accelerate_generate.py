"""Answer a file of prompts with one model, on as many processes as `accelerate launch` starts.

accelerate launch --multi_gpu --num_processes 2 -m integrations.accelerate_generate prompts.jsonl answers.jsonl

(--multi_gpu is accelerate's word for several processes: without GPUs they run on the CPU.) A line of the prompts is
{"prompt": text} or {"messages": [{"role": ..., "content": ...}]}; a line of the answers has its number, what the prompt's line
held, and the text, in the order of the prompts. The processes take prompts as they have room. A run that was killed goes on
when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

if not __package__:  # started by its path rather than with -m
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hf_cb
from integrations.answer_log import AnswerLog, LogError, write_record
from integrations.prompt_lines import PromptFile, PromptLine
from integrations.replica import Replica, failure, replica
from integrations.shared_work import SharedWork

_PARENT = os.getppid()
_GLANCE = 0.5  # seconds between two looks at how the others get on


@record  # torchrun's report of a failed rank then has the exception
def main() -> None:
    """What one process does."""
    args = _parse()
    state = PartialState(cpu=args.cpu or not torch.accelerator.is_available())
    name = f"rank {state.process_index} of {state.num_processes} ({socket.gethostname()}, process {os.getpid()})"
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        print(
            "accelerate launch has started one process only: with --multi_gpu it starts several, on CPUs too", file=sys.stderr
        )
    try:
        _run(args, state)
    except SystemExit:
        raise
    except BaseException as error:
        print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    finally:
        state.destroy_process_group()


def _parse() -> argparse.Namespace:
    def options(text: str) -> dict[str, Any]:
        if not isinstance(value := json.loads(text), dict):
            raise ValueError
        if refused := value.keys() & {"num_return_sequences", "return_dict_in_generate", "streamer", "seed"}:
            raise argparse.ArgumentTypeError(f"takes options that leave one answer a prompt; got {', '.join(refused)}")
        return value

    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise ValueError
        return value

    parser = argparse.ArgumentParser(
        prog="accelerate launch ... -m integrations.accelerate_generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", type=Path, help="JSON lines")
    parser.add_argument("answers", type=Path, help="JSON lines; beside it the folder <answers>.parts until all is done")
    parser.add_argument("--model", help="id or folder of a causal language model (default: the packaged one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=count, default=128, help="length limit of an answer (%(default)s)")
    parser.add_argument(
        "--generate", type=options, default={}, help='more options of generate() as JSON: \'{"do_sample": true, "top_p": 0.9}\''
    )
    parser.add_argument("--seed", type=int, default=0, help="line n draws with seed + n, on whatever process (%(default)s)")
    parser.add_argument(
        "--in-hand", type=count, default=64, help="the most prompts that a process works on at once (%(default)s)"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--device-map", help="lay each process's model over its devices: auto, balanced, or a map as JSON")
    ways.add_argument(
        "--tensor-parallel", action="store_true", help="split each layer over all processes: one model, one batch"
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if there are GPUs")
    return parser.parse_args()


def _run(args: argparse.Namespace, state: PartialState) -> None:
    disable_progress_bar()  # transformers' own: there is one bar, for all
    prompts = PromptFile.read(args.prompts)
    with AnswerLog(args.answers) as log:
        _run_with(args, state, prompts, log)


def _run_with(args: argparse.Namespace, state: PartialState, prompts: PromptFile, log: AnswerLog) -> None:
    todo = _begin(args, state, prompts, log)
    work = SharedWork(state, todo, num_workers=1 if args.tensor_parallel else state.num_processes)
    total = len(prompts.good)
    options = {"do_sample": False, "max_new_tokens": args.max_new_tokens, **args.generate}
    dtype = getattr(torch, args.dtype)
    with replica(state, args.model, dtype, options, args.seed, args.device_map, args.tensor_parallel) as model:
        if args.tensor_parallel and not state.is_main_process:
            model.engine.follow()
            return
        with tqdm(total=total, initial=total - len(todo), unit="prompt", disable=not state.is_main_process) as bar:
            _answer_all(prompts, _Part(log, state), work, model, args.in_hand, bar)
            work.note_end()
            while state.is_main_process and not work.all_ended():
                _end_with_the_launcher()
                time.sleep(_GLANCE)
                _show(bar, work)
            _show(bar, work)
    if state.is_main_process:
        _finish(prompts, log)


def _begin(args: argparse.Namespace, state: PartialState, prompts: PromptFile, log: AnswerLog) -> list[int]:
    """The numbers of the lines to answer, as the main process finds them; the same for all. Exits if the run can't begin."""
    plan: list[Any] = [None, None]
    if state.is_main_process:
        names = ("model", "dtype", "max_new_tokens", "generate", "seed")
        settings = {name: getattr(args, name) for name in names} | {"prompts": prompts.digest}
        for line in prompts.bad:
            print(f"{prompts.path}: line {line.number}: {line.problem}", file=sys.stderr)
        try:
            done = log.begin(settings)
            plan = [[number for number in prompts.good if number not in done], None]
        except LogError as error:
            plan = [None, str(error)]
            print(error, file=sys.stderr)
    todo, problem = broadcast_object_list(plan)
    if problem is not None:
        sys.exit(2)
    return todo


def _answer_all(prompts: PromptFile, part: _Part, work: SharedWork, model: Replica, most: int, bar: tqdm) -> None:
    """Take lines as long as there are some and answer them, at most `most` at a time."""
    threads = ThreadPoolExecutor(most)
    pending: dict[Future[list[int]], PromptLine] = {}
    try:
        while True:
            _end_with_the_launcher()
            while len(pending) < most and (number := work.take(len(pending))) is not None:
                line = prompts.lines[number]
                try:
                    pending[threads.submit(model.generate, model.encode(line), number)] = line
                except Exception as error:  # of the tokenizer, or the chat template: it is this line's fault
                    part.write(failure(line, f"{type(error).__name__}: {error}"))
                    work.note_done()
            if not pending:
                return
            for future in wait(pending, _GLANCE, FIRST_COMPLETED).done:
                part.write(_outcome(model, pending.pop(future), future))
                work.note_done()
            _show(bar, work)
    finally:
        threads.shutdown(cancel_futures=True)


def _end_with_the_launcher() -> None:
    """End a process whose launcher was killed: the next run must not meet it. What counts is on disk."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != _PARENT:
        print(f"process {os.getpid()} ends: its launcher is gone", file=sys.stderr, flush=True)
        os._exit(1)


def _outcome(model: Replica, line: PromptLine, future: Future[list[int]]) -> dict[str, Any]:
    try:
        return model.record(line, future.result())
    except (hf_cb.RequestTooLongError, hf_cb.RequestFailedError) as error:  # of this line alone; any other ends the process
        return failure(line, f"{type(error).__name__}: {error}")


def _show(bar: tqdm, work: SharedWork) -> None:
    if not bar.disable:
        bar.update(bar.initial + work.num_done() - bar.n)


def _finish(prompts: PromptFile, log: AnswerLog) -> None:
    answers = log.finish(prompts.lines, {line.number: failure(line, line.problem or "") for line in prompts.bad})
    failed = [number for number, answer in answers.items() if "error" in answer]
    print(f"{log.output}: {len(answers) - len(failed)} answers, in the order of the prompts", file=sys.stderr)
    if failed:
        print(f"{len(failed)} lines have an error instead: {', '.join(map(str, sorted(failed)))}", file=sys.stderr)


class _Part:
    """This process's part of the log, made with its first answer."""

    def __init__(self, log: AnswerLog, state: PartialState) -> None:
        self._log = log
        self._name = f"{state.process_index}-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        self._file: IO[bytes] | None = None

    def write(self, record: dict[str, Any]) -> None:
        self._file = self._file or self._log.open_part(self._name)
        write_record(self._file, record)


if __name__ == "__main__":
    main()
