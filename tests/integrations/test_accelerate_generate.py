"""The real thing: `accelerate launch` as people type it, on processes of this machine's CPU, and SIGKILL.

Each launch takes as long as it takes to import torch.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter

import pytest
import tiny_chat
import torch
from processes import Program, kill, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations.replica import gpus_of

pytestmark = pytest.mark.timeout(120)

NUM_KILLS = int(os.environ.get("HF_CB_NUM_KILLS", 3))
MAX_NEW_TOKENS = 24
SAMPLING = '{"do_sample": true, "temperature": 0.8}'


class Launch(Program):
    """The program on so many processes."""

    def __init__(self, num_processes: int, *arguments: object) -> None:
        several = ("--multi_gpu", "--num_processes", num_processes, "--main_process_port", 0)
        ways = several if num_processes > 1 else ("--cpu",)
        command = (sys.executable, "-m", "accelerate.commands.launch", *ways, "-m", "integrations.accelerate_generate")
        super().__init__(*command, *arguments)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of the living."""
        return {int(environment["RANK"]): pid for pid, environment in self.environments().items() if "RANK" in environment}


def launch(num_processes: int, *arguments: object, fails: bool = False) -> str:
    """What a launch prints that is left to itself and ends as it should."""
    with Launch(num_processes, *arguments) as running:
        status, printed = running.wait()
    assert (status != 0) == fails, printed
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """160 prompts of mixed length, a chat among them, one that is too long, and two lines that are none."""
    lines = [json.dumps({"prompt": f"{n} and " * (1 + n % 23), "id": n}) for n in range(159)]
    lines.insert(40, json.dumps({"messages": [{"role": "user", "content": "Who are you?"}]}))
    lines.insert(3, "{no JSON")
    lines.insert(10, "")
    lines.insert(20, '{"id": 5}')
    lines.append(json.dumps({"prompt": "much too long " * 3000}))
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(prompts, answers, folder, *more):
    return (prompts, answers, "--model", folder, "--max-new-tokens", MAX_NEW_TOKENS, "--generate", SAMPLING, *more)


@pytest.fixture(scope="module")
def of_one_process(prompts, folder, tmp_path_factory):
    """The answers of one process, and what it printed."""
    answers = tmp_path_factory.mktemp("one") / "answers.jsonl"
    printed = launch(1, *arguments(prompts, answers, folder))
    return answers.read_bytes(), printed


