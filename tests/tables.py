"""What the docs state from the code, made from the code: `python tests/tables.py` writes it into the pages, a test compares."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import models

import hf_cb
from hf_cb import sampling_options
from hf_cb.cli import main as cli
from hf_cb.hf.calls import option_table
from hf_cb.metrics import catalog

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_cb"


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


def file_table() -> str:
    """A line for each file of the package, by its docstring or first comment."""
    paths = sorted(PACKAGE.rglob("*"), key=lambda path: (len(path.relative_to(PACKAGE).parts) > 1, path))
    lines = [
        f"| `{path.relative_to(PACKAGE)}` | {_first_words(path)} |"
        for path in paths
        if path.suffix in (".py", ".cpp", ".h") and path.name not in ("__init__.py", "__main__.py")
    ]
    return "\n".join(["| file | what it is |", "|---|---|", *lines])


def _first_words(path: Path) -> str:
    """Its first sentence, without the name that it may begin with."""
    text = path.read_text()
    if path.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        text = " ".join(line.removeprefix("//").strip() for line in text.split("\n\n")[0].splitlines() if line.startswith("//"))
    sentence = re.split(r"(?<=[.!])\s", " ".join(text.split()))[0].rstrip(".")
    return sentence.replace("|", "\\|")


class Part(NamedTuple):
    """A generated part of a page."""

    page: Path
    make: Callable[[], str]


PARTS = {
    "options": Part(ROOT / "docs/options.md", option_table.markdown),
    "sampling": Part(ROOT / "docs/options.md", sampling_options.markdown),
    "models": Part(ROOT / "docs/options.md", model_table),
    "metrics": Part(ROOT / "docs/metrics.md", catalog.markdown),
    "commands": Part(ROOT / "docs/command-line.md", command_table),
    "files": Part(ROOT / "ARCHITECTURE.md", file_table),
}


def between_marks(text: str, name: str) -> str:
    """What a page has between `<!-- name -->` and `<!-- /name -->`."""
    match = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", text, re.DOTALL)
    assert match, f"there are no marks for {name}"
    return match[1]


def main() -> None:
    for name, part in PARTS.items():
        text = part.page.read_text()
        before = text[text.index(f"<!-- {name} -->") : text.index(f"<!-- /{name} -->")]
        part.page.write_text(text.replace(before, f"<!-- {name} -->\n{part.make()}\n"))


if __name__ == "__main__":
    main()
