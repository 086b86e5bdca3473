"""`hf-cb run`: a chat in the terminal. Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from hf_cb.cli.arguments import MODEL, Commands, add_command, add_loading, count, load, named_as_options
from hf_cb.cli.conversation import HELP, KINDS, Conversation, submit_options
from hf_cb.errors import EngineClosedError, EngineDeadError, HFCBError, InvalidArgumentError, RequestTooLongError

if TYPE_CHECKING:
    from rich.console import Console

_EXAMPLES = """\
  hf-cb run ~/models/SmolLM2-135M-Instruct
  hf-cb run ~/models/SmolLM2-135M-Instruct "Why is the sky blue?"       one answer, and out
  hf-cb run HuggingFaceTB/SmolLM2-1.7B-Instruct --system "Answer in one sentence." --temperature 0
  cat questions.txt | hf-cb run ~/models/SmolLM2-135M-Instruct          each line a turn of one chat
"""
_HELP = f"""\
/reset             forget what was said
/system [TEXT]     begin anew with another system prompt, or with none
/set NAME VALUE    for the next answers: {", ".join(KINDS)}
/help              this
/exit              leave; so do Ctrl-D, and Ctrl-C twice
Ctrl-C stops an answer. What came of it stays part of the chat."""
# A model's words must not move the cursor, ring the bell or set the title: no control characters but tab and newline.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def add_to(commands: Commands) -> None:
    """Make it one of the commands."""
    about = (
        "Chat with a model in this terminal. /help tells what can be typed; Ctrl-C stops an answer, twice at the prompt leaves."
    )
    parser = add_command(commands, "run", "chat with a model in this terminal", about, _EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="answer this, and leave")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", default=1024, help="the most tokens of an answer (default: 1024)"
    )
    for name, text in HELP.items():
        metavar = "N" if KINDS[name] is int else "X"
        parser.add_argument(f"--{name.replace('_', '-')}", type=KINDS[name], metavar=metavar, help=text)
    add_loading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and chat."""
    from rich.console import Console

    console = Console(highlight=False)
    settings = {name: getattr(args, name) for name in KINDS if getattr(args, name) is not None}
    with named_as_options():
        submit_options(settings)  # before the model is loaded
    served = load(args.model, args)
    try:
        conversation = Conversation(served, args.system, settings)
        if args.question is not None:
            return 0 if _answer(conversation, args.question, console) else 1
        return _Chat(conversation, console).run()
    finally:
        served.close()


class _Chat:
    """Turns at the prompt, until somebody leaves."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        """Returns the exit status."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited and recalled then
            self._say("/help tells what can be typed.")
        is_leaving = False
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if is_leaving:
                    self._say("")
                    return 0
                is_leaving = True
                self._say("\nCtrl-C again leaves.")
                continue
            is_leaving = False
            try:
                if line == "/exit":
                    return 0
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    _answer(self._conversation, line, self._console)
            except (EngineDeadError, EngineClosedError):
                raise
            except HFCBError as error:
                self._say(f"{error}{'; /reset begins anew' if isinstance(error, RequestTooLongError) else ''}")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self._conversation.reset()
        elif name == "/system":
            self._conversation.reset()
            self._conversation.system = rest or None
        elif name == "/set":
            self._conversation.set(*rest.partition(" ")[::2])
        elif name == "/help":
            self._say(_HELP)
        else:
            raise InvalidArgumentError(f"{name}: no such command; /help tells which there are")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _answer(conversation: Conversation, question: str, console: Console) -> bool:
    """Print the answer as it comes. False: it was stopped."""
    answer = None
    try:
        answer = conversation.ask(question)
        for piece in answer:
            console.out(piece.translate(_HARMLESS), end="", highlight=False)
        console.out("")
        if console.is_terminal:
            console.print(answer.figures(), style="dim", markup=False)
    except KeyboardInterrupt:
        if answer is not None:  # the interrupt may have come between two tokens
            answer.cancel()
            conversation.settle(question, answer.text)
        console.print("\n(stopped)", style="dim", markup=False)
        return False
    except HFCBError:
        if answer is not None and answer.text:
            console.out("")
        raise
    conversation.settle(question, answer.text)
    return True
