"""What clients may send: OpenAI's request bodies, and the fields that other servers of open models have added to them.

A field that is not here is refused by name: nothing is left out silently but what `Common` says is ignored.
Source: https://platform.openai.com/docs/api-reference/chat and /completions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from hf_cb.sampling_options import SAMPLING, BodyField, Option

_MAX_STOPS = 16
_MAX_SEED = (1 << 62) - 1  # the seeds of further choices follow
_MAX_BIASES = 1 << 12
_MAX_METADATA = 16  # OpenAI's

Text = Annotated[str, Field(max_length=1 << 24)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""As all lists here, it is refused for the first part that is wrong: telling of each would hold up the event loop."""


def _at_most(limit: int) -> BeforeValidator:
    """A mapping's limit: pydantic's own counts when all entries, and their mistakes, have been looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "takes at most {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A JSON object whose fields are all known, and of the very type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_one_unknown(cls, value: Any) -> Any:
        """Of a crowd of unknown fields one is enough to be refused for."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: part for name, part in value.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Body):
    """Options that only a stream has."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _type_of(option: Option, field: BodyField) -> Any:
    least = Field(gt=field.least) if field.above else Field(ge=field.least)
    return Annotated[option.kind, least, Field(le=field.most)] | None


SAMPLING_FIELDS: dict[str, str] = {option.name: option.field.name for option in SAMPLING if option.field is not None}
"""Options of `Engine.submit` -> the fields that they come from, under OpenAI's names or vLLM's."""

if TYPE_CHECKING:

    class SamplingFields(Body):
        """What the table of sampling options has for bodies; these two are met by name."""

        temperature: float | None
        top_k: int | None
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{option.field.name: (_type_of(option, option.field), None) for option in SAMPLING if option.field is not None},
    )


class Common(SamplingFields):
    """Both endpoints' fields. `user`, `metadata`, `safety_identifier` and `prompt_cache_key` are taken and ignored."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=_MAX_BIASES), _at_most(_MAX_BIASES)] | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA), _at_most(_MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Beyond OpenAI's, under the names that vLLM has for them:
    ignore_eos: bool | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: takes options only when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with what it used."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Body):
    """A part of a message: text is all that this server takes."""

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    """A function that was called. `arguments`: JSON."""

    name: str
    arguments: Text


class ToolCall(Body):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # some clients send back what a stream gave them


class Message(Body):
    """One turn. The last four fields are what an answer's message may have, always null here."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: takes a string or a list of text parts")
        return self


class Function(Body):
    """A function that the model may call. `parameters`: its JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """What the chat template is told of."""

    type: Literal["function"]
    function: Function


class TextFormat(Body):
    """The only form of answers there is."""

    type: Literal["text"]


class ChatBody(Common):
    """POST /v1/chat/completions."""

    default_new_tokens: ClassVar[int | None] = None  # as many as there is room for
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    store: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # more variables for the template, such as {"enable_thinking": false}

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: takes a number only when logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                "max_tokens: takes what max_completion_tokens says, or null; max_completion_tokens has taken its place"
            )
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of an answer, under whichever name it came."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens to report beside each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Common):
    """POST /v1/completions. `prompt`: a text, several, one's token ids, or several's."""

    default_new_tokens: ClassVar[int | None] = 16  # OpenAI's
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: takes what n says, or null")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo: takes no logprobs in a stream")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens to report beside each; None: no log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        several: Any = self.prompt
        if isinstance(several, str) or isinstance(several[0], int):
            return [several]
        return list(several)
