"""The README's tables, made from the code: `python tests/tables.py` writes them into the README, a test compares."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import models

import hf_cb
from hf_cb.cli import main as cli
from hf_cb.hf.calls import option_table
from hf_cb.metrics import catalog

README = Path(__file__).parents[1] / "README.md"


def _base(name: str) -> str:
    return name.partition("+")[0]


def model_table() -> str:
    """Every architecture of the test zoo, as the probe at install finds it."""
    served: set[str] = set()
    native: dict[str, set[str]] = {}
    for name in (*models.SERVED, *models.NATIVE):
        model = models.tiny(name)
        engine = hf_cb.install(model)
        assert engine is not None
        reason = engine.unsupported_reason
        hf_cb.uninstall(model)
        if reason is None:
            served.add(_base(name))
        else:
            native.setdefault(reason, set()).add(_base(name))
    lines = ["| runs | architectures | reason |", "|---|---|---|", f"| engine | {', '.join(sorted(served))} | |"]
    lines += [f"| native | {', '.join(sorted(names))} | {reason} |" for reason, names in sorted(native.items())]
    return "\n".join(lines)


def command_table() -> str:
    """The commands of hf-cb, as its help has them."""
    (commands,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    lines = [f"| `hf-cb {choice.dest}` | {choice.help} |" for choice in commands._choices_actions]
    return "\n".join(["| command | |", "|---|---|", *lines])


def between_marks(text: str, name: str) -> str:
    """What the README has between `<!-- name -->` and `<!-- /name -->`."""
    match = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    assert match, f"the README has no marks for {name}"
    return match[1]


def main() -> None:
    text = README.read_text()
    tables = {
        "options": option_table.markdown(),
        "models": model_table(),
        "metrics": catalog.markdown(),
        "commands": command_table(),
    }
    for name, table in tables.items():
        before = between_marks(text, name)
        text = text.replace(f"<!-- {name} -->\n{before}\n", f"<!-- {name} -->\n{table}\n")
    README.write_text(text)


if __name__ == "__main__":
    main()
