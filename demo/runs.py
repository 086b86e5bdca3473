"""The runs that the demo compares: the same questions, the same model, different ways to batch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import hf_cb
from demo import report
from demo.live import Clock, Live
from demo.report import Answer, Run
from demo.slots import Timeline, continuous_timeline, static_timeline

_STEPS = 1_000_000  # more than any demo takes: all are kept


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same in every run."""

    model: Any
    tokenizer: Any
    questions: Sequence[str]
    max_new_tokens: int
    stop: threading.Event = field(default_factory=threading.Event)  # set: the running calls end

    @property
    def eos_token_ids(self) -> frozenset[int]:
        ids = self.model.generation_config.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    @property
    def options(self) -> dict[str, Any]:
        """For generate(): greedy, so that every run must give the same tokens."""
        return {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": self.tokenizer.pad_token_id}

    def encode(self, questions: Sequence[str]) -> Any:
        """input_ids and attention_mask, int64 [questions, tokens of the longest], padded on the left."""
        if self.tokenizer.chat_template is None:
            batch = self.tokenizer(list(questions), return_tensors="pt", padding=True)
        else:
            chats = [[{"role": "user", "content": question}] for question in questions]
            batch = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
            )
        return batch.to(self.model.device)


def run_plain(setting: Setting, name: str, num_questions: int, threads: int) -> Run:
    """Plain generate() from many threads behind a lock, on the first `num_questions`."""
    with _installed(setting.model, backend="serialized"):
        _warm_up(setting)
        answers, seconds = _ask_in_threads(setting, name, range(num_questions), threads)
    return Run(name, answers, seconds, mean_batch=1.0)


def run_continuous(setting: Setting, name: str, threads: int) -> tuple[Run, Any]:
    """model.generate() from many threads on all the questions, served by hf_cb. The second value: its EngineStats."""
    with _installed(setting.model, record_steps=_STEPS) as engine:
        _warm_up(setting)
        begin = time.perf_counter()
        answers, seconds = _ask_in_threads(setting, name, range(len(setting.questions)), threads)
        steps = [step for step in engine.steps() if step.started >= begin]
        stats = engine.stats()
    return Run(name, answers, seconds, report.mean_batch(steps), report.kv_waste(steps)), stats


def run_static(setting: Setting, name: str, num_slots: int) -> tuple[Run, Timeline]:
    """Plain generate() on padded batches of `num_slots` questions, one batch after the other."""
    _warm_up(setting)
    answers: list[Answer] = []

    def ask_all() -> None:
        for first in range(0, len(setting.questions), num_slots):
            _ask(setting, range(first, min(first + num_slots, len(setting.questions))), answers)

    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        _watch(setting, Live(name, len(setting.questions), setting.tokenizer), [pool.submit(ask_all)], answers)
    seconds = time.perf_counter() - begin
    for answer in answers:
        answer.asked_at = begin  # all the questions are there from the start: the later batches wait
    timeline = static_timeline([len(answer.tokens) for answer in answers], num_slots)
    mean_batch = report.num_tokens(answers) / timeline.num_iterations
    waste = report.static_kv_waste(answers, num_slots)
    return Run(name, {answer.number: answer for answer in answers}, seconds, mean_batch, waste), timeline


def run_slots(setting: Setting, name: str, num_slots: int) -> tuple[Run, Timeline]:
    """Engine.submit() of all the questions with room for `num_slots` at a time, to set beside the padded batches."""
    prompts = [setting.encode([question])["input_ids"][0].tolist() for question in setting.questions]
    with (
        ThreadPoolExecutor(len(prompts)) as pool,
        _installed(setting.model, record_steps=_STEPS, max_batch_size=num_slots) as engine,
    ):
        _warm_up(setting)
        begin = time.perf_counter()
        handles = [engine.submit(prompt, max_new_tokens=setting.max_new_tokens, do_sample=False) for prompt in prompts]
        answers = [Answer(number, len(prompt), begin, []) for number, prompt in enumerate(prompts)]
        futures = [pool.submit(_follow, handle, answer) for handle, answer in zip(handles, answers, strict=True)]
        _watch(setting, Live(name, len(prompts), setting.tokenizer), futures, answers)
        seconds = time.perf_counter() - begin
        steps = [step for step in engine.steps() if step.started >= begin]
    numbers = {handle.request_id: number for number, handle in enumerate(handles)}
    timeline = continuous_timeline(steps, num_slots, numbers)
    by_number = {answer.number: answer for answer in answers}
    return Run(name, by_number, seconds, report.mean_batch(steps), report.kv_waste(steps)), timeline


def _follow(handle: Any, answer: Answer) -> None:
    for token in handle:
        answer.tokens.append(token)
    result = handle.result()
    answer.asked_at, answer.first_token_at = result.submitted_at, result.first_token_at
    answer.finished_at = result.finished_at


@contextmanager
def _installed(model: Any, **options: Any) -> Iterator[Any]:
    engine = hf_cb.install(model, **options)
    try:
        yield engine
    finally:
        hf_cb.uninstall(model)


def _warm_up(setting: Setting) -> None:
    """The first call of any sort is slower; none of the runs shall pay for that."""
    setting.model.generate(**setting.encode(setting.questions[:1]), **{**setting.options, "max_new_tokens": 2})


def _ask_in_threads(setting: Setting, name: str, numbers: Sequence[int], threads: int) -> tuple[dict[int, Answer], float]:
    """Every question from a thread of its own, at most `threads` at a time. The answers by number, and the seconds."""
    answers: list[Answer] = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_ask, setting, [number], answers) for number in numbers]
        _watch(setting, Live(name, len(numbers), setting.tokenizer), futures, answers)
    seconds = time.perf_counter() - begin
    return {answer.number: answer for answer in answers}, seconds


def _watch(setting: Setting, live: Live, futures: Sequence[Future[None]], answers: Sequence[Answer]) -> None:
    try:
        live.watch(futures, answers)
    except BaseException:  # one call failed, or Ctrl-C: the other threads need not go on to their ends
        setting.stop.set()
        raise


def _ask(setting: Setting, numbers: Sequence[int], answers: list[Answer]) -> None:
    """One generate() call with one row for each number; `answers` gets the rows at once, their tokens as they come."""
    inputs = setting.encode([setting.questions[number] for number in numbers])
    lengths = inputs["attention_mask"].sum(1).tolist()
    rows = [Answer(number, length, time.perf_counter(), []) for number, length in zip(numbers, lengths, strict=True)]
    answers.extend(rows)
    output = setting.model.generate(**inputs, **setting.options, streamer=Clock(rows, setting.eos_token_ids, setting.stop))
    for answer, row in zip(rows, output[:, inputs["input_ids"].shape[1] :], strict=True):
        answer.tokens = _until_eos(row, setting.eos_token_ids)  # what generate() returned, not what it streamed


def _until_eos(row: torch.Tensor, eos_token_ids: frozenset[int]) -> list[int]:
    tokens: list[int] = row.tolist()
    ends = [i for i, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens
