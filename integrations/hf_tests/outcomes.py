"""What the plugin wrote down of a file's tests, plain and installed, and what differs between the two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Run:
    """One process of pytest. `trouble`: why it can't be trusted as a whole."""

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)  # a test's outcome, and what was said of it
    calls: Counter[str] = field(default_factory=Counter)  # served, native, trimmed
    reasons: Counter[str] = field(default_factory=Counter)  # of native calls
    differs: list[tuple[str, str]] = field(default_factory=list)  # a test, and how its calls were answered otherwise
    trouble: str | None = None

    @property
    def passed(self) -> int:
        return sum(outcome == "passed" for outcome, _ in self.outcomes.values())

    @classmethod
    def read(cls, record: Path, status: int) -> Run:
        run = cls()
        if status not in (0, 1, 5):  # all passed, some failed, there were none
            run.trouble = f"pytest ended with status {status}"
        for line in record.read_text().splitlines() if record.exists() else ():
            run._take(json.loads(line))
        return run

    def _take(self, entry: dict) -> None:
        test = entry["test"]
        if "outcome" in entry and self.outcomes.get(test, ("passed", ""))[0] != "failed":  # a teardown may fail what has passed
            self.outcomes[test] = entry["outcome"], entry["said"]
        elif "native_calls" in entry:
            self.reasons.update(entry["native_calls"])
        elif "refused" in entry:
            self.reasons[entry["refused"]] += 1
        elif "call" in entry:
            self.calls[entry["call"]] += 1
            self.differs += [(test, f"a call's {said}") for said in entry.get("differs", ())]


def differing(plain: Run, installed: Run) -> list[str]:
    """The tests with another outcome than plain's."""
    tests = {**plain.outcomes, **installed.outcomes}
    return [test for test in tests if _outcome(plain, test) != _outcome(installed, test)]


def found(plain: Run, installed: Run) -> Iterator[tuple[str, str]]:
    """Each test that differs, and how. An answer that differs counts whether the test sees it or not."""
    for name, run in (("plain", plain), ("installed", installed)):
        if run.trouble is not None:
            yield name, run.trouble
    for test in differing(plain, installed):
        said = installed.outcomes.get(test, ("", ""))[1] or plain.outcomes.get(test, ("", ""))[1]
        yield test, f"{_outcome(installed, test)} where plain is {_outcome(plain, test)}: {said}"
    yield from dict.fromkeys(installed.differs)


def _outcome(run: Run, test: str) -> str:
    return run.outcomes.get(test, ("not run", ""))[0]
