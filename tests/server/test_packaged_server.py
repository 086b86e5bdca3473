"""The packaged chat model behind the server, as docs/server.md has it: its commands' bodies, and plain generate's answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import web

from demo import packaged_model
from demo.prompts import QUESTIONS

pytestmark = pytest.mark.timeout(300)  # a cold cache prepares the model first

PAGE = (Path(__file__).parents[2] / "docs/server.md").read_text()
NEW = 6


@pytest.fixture(scope="module")
def server() -> Iterator[web.Running]:
    with web.running(web.tiny(packaged_model.prepare(), "smollm")) as running:
        yield running


def test_the_readmes_request(server: web.Running) -> None:
    (body,) = re.findall(r"curl http://127.0.0.1:8000(/\S+) .*\n *-d '(.*)'\n", PAGE)
    path, content = body
    reply = server.post(path, json=json.loads(content)).json()
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_readmes_program(server: web.Running, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(from openai[^`]*)```", PAGE)
    names: dict[str, Any] = {}
    exec(compile(program.replace("http://127.0.0.1:8000", server.url), "README.md", "exec"), names)
    names["client"].close()
    assert "Paris" in capsys.readouterr().out


def test_sixteen_at_once_have_plain_generates_answers(server: web.Running) -> None:
    chats: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS[:16]]
    want = [server.plain_text(chat, NEW) for chat in chats]

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(**server.openai_options) as client:
            call = {"model": "smollm", "temperature": 0, "max_tokens": NEW}
            replies = [client.chat.completions.create(messages=chat, **call) for chat in chats]
            return [reply.choices[0].message.content for reply in await asyncio.gather(*replies)]

    assert asyncio.run(ask_all()) == want
