"""From messages to ids: templates with tools, roles and parts of their own, and what a template does not take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_cb.server.errors import ApiError
from hf_cb.server.prompts import Prompts
from hf_cb.server.protocol import ChatBody, CompletionBody

TEMPLATE = (
    "{% for tool in tools or [] %}<tool {{ tool.function.name }} {{ tool | tojson }}>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call {{ call.function.name }} {{ call.function.arguments.items() | list }}>"
    "{% endfor %}"
    "{% if m.tool_call_id %}<of {{ m.tool_call_id }}>{% endif %}"
    "{% if m.content == 'bad' %}{{ raise_exception('not this') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


LIMIT = 2000  # tokens


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = TEMPLATE
    return found


def text_of(tokenizer: Any, **body: Any) -> str:
    ids = Prompts(tokenizer).chat(ChatBody.model_validate({"model": "m", **body}), LIMIT)
    return str(tokenizer.decode(ids))


def test_a_conversation_with_tools(tokenizer: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}, "index": 0}
    text = text_of(
        tokenizer,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        tools=[TOOL],
        chat_template_kwargs={"mood": "calmly"},
    )
    assert text == (
        '<tool add {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": '
        "{\"type\": \"integer\"}}}}}><system>Be brief.<user ann>1 + 2?<assistant><call add [('a', 1), ('b', 2)]>"
        "<tool>3<of c1><assistant>calmly"
    )


def test_no_tools_if_none_are_to_be_chosen(tokenizer: Any) -> None:
    hello = [{"role": "user", "content": "a"}]
    assert text_of(tokenizer, messages=hello, tools=[TOOL], tool_choice="none") == "<user>a<assistant>"
    assert text_of(tokenizer, messages=hello, tools=[TOOL], tool_choice="auto").startswith("<tool add")


def test_a_developer_where_the_template_knows_one(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert text_of(other, messages=[{"role": "developer", "content": "a"}]) == "yes"


def test_the_same_ids_as_the_template_gives(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Ü 世界 <|im_end|>"}]
    want = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert Prompts(tokenizer).chat(ChatBody.model_validate({"model": "m", "messages": chat}), LIMIT) == want


HELLO = {"role": "user", "content": "a"}
BROKEN = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{**HELLO, "content": "bad"}], "messages"),
        ([HELLO, {"role": "assistant", "tool_calls": [BROKEN]}], "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_refusals(tokenizer: Any, messages: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        text_of(tokenizer, messages=messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_model_without_a_template(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    with pytest.raises(ApiError, match="/v1/completions") as caught:
        text_of(other, messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "no_template"


def test_a_text_that_is_too_long_for_sure_is_not_even_taken_apart(folder: Path) -> None:
    """A few megabytes would take seconds, in which nobody else's would be."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, longest = Prompts(tokenizer), max(map(len, tokenizer.get_vocab()))
    prompts._tokenizer = lambda text, **_: {"input_ids": [0]}
    body = CompletionBody(model="m", prompt="x" * (5 * longest))
    assert prompts.completion(body, 5) == [[0]]
    with pytest.raises(ApiError, match="at most 4 tokens") as caught:
        prompts.completion(body, 4)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    for text in (" " * 500, "=" * 300, "e\u0301" * 200, "世" * 100):
        assert len(text) <= longest * len(tokenizer(text)["input_ids"])
