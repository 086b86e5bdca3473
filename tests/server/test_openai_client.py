"""The official client, sync and async, against a server on a socket: every option, and plain generate's own answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
import web

pytestmark = pytest.mark.timeout(60)

QUESTIONS = [f"Question {i}: {'why ' * (i % 5)}so?" for i in range(16)]


def chat_of(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def streamed(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """(texts, reasons, usage) of a chat's stream, by choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + choice.delta.content
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_models(server: web.Running) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [web.MODEL]
        assert client.models.retrieve(web.MODEL).owned_by == "hf_cb"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another/one")


def test_greedy_answers_are_plain_generates_alone_and_in_company(server: web.Running) -> None:
    want = [server.plain_text(chat_of(question), 24) for question in QUESTIONS]
    assert len(set(want)) > 8
    with server.client() as client:
        alone = [
            client.chat.completions.create(messages=chat_of(q), **web.GREEDY).choices[0].message.content for q in QUESTIONS
        ]
    assert alone == want

    async def ask(client: openai.AsyncOpenAI, question: str, is_streamed: bool) -> str:
        if not is_streamed:
            reply = await client.chat.completions.create(messages=chat_of(question), **web.GREEDY)
            return reply.choices[0].message.content or ""
        stream = await client.chat.completions.create(messages=chat_of(question), stream=True, **web.GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(**server.openai_options) as client:
            return await asyncio.gather(*(ask(client, q, i % 2 == 0) for i, q in enumerate(QUESTIONS)))

    assert asyncio.run(ask_all()) == want
    assert server.engine.stats().native_calls == {}


def test_completions_of_texts_and_of_token_ids(server: web.Running) -> None:
    texts = ["The sea is", "Once"]
    want = [server.plain_text(text, 24) for text in texts]
    ids = [server.models[0].tokenizer(text)["input_ids"] for text in texts]
    with server.client() as client:
        for prompt in (texts, ids):
            reply = client.completions.create(prompt=prompt, **web.GREEDY)
            assert [choice.text for choice in reply.choices] == want
            assert [choice.index for choice in reply.choices] == [0, 1]
            assert reply.usage.prompt_tokens == sum(map(len, ids))
        for prompt, text in zip((texts[0], ids[0]), (want[0], want[0]), strict=True):
            stream = client.completions.create(prompt=prompt, stream=True, **web.GREEDY)
            assert "".join(chunk.choices[0].text for chunk in stream) == text
        echoed = client.completions.create(prompt=texts, echo=True, **web.GREEDY)
        assert [choice.text for choice in echoed.choices] == [a + b for a, b in zip(texts, want, strict=True)]
        assert len(client.completions.create(prompt="a", model=web.MODEL, logprobs=0).choices[0].logprobs.tokens) == 16


def test_seeded_choices_are_plain_generates(server: web.Running) -> None:
    """And a stream has the same ones."""
    sampled = {"model": web.MODEL, "max_tokens": 16, "temperature": 1.5, "top_p": 0.9, "seed": 7, "n": 3}
    beyond = {"top_k": 40, "min_p": 0.001}
    want = []
    for seed in (7, 8, 9):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            options = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, **beyond}
            want.append(server.plain_text(web.HELLO, 16, **options))
    assert len(set(want)) == 3
    with server.client() as client:
        reply = client.chat.completions.create(messages=web.HELLO, extra_body=beyond, **sampled)
        assert [choice.message.content for choice in reply.choices] == want
        stream = client.chat.completions.create(messages=web.HELLO, extra_body=beyond, stream=True, **sampled)
        texts, reasons, usage = streamed(stream)
    assert [texts[i] for i in range(3)] == want
    assert set(reasons.values()) == {"length"}
    assert usage is None


