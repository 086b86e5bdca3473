"""What the docs state from the code is what the code says; their programs run; their links and commands lead somewhere."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import tables
import yaml
from fastapi.testclient import TestClient
from transformers import GenerationConfig, GenerationMixin

import hf_cb
from hf_cb.hf.calls import option_table

ROOT = tables.ROOT
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()


def programs(path: Path, beginning: str = r"(?:import|from)") -> list[str]:
    """The blocks of Python of a page that begin so."""
    return re.findall(rf"```python\n({beginning}[^`]*)```", path.read_text())


@pytest.mark.parametrize("name", tables.PARTS)
def test_generated_parts(name: str) -> None:
    part = tables.PARTS[name]
    assert tables.between_marks(part.page.read_text(), name) == part.make(), "run: python tests/tables.py"


def test_every_option_of_this_transformers_is_in_the_table() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    assert fields | parameters <= option_table.HANDLING.keys()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_nobody_is_sent_to_an_index_where_the_package_is_not() -> None:
    files = [*PAGES, *(ROOT / "hf_cb").rglob("*.py"), *(ROOT / "integrations").rglob("*.py"), *(ROOT / "demo").rglob("*.py")]
    assert [str(path) for path in files if re.search(r"""pip install ["']?hf-cb""", path.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        lines = path.read_text().splitlines() if anchor else []
        headings = [
            re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines if line.startswith("#")
        ]
        assert not anchor or anchor in headings, f"{page.name}: {target}"


def test_commands_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^(?:`)?make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for module in set(re.findall(r"python -m ((?:benchmarks|integrations|demo|hf_cb)[\w.]*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_sites_pages() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    nav = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"])
    assert sorted(nav) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES if (ROOT / "docs") in path.parents)


def run(program: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, name, "exec"), vars(module))
    return module


EXAMPLES = [(path, i) for path in PAGES[1:] for i in range(len(programs(path))) if "load()" in programs(path)[i]]


@pytest.mark.timeout(300)  # a cold cache prepares the model first
@pytest.mark.parametrize(("page", "index"), EXAMPLES, ids=lambda value: getattr(value, "name", str(value)))
def test_the_programs_run(page: Path, index: int, capsys: pytest.CaptureFixture[str]) -> None:
    module = run(programs(page)[index], "program_of_the_docs")
    if hasattr(module, "app"):
        with TestClient(module.app) as asked:
            print(asked.get("/ask", params={"question": "What is the capital of France?"}).text)
    out = capsys.readouterr().out
    assert "Paris" in out or "output_tokens" in out  # an answer, or the figures


@pytest.mark.timeout(300)
def test_the_readmes_programs_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    module = run("".join(programs(ROOT / "README.md", "")), "program_of_the_readme")
    assert module.engine.unsupported_reason is None
    hf_cb.uninstall(module.model)
    assert "Paris" in capsys.readouterr().out
