"""What is refused: with the right status, in OpenAI's shape, and with the name of the field."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
import web

from hf_cb.errors import InvalidArgumentError
from hf_cb.server.protocol import ChatBody, CompletionBody
from hf_cb.server.settings import ServerSettings

pytestmark = pytest.mark.timeout(60)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"top_p": -0.1}, "top_p"),
    (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"logit_bias": {"five": 1}}, "logit_bias.five"),
    (CHAT, {"logit_bias": {"4000000000": 1}}, "logit_bias"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"seed": -1}, "seed"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 5000}, "max_tokens"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"stream": True, "stream_options": {"strict": True}}, "stream_options.strict"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type"),
    (CHAT, {"tools": [TOOL]}, "tools"),  # the packaged template has no place for them
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"Functions": []}, "Functions"),  # which is not the name of a type
    (CHAT, {"messages": [{"role": "user", "content": "a", "nullable": 1}]}, "messages[0].nullable"),
    (CHAT, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": IMAGE}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"model": 5}, "model"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt[1]"),
    (COMPLETION, {"prompt": [1, -1]}, "prompt[1]"),
    (COMPLETION, {"prompt": [49152]}, "prompt"),
    (COMPLETION, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETION, {"prompt": ["a"] * 65}, "prompt"),
    (COMPLETION, {"prompt": [5] * 2048}, "prompt"),
    (COMPLETION, {"prompt": [5] * 2000, "max_tokens": 49}, "max_tokens"),
    (COMPLETION, {"suffix": "end"}, "suffix"),
    (COMPLETION, {"best_of": 3}, "best_of"),
    (COMPLETION, {"echo": True, "stream": True, "logprobs": 1}, "echo"),
    (COMPLETION, {"logprobs": True}, "logprobs"),
    (COMPLETION, {"tools": []}, "tools"),
]


def body_of(path: str, own: dict[str, Any]) -> dict[str, Any]:
    basis: dict[str, Any] = {"messages": web.HELLO} if path == CHAT else {"prompt": "a"}
    return {"model": web.MODEL, "max_tokens": 2, **basis, **own}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("path", "own", "param"), FIELDS, ids=[f"{i} {param}" for i, (_, _, param) in enumerate(FIELDS)])
def test_a_wrong_field_is_named(server: web.Running, path: str, own: dict[str, Any], param: str) -> None:
    error = error_of(server.post(path, json=body_of(path, own)), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"
    assert server.engine.stats().running == server.engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (CHAT, {"messages": [{}] * 1000}),
        (CHAT, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (CHAT, {f"field{i}": i for i in range(1000)}),
        (CHAT, {"metadata": dict.fromkeys(map(str, range(1000)), 1)}),
        (CHAT, {"logit_bias": dict.fromkeys(map(str, range(5000)), "a")}),
        (COMPLETION, {"prompt": [1.5] * 1000}),
        (COMPLETION, {"prompt": [[1.5] * 1000] * 1000}),
    ],
)
def test_one_mistake_is_enough(path: str, own: dict[str, Any]) -> None:
    """Nobody else is served while mistakes are told of: there are never more than a few, however long a body is."""
    with pytest.raises(pydantic.ValidationError) as caught:
        (ChatBody if path == CHAT else CompletionBody).model_validate(body_of(path, own))
    assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *(("x-priority", value) for value in ("high", "1.5")),
        *(("x-request-timeout", value) for value in ("-1", "0")),
        ("x-tenant", "a b"),
    ],
)
def test_a_wrong_header_is_named(server: web.Running, header: str, value: str) -> None:
    error = error_of(server.post(CHAT, json=body_of(CHAT, {}), headers={header: value}), 400)
    assert error["param"] == header


def test_what_is_not_here(server: web.Running) -> None:
    error = error_of(server.post(CHAT, json=body_of(CHAT, {"model": "gpt-4"})), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(server.post("/v1/embeddings", json={}), 404)
    error_of(httpx.get(f"{server.url}{CHAT}"), 405)
    error_of(httpx.get(f"{server.url}/metrics"), 404)


def test_a_path_makes_no_lines_of_its_own_in_a_log(server: web.Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_cb.server")
    error_of(httpx.get(f"{server.url}/a%0aINFO%20all%20is%20well%1b[2J"), 404)
    web.wait_until(lambda: any("well" in record.getMessage() for record in caplog.records))  # the line comes after the answer
    (line,) = [record.getMessage() for record in caplog.records if "well" in record.getMessage()]
    assert line.isprintable()


def test_a_timeout_of_its_own(server: web.Running) -> None:
    with server.engine.pause():
        for stream in (False, True):  # a stream that has not begun has a status of its own
            response = server.post(CHAT, json=body_of(CHAT, {"stream": stream}), headers={"x-request-timeout": "0.05"})
            assert error_of(response, 504)["code"] == "timeout"
            assert response.headers["x-should-retry"] == "false"


def test_request_ids(server: web.Running) -> None:
    for given, is_taken in (("my-id.1", True), ("no id", False), ("x" * 129, False)):
        response = server.post(CHAT, json=body_of(CHAT, {}), headers={"x-request-id": given})
        assert response.status_code == 200
        assert (response.headers["x-request-id"] == given) == is_taken
        assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[web.Running]:
    """Keys and small limits."""
    model = web.tiny(folder, max_queue_size=1, max_batch_size=1)
    limits = {"max_body_bytes": 2000, "max_n": 2, "max_prompts": 2, "max_prompt_tokens": 40, "max_new_tokens": 8}
    metrics = lambda: (b"up 1\n", "text/plain; version=0.0.4")  # noqa: E731
    with web.running(model, api_keys=("first", "second"), metrics=metrics, **limits) as running:
        yield running


KEY = {"authorization": "Bearer second"}


def test_keys(strict: web.Running) -> None:
    for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "second"}, {"authorization": "Basic second"}):
        for path in (CHAT, "/metrics", "/openapi.json", "/nowhere"):
            response = strict.post(path, json=body_of(CHAT, {}), headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(f"{strict.url}{path}").json() == {"status": "ok"}
    metrics = httpx.get(f"{strict.url}/metrics", headers=KEY)
    assert (metrics.text, metrics.headers["content-type"]) == ("up 1\n", "text/plain; version=0.0.4; charset=utf-8")
    with strict.client(api_key="first") as client:
        assert client.chat.completions.create(model=web.MODEL, messages=web.HELLO, max_tokens=2).choices
    with strict.client(api_key="third") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    ("path", "own", "param"),
    [
        (CHAT, {"n": 3}, "n"),
        (CHAT, {"max_tokens": 9}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 50}]}, "messages"),
        (COMPLETION, {"prompt": ["a", "b", "c"]}, "prompt"),
        (COMPLETION, {"prompt": [5] * 41}, "prompt"),
    ],
)
def test_limits(strict: web.Running, path: str, own: dict[str, Any], param: str) -> None:
    assert error_of(strict.post(path, json=body_of(path, own), headers=KEY), 400)["param"] == param


def test_without_a_number_of_tokens_the_limit_counts(strict: web.Running) -> None:
    body = {"model": web.MODEL, "messages": web.HELLO, "ignore_eos": True}
    usage = strict.post(CHAT, json=body, headers=KEY).json()["usage"]
    assert usage["completion_tokens"] == 8


def test_a_full_queue(strict: web.Running) -> None:
    """One runs or is about to, one waits: the next is told to come later."""
    with strict.engine.pause():
        handles = [strict.engine.submit([3, 4], max_new_tokens=4) for _ in range(2)]
        for stream in (False, True):
            response = strict.post(CHAT, json=body_of(CHAT, {"stream": stream}), headers=KEY)
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
        with strict.client(api_key="first") as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=web.MODEL, prompt="a")
    assert [len(handle.result().tokens) for handle in handles] == [4, 4]


def test_settings() -> None:
    wrong: dict[str, list[Any]] = {
        "port": [-1, 70000],
        "api_keys": ["key", ("",), ("ü",), (" k",)],
        "max_n": [0],
        "max_timeout": [0.0],
        "drain_timeout": [float("inf")],
        "read_timeout": [-1.0],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(InvalidArgumentError, match=f"^{name}:"):
            ServerSettings(**{name: value})
    for host in ("127.0.0.1", "localhost", "::1"):
        ServerSettings(host).check_bind()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        ServerSettings(host, api_keys=("key",)).check_bind()
        ServerSettings(host, allow_without_keys=True).check_bind()
        with pytest.raises(InvalidArgumentError, match=r"^host:"):
            ServerSettings(host).check_bind()