def test_usage(server: web.Running) -> None:
    prompt = len(server.models[0].tokenizer.apply_chat_template(web.HELLO, add_generation_prompt=True)["input_ids"])
    with server.client() as client:
        call = {"messages": web.HELLO, "n": 2, **web.GREEDY, "max_tokens": 5}
        whole = client.chat.completions.create(**call).usage
        _, _, at_end = streamed(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **call))
    for usage in (whole, at_end):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 10, prompt + 10)
    assert at_end.prompt_tokens_details.cached_tokens == (prompt - 1) // 16 * 16


def test_an_end_token_stops_and_is_not_shown(server: web.Running) -> None:
    with server.client() as client:
        call = {"messages": web.HELLO, "logit_bias": {"2": 100}, **web.GREEDY}
        reply = client.chat.completions.create(**call)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "stop")
        assert reply.usage.completion_tokens == 1
        assert streamed(client.chat.completions.create(stream=True, **call))[:2] == ({0: ""}, {0: "stop"})
        later = client.chat.completions.create(extra_body={"min_tokens": 4}, **call)
        assert later.usage.completion_tokens == 5
        never = client.chat.completions.create(extra_body={"ignore_eos": True}, **call)
        assert (never.choices[0].finish_reason, never.usage.completion_tokens) == ("length", 24)


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_strings(server: web.Running, as_list: bool) -> None:
    whole = server.plain_text(web.HELLO, 24)
    stop = whole[len(whole) // 2 :][:5]  # across tokens
    place = whole.index(stop)
    with server.client() as client:
        call = {"messages": web.HELLO, "stop": ["\0never", stop] if as_list else stop, **web.GREEDY}
        reply = client.chat.completions.create(**call)
        stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **call)
        texts, reasons, usage = streamed(stream)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (whole[:place], "stop")
    assert (texts, reasons, usage.completion_tokens) == ({0: whole[:place]}, {0: "stop"}, reply.usage.completion_tokens)
    tokens = server.models[0].tokenizer(whole[: place + 5])["input_ids"]
    assert 0 < usage.completion_tokens <= len(tokens) + 2
    web.wait_until(lambda: server.engine.stats().running == 0)  # the rest was not computed for nobody


def test_penalties_and_biases_are_the_engines(server: web.Running) -> None:
    """Which are tested against a plain computation where they are made."""
    tokenizer = server.models[0].tokenizer
    ids = tokenizer("The sea is")["input_ids"]
    found = []
    with server.client() as client:
        for own in ({}, {"presence_penalty": 2.0}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}):
            options: dict[str, Any] = {**own, "logit_bias": {100: 11.0, 200: 10.0}}
            want = server.engine.submit(ids, max_new_tokens=24, do_sample=False, **options).result().tokens
            call = {"prompt": "The sea is", **web.GREEDY}
            got = client.completions.create(extra_body={**own, "logit_bias": {"100": 11.0, "200": 10.0}}, **call)
            assert got.choices[0].text == tokenizer.decode(want, skip_special_tokens=True)
            found.append(got.choices[0].text)
    assert len(set(found)) == 4


def test_chat_logprobs(server: web.Running) -> None:
    tokenizer = server.models[0].tokenizer
    ids = tokenizer.apply_chat_template(web.HELLO, add_generation_prompt=True)["input_ids"]
    want = server.engine.submit(ids, max_new_tokens=24, do_sample=False, logprobs=3).result()
    with server.client() as client:
        call = {"messages": web.HELLO, "logprobs": True, "top_logprobs": 3, **web.GREEDY}
        whole = client.chat.completions.create(**call).choices[0]
        stream = client.chat.completions.create(stream=True, **call)
        parts = [choice for chunk in stream for choice in chunk.choices]
    in_parts = [token for part in parts if part.logprobs for token in part.logprobs.content or ()]
    assert [got.token for got in in_parts] == [got.token for got in whole.logprobs.content]
    assert len(in_parts) == len(want.tokens)
    for got, token, logprobs in zip(in_parts, want.tokens, want.logprobs, strict=True):
        assert got.logprob == pytest.approx(logprobs.logprob, abs=1e-4)
        for shown, own in zip((got, *got.top_logprobs), (token, *logprobs.top_ids), strict=True):
            assert bytes(shown.bytes or ()).decode(errors="replace") == tokenizer.decode([own])
            assert (
                shown.token.startswith("bytes:")
                if "\ufffd" in tokenizer.decode([own])
                else shown.token == tokenizer.decode([own])
            )
    assert b"".join(bytes(got.bytes or ()) for got in in_parts).decode(errors="replace") == whole.message.content


