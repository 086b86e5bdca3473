"""Answers on disk while a run goes on: what survives a kill, and what the ordered output is made from.

Every process appends to a part file of its own, a line per answer, written before the answer counts. A run that begins looks at
the parts of the runs before it: what is there whole is done. So whoever dies, at whatever moment, loses only what it was at.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_PATIENCE = 20.0  # seconds in which processes of a killed run, whose launcher is gone, find that out and end


class LogError(Exception):
    """The run can't begin. The message says why and what to do."""


class AnswerLog:
    """The parts of one output file, in the folder `<output>.parts` beside it. All processes must see that folder.

    Leaving its with block lets other runs have the folder.
    Methods are for the main process, except `open_part`.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")
        self._lock: IO[bytes] | None = None

    def begin(self, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Take the folder for this run, and return the answers that are in it already, by line number.

        Raises LogError if the output is there already, if another run is at it, or if it was begun with other settings.
        """
        self._lock = self._take_folder()
        shutil.rmtree(self._old, ignore_errors=True)
        for part in self._parts():
            _lock(part).close()
        self._check_settings(settings)
        return self.answers()

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def answers(self) -> dict[int, dict[str, Any]]:
        """All whole answers in the parts, by line number."""
        return {record["line"]: record for part in self._parts() for record in _records(part)}

    def open_part(self, name: str) -> IO[bytes]:
        """A part that only this process writes to, until it ends. `name`: unique among the processes of all runs."""
        part = open(self.folder / f"part-{name}.jsonl", "xb", buffering=0)  # noqa: SIM115 - the caller closes it
        fcntl.flock(part, fcntl.LOCK_EX)
        return part

    def finish(self, order: Iterable[int], failed: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Write the output: an answer, or what `failed` has, for each number in `order`. Returns it; the parts go."""
        answers = failed | self.answers()
        scratch = self.folder / "output"
        with open(scratch, "w", encoding="utf-8") as lines:
            for number in order:
                lines.write(json.dumps(answers[number], ensure_ascii=False) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        scratch.replace(self.output)
        self.folder.rename(self._old)  # at once: a kill among the removals must not leave half of the parts
        shutil.rmtree(self._old, ignore_errors=True)
        return answers

    def _take_folder(self) -> IO[bytes]:
        """The folder's lock, held. The run that held it before may have finished meanwhile, and the folder be gone."""
        while True:
            if self.output.exists() and not self.folder.exists():
                raise LogError(f"{self.output} is there already, and whole: remove it to generate it again")
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = _lock(self.folder / "lock")
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock.fileno()), os.stat(self.folder / "lock")):
                        return lock
                lock.close()

    @property
    def _old(self) -> Path:
        return self.folder.with_name(self.folder.name + ".old")

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.jsonl"))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            scratch = path.with_suffix(".new")
            scratch.write_text(json.dumps(settings))
            scratch.replace(path)
            return
        before = json.loads(path.read_text())
        for name in before.keys() | settings.keys():
            if before.get(name) != settings.get(name):
                raise LogError(
                    f"{self.folder} was begun with {name} = {before.get(name)!r}, and this run has {settings.get(name)!r}: "
                    "go on with the same, or remove the folder to begin anew"
                )


def write_record(part: IO[bytes], record: dict[str, Any]) -> None:
    """Append a record as one line, in one write: a kill leaves the whole line or a tail that doesn't count."""
    data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    while data:
        data = data[part.write(data) :]


def _records(part: Path) -> Iterator[dict[str, Any]]:
    for raw in part.read_bytes().split(b"\n")[:-1]:  # what stands after the last end of line was cut off by a kill
        with contextlib.suppress(ValueError):
            yield json.loads(raw)


def _lock(path: Path) -> IO[bytes]:
    """The file, locked against other runs for as long as it is open."""
    file = open(path, "ab")  # noqa: SIM115 - it is to stay open
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise LogError(f"another run is at {path.parent}: wait for its end, or stop it") from None
            time.sleep(0.2)
