"""The sampling options: one table, from which requests, defaults, the command line, the server and the docs are made.

To add an option, add a row here, its field to `SamplingParams`, what it does to `runtime/warpers.py`, and the processor of
transformers that means the same to `hf/calls/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_cb.errors import InvalidArgumentError
from hf_cb.request import SamplingParams
from hf_cb.values import ids_of, is_finite, is_int, is_number


@dataclass(frozen=True, slots=True)
class BodyField:
    """A number in a body that clients send: the name that they use, and the range that it may have there."""

    name: str
    least: float
    most: float
    above: bool = False  # whether `least` itself is too little


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `off`: the value with which it does nothing, the field's default. `takes`: what it takes, in words."""

    name: str
    kind: type  # bool, int, float, or tuple, which no shell has a form for
    off: Any
    takes: str
    help: str
    is_valid: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any], Any] | None = None  # where `kind` does not do; raises InvalidArgumentError itself
    draws: bool = False  # whether it means nothing where the most probable token is taken
    in_config: bool = True  # whether transformers' generation config has it
    unset: Any = None  # its value where a generation config says nothing, if that is not `off`
    field: BodyField | None = None

    def checked(self, value: Any) -> Any:
        """The value in plain Python types. Raises InvalidArgumentError, naming the option."""
        if self.convert is not None:
            return self.convert(value)
        if not self.is_valid(value):
            raise InvalidArgumentError(f"{self.name}: takes {self.takes}; got {value!r}")
        return self.kind(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """What a mapping from token id to bias says, or pairs of them, by id."""
    try:
        pairs = dict(value)
    except (TypeError, ValueError):
        pairs = {None: None}
    if not all(is_int(token) and token >= 0 and is_finite(bias) for token, bias in pairs.items()):
        raise InvalidArgumentError(f"logit_bias: takes a mapping from token ids to finite numbers; got {value!r}")
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs.items()))


def _penalty(name: str, text: str) -> Option:
    field = BodyField(name, -2, 2)
    return Option(name, float, 0.0, "a finite number (0: off)", text, is_finite, in_config=False, field=field)


def _suppressed(name: str, text: str) -> Option:
    return Option(name, tuple, (), "token ids", text, convert=lambda value: tuple(sorted(ids_of(name, value))))


def _share(name: str, off: int, text: str) -> Option:
    def is_valid(value: Any) -> bool:
        return is_number(value) and 0 <= value <= 1

    takes = f"a number from 0 to 1 ({off}: off)"
    return Option(name, float, float(off), takes, text, is_valid, draws=True, field=BodyField(name, 0, 1))


_COUNT = 2**31 - 1

SAMPLING: tuple[Option, ...] = (  # in the order in which they are applied, which is transformers' own
    Option(
        "logit_bias",
        tuple,
        (),
        "a mapping from token ids to finite numbers",
        "Adds to the logits of these tokens.",
        convert=_biases,
        in_config=False,
    ),
    Option(
        "repetition_penalty",
        float,
        1.0,
        "a finite number > 0 (1: off)",
        "Makes tokens of the prompt and the output less likely to come again (Keskar et al., 2019).",
        lambda v: is_finite(v) and v > 0,
        field=BodyField("repetition_penalty", 0, 10, above=True),
    ),
    _penalty("frequency_penalty", "Takes this off a token's logit for each time that it is in the output (OpenAI's API)."),
    _penalty("presence_penalty", "Takes this off a token's logit once it is in the output (OpenAI's API)."),
    Option(
        "min_new_tokens",
        int,
        0,
        "an integer >= 0",
        "Lets no end-of-sequence token come before so many tokens.",
        lambda v: is_int(v) and v >= 0,
        field=BodyField("min_tokens", 0, _COUNT),
    ),
    _suppressed("suppress_tokens", "These tokens never come."),
    _suppressed("begin_suppress_tokens", "These tokens don't come first."),
    Option(
        "do_sample",
        bool,
        False,
        "True or False",
        "Draws tokens by their probabilities, rather than take the most probable one.",
        lambda v: isinstance(v, bool),
    ),
    Option(
        "temperature",
        float,
        1.0,
        "a finite number > 0",
        "Divides the logits: below 1, probable tokens become more probable.",
        lambda v: is_finite(v) and v > 0,
        draws=True,
        field=BodyField("temperature", 0, 2),
    ),
    Option(
        "top_k",
        int,
        0,
        "an integer >= 0 (0: off)",
        "Draws from so many of the most probable tokens alone.",
        lambda v: is_int(v) and v >= 0,
        draws=True,
        unset=50,
        field=BodyField("top_k", -1, _COUNT),
    ),
    _share("top_p", 1, "Draws from the most probable tokens that have this probability together (Holtzman et al., 2020)."),
    _share(
        "min_p", 0, "Draws from tokens with at least this share of the most probable one's probability (Nguyen et al., 2024)."
    ),
)


def check_sampling(params: SamplingParams) -> SamplingParams:
    """The same in plain Python types, all but the seed. Raises InvalidArgumentError, naming the field.

    Whatever becomes a Request has been here: the engine's thread meets no value that it can't compute with.
    """
    checked = {option.name: option.checked(getattr(params, option.name)) for option in SAMPLING}
    return SamplingParams(**checked, seed=params.seed)


def params_of_config(config: Any) -> SamplingParams:
    """What a model's generation config says of sampling; unchecked."""
    found = {option: getattr(config, option.name, None) for option in SAMPLING if option.in_config}
    return SamplingParams(
        **{
            option.name: value if value is not None else option.off if option.unset is None else option.unset
            for option, value in found.items()
        }
    )


def markdown() -> str:
    """The options as a table for the docs."""
    lines = ["| option | takes | what it does |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{option.name}` | {option.takes} | {option.help} |" for option in SAMPLING)])