def test_completion_logprobs_with_the_prompts(server: web.Running) -> None:
    tokenizer, prompt = server.models[0].tokenizer, "Ünder the sea"
    ids = tokenizer(prompt)["input_ids"]
    want = server.engine.submit(ids, max_new_tokens=8, do_sample=False, logprobs=2, prompt_logprobs=2).result()
    with server.client() as client:
        call = {"prompt": prompt, "logprobs": 2, **web.GREEDY, "max_tokens": 8}
        echoed = client.completions.create(echo=True, **call).choices[0]
        alone = client.completions.create(**call).choices[0]
        parts = [chunk.choices[0] for chunk in client.completions.create(stream=True, **call)]
    assert echoed.logprobs.token_logprobs[0] is None
    for found, logprobs in zip(echoed.logprobs.token_logprobs[1:], [*want.prompt_logprobs[1:], *want.logprobs], strict=True):
        assert found == pytest.approx(logprobs.logprob, abs=1e-4)
    offsets = echoed.logprobs.text_offset
    pieces = [echoed.text[a:b] for a, b in zip(offsets, [*offsets[1:], len(echoed.text)], strict=True)]
    assert "".join(pieces) == echoed.text
    assert pieces[-8:] == echoed.logprobs.tokens[-8:]
    assert alone.logprobs.tokens == echoed.logprobs.tokens[-8:]
    assert alone.logprobs.text_offset == [offset - len(prompt) for offset in offsets[-8:]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
        assert joined == [pytest.approx(value, abs=1e-4) for value in getattr(alone.logprobs, name)]


def test_an_echo_of_tokens_that_have_no_text(server: web.Running) -> None:
    """They have probabilities all the same, for each of the choices."""
    call: dict[str, Any] = {**web.GREEDY, "prompt": [1, 2, 1], "max_tokens": 2, "n": 2, "logprobs": 0}
    with server.client() as client:
        choices = client.completions.create(echo=True, extra_body={"ignore_eos": True}, **call).choices
    for choice in choices:
        assert [found is None for found in choice.logprobs.token_logprobs] == [True] + [False] * 4
        assert choice.logprobs.text_offset == [0, 0, 0, 0, len(choice.logprobs.tokens[3])]


def test_no_broken_characters_in_a_stream(server: web.Running) -> None:
    """Hot enough for tokens that are parts of characters: what is broken in the whole is in the stream, and nothing else."""
    call = {"messages": web.HELLO, "model": web.MODEL, "temperature": 2.0, "max_tokens": 200, "n": 4, "seed": 1}
    beyond = {"extra_body": {"ignore_eos": True}, "logit_bias": {str(token): 6.0 for token in range(17, 273)}}
    with server.client() as client:
        whole = client.chat.completions.create(**call, **beyond)
        texts, _, _ = streamed(client.chat.completions.create(stream=True, **call, **beyond))
    assert [texts[i] for i in range(4)] == [choice.message.content for choice in whole.choices]
    assert "\ufffd" in texts[0]


def test_several_models(folder: Any) -> None:
    with web.running(web.tiny(folder), web.tiny(folder, "org/other", num_blocks=8)) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == [web.MODEL, "org/other"]
        assert client.models.retrieve("org/other").id == "org/other"
        call = {"messages": web.HELLO, **web.GREEDY, "max_tokens": 4}
        for name in (web.MODEL, "org/other"):
            reply = client.chat.completions.create(**{**call, "model": name})
            assert (reply.model, reply.choices[0].message.content) == (name, server.plain_text(web.HELLO, 4))
        assert [model.engine.stats().output_tokens for model in server.models] == [4, 4]
