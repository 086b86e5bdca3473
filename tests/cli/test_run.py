"""`hf-cb run`: a chat at a real terminal, in a pipe, and its parts."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat
from terminal import CTRL_C, Terminal, environment

from hf_cb.cli.conversation import Conversation, submit_options
from hf_cb.cli.main import main
from hf_cb.cli.run import _HARMLESS
from hf_cb.errors import InvalidArgumentError
from hf_cb.server.models import ServedModel, load_model

pytestmark = pytest.mark.timeout(20)

PROMPT = r"(\n|\x1b\[\?2004h)> "  # readline's sign that one may paste, where it gives it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def served(folder: Path) -> Iterator[ServedModel]:
    served = load_model(str(folder), device="cpu")
    yield served
    served.close()


@pytest.mark.timeout(120)  # a program that imports torch and transformers and loads a model
def test_ctrl_c_stops_the_answer_and_not_the_program(folder: Path) -> None:
    options = ("--max-new-tokens", "1500", "--temperature", "0")
    with Terminal("-m", "hf_cb.cli", "run", str(folder), *options) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press(b"Tell me a long story.\n")
        terminal.wait_for(r"story\.\r\n")  # the echo
        terminal.wait_for(r"\w")  # the answer has begun
        terminal.press(CTRL_C)
        terminal.wait_for(r"\(stopped\)")
        terminal.wait_for(PROMPT)
        terminal.press(b"/set max_new_tokens 3\n")
        terminal.wait_for(PROMPT)
        terminal.press(b"And now?\n")
        terminal.wait_for(r"[1-3] tokens: \d")
        terminal.wait_for(PROMPT)
        terminal.interrupt_the_prompt(r"Ctrl-C again leaves\.")
        terminal.wait_for(PROMPT)
        terminal.press(b"/help\n")  # whoever goes on has not said that they leave
        terminal.wait_for("/reset")
        terminal.wait_for(PROMPT)
        terminal.interrupt_the_prompt(PROMPT)
        status = None
        for _ in range(5):
            terminal.press(CTRL_C)
            with contextlib.suppress(AssertionError):
                status = terminal.wait_for_end(15)
                break
        assert status == 0
        assert "Traceback" not in terminal.shown


@pytest.mark.timeout(120)
def test_lines_from_a_pipe_are_turns(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_cb.cli", "run", str(folder), "--max-new-tokens", "4", "--temperature", "0"],
        input="Hello\n\n/nonsense\nAgain\n/exit\nnot this\n",
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=110,
    )
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("/")] == ["/nonsense: no such command; /help tells which there are"]
    assert len(said) >= 3
    assert "Ctrl-C" not in done.stdout  # that is for people


def test_one_question(folder: Path, capsys: pytest.CaptureFixture[str], served: ServedModel) -> None:
    arguments = ["--max-new-tokens", "6", "--temperature", "0", "--device", "cpu", "--system", "Be brief."]
    assert main(["run", str(folder), "Hello", *arguments]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    want = served.model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert capsys.readouterr().out == served.tokenizer.decode(want, skip_special_tokens=True).translate(_HARMLESS) + "\n"


def test_what_was_said_is_remembered_until_a_reset(served: ServedModel) -> None:
    conversation = Conversation(served, settings={"max_new_tokens": 4, "temperature": 0})

    def num_prompt_tokens() -> int:
        answer = conversation.ask("Hello")
        assert "".join(answer) == answer.text
        conversation.settle("Hello", answer.text)
        return answer._handle.result().num_prompt_tokens

    first, second = num_prompt_tokens(), num_prompt_tokens()
    assert second > first
    conversation.reset()
    assert num_prompt_tokens() == first


def test_a_question_without_an_answer_is_not_said(served: ServedModel) -> None:
    conversation = Conversation(served, settings={"max_new_tokens": 4, "temperature": 0})
    with pytest.raises(InvalidArgumentError):
        conversation.ask("word " * 5000)
    assert conversation._said == []


def test_whoever_stops_listening_frees_what_the_engine_holds(served: ServedModel) -> None:
    conversation = Conversation(served, settings={"max_new_tokens": 1500, "temperature": 0})
    answer = conversation.ask("Hello")
    pieces = iter(answer)
    next(pieces)
    pieces.close()
    answer._handle._queue.wait()
    assert len(answer._handle.tokens) < 1500


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": 3}, {"do_sample": True, "temperature": 0.5, "top_k": 3}),
        ({"temperature": 0.0, "top_k": 3, "max_new_tokens": 2}, {"do_sample": False, "max_new_tokens": 2}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
    ],
)
def test_settings(served: ServedModel, settings: dict[str, float], options: dict[str, object]) -> None:
    assert submit_options(settings) == options


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("colour", "1", "colour: no such setting"), ("top_k", "1.5", "takes an integer"), ("top_p", "", "takes a number")],
)
def test_settings_that_are_none(served: ServedModel, name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Conversation(served).set(name, value)


def test_errors_in_a_chat_are_a_line_and_the_chat_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"{'word ' * 5000}\n/set top_p 2\nHello\n/set top_p 0.9\nHello\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["run", str(folder), "--max-new-tokens", "3", "--temperature", "1", "--seed", "0", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("; /reset begins anew" in line for line in said)
    assert any(line.startswith("top_p: takes") for line in said)


def test_a_model_without_a_chat_template(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "base"
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (copy / file.name).write_bytes(file.read_bytes().replace(b'"chat_template"', b'"unused"'))
    assert main(["run", str(copy), "Hello", "--device", "cpu"]) == 1
    assert "base: has no chat template" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "a\x1b]0;title\x07b\x08\tc\nd\x9b".translate(_HARMLESS) == "a]0;titleb\tc\nd"
