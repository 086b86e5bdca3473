"""openai clients that ask a server, each with a connection of its own, and what they were answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import openai

_QUESTIONS = (
    "Write a few words about the number {number} and where people meet it.",
    "Tell a very short story in which somebody counts to {number}.",
    "List three things that a shop could sell {number} of in a day.",
    "Explain to a child how far away {number} metres are.",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question. Its number is in it, so that no two have the same answer by right."""

    number: int
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": _QUESTIONS[self.number % len(_QUESTIONS)].format(number=1000 + self.number)}]


@dataclass(frozen=True, slots=True)
class Answer:
    """`times`: of sending, of each piece, of the end, on `time.perf_counter()`'s clock. `error`: its type and message."""

    ask: Ask
    text: str
    finish_reason: str | None
    completion_tokens: int
    times: tuple[float, ...]
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        return self.times[1] - self.times[0]


@contextlib.asynccontextmanager
async def clients(url: str, count: int) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """So many, none of which tries anything again by itself."""
    made = [
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=600,
            http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False),
        )
        for _ in range(count)
    ]
    try:
        yield made
    finally:
        await asyncio.gather(*(client.close() for client in made))


async def stream(client: openai.AsyncOpenAI, model: str, ask: Ask, begun: asyncio.Event | None = None) -> Answer:
    """Its answer, piece by piece. `begun` is set at the first piece. An error is in the answer, not raised."""
    times, pieces, reason, tokens = [time.perf_counter()], [], None, 0
    error = None
    try:
        chunks = await client.chat.completions.create(
            model=model,
            messages=ask.messages,  # type: ignore[arg-type]
            max_tokens=ask.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    pieces.append(choice.delta.content)
                    times.append(time.perf_counter())
                    if begun is not None:
                        begun.set()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Answer(ask, "".join(pieces), reason, tokens, (*times, time.perf_counter()), error)


async def read_all(url: str, model: str, asks: Sequence[Ask]) -> tuple[float, list[Answer]]:
    """The seconds that it took to stream all answers at once, and the answers. The events are only read meanwhile, so that the
    time is the server's and not the client's."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    pipes = [await asyncio.open_connection(host, int(port), limit=1 << 20) for _ in asks]
    started = time.perf_counter()
    read = await asyncio.gather(*(_read(*pipe, model, ask) for pipe, ask in zip(pipes, asks, strict=True)))
    seconds = time.perf_counter() - started
    return seconds, [_parse(ask, *found) for ask, found in zip(asks, read, strict=True)]


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, ask: Ask
) -> tuple[list[bytes], tuple[float, ...]]:
    """(lines, times) of a stream."""
    options = {"max_tokens": ask.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": model, "messages": ask.messages, **options}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: benchmark\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    times, lines = [time.perf_counter()], []
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: "):
            lines.append(line)
            times.append(time.perf_counter())
    writer.close()
    await writer.wait_closed()
    return lines, (*times, time.perf_counter())


def _parse(ask: Ask, lines: Sequence[bytes], times: tuple[float, ...]) -> Answer:
    if not lines or lines[-1].strip() != b"data: [DONE]":
        return Answer(ask, "", None, 0, times, "the stream did not come to its end")
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Answer(ask, text, choices[-1]["finish_reason"], chunks[-1]["usage"]["completion_tokens"], times)
