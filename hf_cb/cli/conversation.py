"""Conversation: what was said in a chat, and how the next answer is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_cb.errors import InvalidArgumentError
from hf_cb.handle import GenerationHandle
from hf_cb.options import Defaults, make_request
from hf_cb.sampling_options import SAMPLING
from hf_cb.text import stream_text

if TYPE_CHECKING:
    from hf_cb.server.models import ServedModel

_TYPED = [option for option in SAMPLING if option.kind in (int, float)]
KINDS: dict[str, type] = {"max_new_tokens": int, "seed": int, **{option.name: option.kind for option in _TYPED}}
"""What can be set of an answer: options of `Engine.submit`; a temperature of 0 takes the most probable token each time."""
HELP = {option.name: f"{option.help} Takes {option.takes}. Default: the model's own." for option in _TYPED} | {
    "temperature": "Divides the logits: below 1, probable tokens become more probable; 0 takes the most probable token each "
    "time. Default: the model's own.",
    "seed": "Draws the tokens of every answer from this seed. Default: another one for each answer.",
}
"""What they do, but for `max_new_tokens`."""


class Conversation:
    """A chat with one model. Not for several threads."""

    def __init__(self, served: ServedModel, system: str | None = None, settings: Mapping[str, float] | None = None) -> None:
        """Raises InvalidArgumentError for a model that has no chat template."""
        if not served.tokenizer.chat_template:
            raise InvalidArgumentError(f"{served.name}: has no chat template; run takes a model that is made for chats")
        self.system = system
        self.settings: dict[str, float] = dict(settings or {})
        self._served = served
        self._said: list[dict[str, str]] = []

    def ask(self, question: str) -> Answer:
        """Put a question. It counts as said once its answer has `settle`d."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self._said, {"role": "user", "content": question}]
        try:
            encoded = self._served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program of the model's, and refuses in ways of its own
            raise InvalidArgumentError(f"the model's chat template does not take this conversation: {error}") from error
        handle = self._served.engine.submit(encoded["input_ids"], **submit_options(self.settings))
        return Answer(handle, self._served.tokenizer)

    def settle(self, question: str, answer: str) -> None:
        """Remember what was said."""
        self._said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget what was said; the system prompt and the settings stay."""
        self._said.clear()

    def set(self, name: str, text: str) -> None:
        """Set one of `KINDS`. Raises InvalidArgumentError."""
        if name not in KINDS:
            raise InvalidArgumentError(f"{name}: no such setting; there are {', '.join(KINDS)}")
        try:
            settings = {**self.settings, name: KINDS[name](text)}
        except ValueError:
            kind = "an integer" if KINDS[name] is int else "a number"
            raise InvalidArgumentError(f"{name}: takes {kind}; got {text!r}") from None
        submit_options(settings)
        self.settings = settings


_DRAWING = {"seed", *(option.name for option in SAMPLING if option.draws)}


def submit_options(settings: Mapping[str, float]) -> dict[str, Any]:
    """What `Engine.submit` is given for these of `KINDS`. Raises InvalidArgumentError for a value that it does not take."""
    temperature = settings.get("temperature")
    if temperature is None:
        options: dict[str, Any] = dict(settings)
    elif temperature == 0:
        options = {"do_sample": False, **{name: value for name, value in settings.items() if name not in _DRAWING}}
    else:
        options = {"do_sample": True, **settings}
    make_request((0,), options, Defaults(), lambda: 0)
    return options


class Answer:
    """An answer that is coming: iterate it for pieces of its text. `text`: what has come."""

    def __init__(self, handle: GenerationHandle, tokenizer: Any) -> None:
        self.text = ""
        self._handle = handle
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[str]:
        try:
            for piece in stream_text(self._handle, self._tokenizer):
                self.text += piece
                yield piece
        finally:
            self._handle.cancel()  # whoever stops listening frees what the engine holds for it

    def cancel(self) -> None:
        """Stop it. One that has ended stays as it is."""
        self._handle.cancel()

    def figures(self) -> str:
        """How long it was and took, of one that has ended."""
        result = self._handle.result()
        first, after = result.first_token_at - result.submitted_at, result.finished_at - result.first_token_at
        rate = f", then {(len(result.tokens) - 1) / after:.1f} tokens/s" if len(result.tokens) > 1 and after > 0 else ""
        return f"{len(result.tokens)} tokens: {first:.2f} s to the first{rate}"
