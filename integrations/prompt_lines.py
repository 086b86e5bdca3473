"""A file of prompts, one JSON object per line; lines that are none are told by their number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the file. `fields`: what it holds; `problem`: why it can't be answered, in words, else None."""

    number: int  # from 1, as editors count
    fields: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Every line that isn't empty, good or bad, in order. `digest`: of the whole file, to know it again."""

    path: Path
    lines: dict[int, PromptLine]  # by number
    digest: str

    @classmethod
    def read(cls, path: Path) -> PromptFile:
        """Raises OSError. A line takes {"prompt": text} or {"messages": [{"role": ..., "content": ...}]}, and more fields."""
        data = path.read_bytes()
        lines = {line.number: line for line in _parse(data)}
        return cls(path, lines, hashlib.sha256(data).hexdigest())

    @property
    def good(self) -> list[int]:
        """The numbers of the lines that can be answered."""
        return [number for number, line in self.lines.items() if not line.problem]

    @property
    def bad(self) -> list[PromptLine]:
        """The lines that can't be answered."""
        return [line for line in self.lines.values() if line.problem]


def _parse(data: bytes) -> Iterator[PromptLine]:
    for number, raw in enumerate(data.split(b"\n"), 1):
        if raw.strip():
            yield _line(number, raw)


def _line(number: int, raw: bytes) -> PromptLine:
    try:
        fields = json.loads(raw)
    except ValueError as error:  # of the decoder, of JSON or of UTF-8
        return PromptLine(number, {}, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return PromptLine(number, {}, f"takes a JSON object; got {type(fields).__name__}")
    return PromptLine(number, fields, _problem(fields))


def _problem(fields: dict[str, Any]) -> str | None:
    if ("prompt" in fields) == ("messages" in fields):
        return 'takes "prompt" or "messages"; got ' + ("both" if "prompt" in fields else "neither")
    if "prompt" in fields:
        prompt = fields["prompt"]
        return None if isinstance(prompt, str) and prompt else '"prompt" takes text that is not empty'
    messages = fields["messages"]
    good = (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    )
    return None if good else '"messages" takes a list of {"role": ..., "content": ...}'
