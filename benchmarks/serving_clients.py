"""openai clients that ask a server, each with a connection of its own, and what they were answered."""

from __future__ import annotations

import asyncio
import contextlib
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


async def stream_all(url: str, model: str, asks: Sequence[Ask]) -> list[Answer]:
    """All at once, each by a client of its own."""
    async with clients(url, len(asks)) as made:
        return await asyncio.gather(*(stream(client, model, ask) for client, ask in zip(made, asks, strict=True)))