def test_one_process_answers_as_plain_generate(of_one_process, prompts, folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    answers = {answer["line"]: answer for answer in map(json.loads, of_one_process[0].splitlines())}
    for number in (1, 2, 43, 100):
        answer = answers[number]
        if "prompt" in answer:
            inputs = tokenizer(answer["prompt"], return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                answer["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        torch.manual_seed(number)
        plain = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=0.8)
        assert answer["token_ids"] == plain[0, inputs["input_ids"].shape[1] :].tolist()
        assert answer["text"] == tokenizer.decode(answer["token_ids"], skip_special_tokens=True)
        assert answer["finish_reason"] == ("stop" if 2 in answer["token_ids"] else "length")


def test_every_line_has_its_place_and_bad_ones_are_told_by_number(of_one_process, prompts):
    output, printed = of_one_process
    answers = [json.loads(line) for line in output.splitlines()]
    numbers = [number for number, line in enumerate(prompts.read_text().split("\n"), 1) if line]
    assert [answer["line"] for answer in answers] == numbers
    assert {answer["line"]: answer["error"].split(":")[0] for answer in answers if "error" in answer} == {
        4: "not JSON",
        21: 'takes "prompt" or "messages"; got neither',
        numbers[-1]: "RequestTooLongError",
    }
    assert "line 4: not JSON" in printed
    assert f"3 lines have an error instead: 4, 21, {numbers[-1]}" in printed
    assert {answer.get("id") for answer in answers} >= set(range(159))


def records(answers) -> list[int]:
    """The numbers in all parts that are on disk now, as often as they stand there."""
    parts = answers.with_name(answers.name + ".parts").glob("part-*.jsonl")
    return [json.loads(line)["line"] for part in parts for line in part.read_bytes().split(b"\n")[:-1]]


@pytest.mark.soak
def test_killed_at_random_moments_and_resumed(of_one_process, prompts, folder, tmp_path):
    """The whole launch, one rank, or the launcher alone: nothing is lost and nothing is done twice."""
    chance = random.Random(0)
    answers = tmp_path / "answers.jsonl"
    command = arguments(prompts, answers, folder, "--in-hand", 3)
    for turn in range(NUM_KILLS):
        done = len(records(answers))
        target = chance.randrange(done, done + (160 - done) // (NUM_KILLS - turn + 1) + 1)
        with Launch(2, *command) as running:
            wait_until(lambda r=running: len(r.ranks()) == 2 or r.has_ended, "no workers")
            wait_until(lambda r=running, n=target: len(records(answers)) >= n or r.has_ended, "no progress")
            assert not running.has_ended, running.wait()
            _kill(running, ("all", "rank", "launcher")[turn % 3])
        assert not answers.exists()
        assert max(Counter(records(answers)).values(), default=1) == 1
    before = records(answers)
    printed = launch(2, *command)
    assert f"{len(before)}/161" in printed  # where the bar begins
    assert answers.read_bytes() == of_one_process[0]
    assert [path.name for path in tmp_path.iterdir()] == [answers.name]


def _kill(running: Launch, whom: str) -> None:
    if whom == "all":
        kill(running.living())
    elif whom == "rank":
        kill([running.ranks()[1]])
        status, printed = running.wait()
        assert status != 0
        assert "rank      : 1 " in printed
        assert "SIGKILL" in printed
    else:
        kill([running.process.pid])
        wait_until(lambda: not running.ranks(), "orphans go on")


def test_both_processes_take_their_share(of_one_process, prompts, folder, tmp_path):
    """By load: both have answered something before all is done."""
    answers = tmp_path / "answers.jsonl"

    def ranks() -> set[str]:
        parts = answers.with_name(answers.name + ".parts").glob("part-*.jsonl")
        return {part.name.split("-")[1] for part in parts}

    with Launch(2, *arguments(prompts, answers, folder)) as running:
        wait_until(lambda: ranks() == {"0", "1"} or running.has_ended, "one process has all the work")
        assert not running.has_ended


# On a machine without GPUs, accelerate's devices are the CPU and the disk; its hooks fetch what lies there.
WHERE = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
WHERE |= {"model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.mark.parametrize(
    "more",
    [("--tensor-parallel",), pytest.param(("--device-map", json.dumps(WHERE)), marks=pytest.mark.soak)],
    ids=lambda m: m[0],
)
def test_a_model_that_is_split_or_lies_over_several_devices(of_one_process, prompts, folder, tmp_path, more):
    answers = tmp_path / "answers.jsonl"
    printed = launch(2, *arguments(prompts, answers, folder, *more))
    assert "plain generate() answers" not in printed
    assert answers.read_bytes() == of_one_process[0]


@pytest.mark.soak
def test_heads_that_cannot_be_split_are_told(prompts, folder, tmp_path):
    printed = launch(3, *arguments(prompts, tmp_path / "answers.jsonl", folder, "--tensor-parallel"), fails=True)
    assert "4 attention heads and 2 key heads can't be split evenly over 3 processes" in printed


@pytest.mark.soak
def test_a_split_model_that_loses_a_rank_ends_and_goes_on(of_one_process, prompts, folder, tmp_path):
    answers = tmp_path / "answers.jsonl"
    command = arguments(prompts, answers, folder, "--tensor-parallel", "--in-hand", 3)
    with Launch(2, *command) as running:
        wait_until(lambda: len(records(answers)) >= 20 or running.has_ended, "no progress")
        kill([running.ranks()[1]])
        status, printed = running.wait()
    assert status != 0
    assert "rank      : 1 " in printed
    printed = launch(2, *command)
    assert answers.read_bytes() == of_one_process[0]


def test_gpus_are_dealt_out() -> None:
    assert [gpus_of(process, 8, 3) for process in range(3)] == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(ValueError, match="2 processes share 1 GPUs"):
        gpus_of(0, 1, 2)


@pytest.mark.soak
def test_a_rank_that_fails_is_named(prompts, folder, tmp_path):
    printed = launch(
        2, prompts, tmp_path / "answers.jsonl", "--model", folder, "--generate", '{"no_such_option": 1}', fails=True
    )
    assert "of 2 (" in printed
    assert "failed: ValueError" in printed
    assert "no_such_option" in printed
    assert not (tmp_path / "answers.jsonl").exists()
