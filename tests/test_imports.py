"""Who may import whom. A module may use what stands before it, and nothing that stands after."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_cb

ROOT = Path(hf_cb.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Part of the package -> the parts it may import from. Everything may import from itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "blocking": set(),
    "forks": set(),
    "config": {"errors"},
    "request": {"errors"},
    "core": {"errors", "request"},
    "kernels": {"forks"},
    "attention": {"errors", "kernels"},
    "runtime": {"errors", "request", "core.output", "kernels", "attention"},
    "stats": {"request"},
    "watch": {"request", "stats"},
    "values": {"errors"},
    "sampling_options": {"errors", "request", "values"},
    "options": {"errors", "request", "values", "sampling_options"},
    "handle": {"errors", "blocking", "request", "stats", "watch"},
    "text": {"handle"},
    "limits": {"errors", "handle"},
    "engine_core": {"errors", "request", "core.output", "core.scheduler", "runtime", "stats"},
    "answers": {"errors", "limits", "request", "core.output", "engine_core", "handle", "stats", "watch"},
    "door": {"errors", "blocking", "limits", "engine_core", "handle", "stats"},
    "worker": {
        *("errors", "forks", "answers", "door", "limits", "request"),
        *("core.output", "engine_core", "handle", "runtime", "stats"),
    },
    "intake": {
        *("errors", "config", "limits", "request", "runtime"),
        *("handle", "stats", "watch", "options", "engine_core", "worker"),
    },
    "engine": {"errors", "config", "handle", "stats", "watch", "intake"},
    "hf.__init__": set(),
    "hf.twins": {"errors", "attention.step", "kernels", "runtime"},
    "hf.fast": {"attention", "kernels", "runtime", "hf.twins"},
    "hf.mixer_trials": {"core.output", "runtime", "hf.twins"},
    "hf.probe": {"attention", "core.output", "runtime", "hf.twins", "hf.mixer_trials"},
    "hf.support": {"errors", "attention", "runtime", "hf.twins", "hf.fast", "hf.probe"},
    "hf.calls": {
        "errors",
        "blocking",
        "forks",
        "request",
        "runtime",
        "handle",
        "values",
        "sampling_options",
        "options",
        "intake",
        "hf.twins",
    },
    "hf.pipelines": {"errors", "blocking", "handle", "hf.calls"},
    "hf.build": {
        *("errors", "config", "core", "attention", "runtime", "options", "engine_core", "intake"),
        *("hf.twins", "hf.probe", "hf.support", "hf.calls"),
    },
    "backend": {"errors", "blocking", "forks", "config", "request", "engine", "hf"},
    "continuous": {"errors", "blocking", "config", "request", "intake", "engine", "runtime", "hf", "backend"},
    "installation": {"errors", "forks", "config", "options", "engine", "runtime", "hf", "backend", "continuous"},
    "__init__": {"errors", "config", "request", "stats", "handle", "text", "engine", "backend", "continuous", "installation"},
    "doctor": {"__init__", "attention", "core.output", "runtime"},
    "metrics": {"__init__", "engine", "request", "stats", "watch"},
    "server": {"__init__", "errors", "sampling_options", "engine", "handle", "request", "text", "watch"},
    "cli": {
        "__init__",
        "errors",
        "config",
        "options",
        "sampling_options",
        "handle",
        "text",
        "engine",
        "backend",
        "doctor",
        "metrics",
        "server",
    },
}
OUTSIDE = {
    "core": {"torch", "numpy", "transformers"},
    "kernels": {"transformers"},
    "attention": {"transformers"},
    "runtime": {"transformers"},
}


def module_of(path: Path) -> str:
    """Dotted name below hf_cb: core.scheduler, errors, hf.__init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def part_of(module: str) -> str:
    """What the table names: the wings of hf by themselves."""
    first, _, rest = module.partition(".")
    return f"hf.{rest.partition('.')[0]}" if first == "hf" and rest else first


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at whatever depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "hf_cb")


def own_imports(path: Path) -> list[str]:
    return [name.removeprefix("hf_cb.") for name in imports(path) if name.startswith("hf_cb.")]


def test_every_part_is_in_the_table() -> None:
    assert {part_of(module_of(path)) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    allowed = ALLOWED[part] | {part}
    for name in own_imports(path):
        assert any(f"{name}.".startswith(f"{known}.") for known in allowed), f"{module_of(path)} imports {name}"


def test_the_table_has_no_cycle() -> None:
    seen: set[str] = set()
    for part, allowed in ALLOWED.items():
        assert all(any(f"{known}.".startswith(f"{part_of(name)}.") for known in seen) for name in allowed), part
        seen.add(part)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_outside_packages(path: Path) -> None:
    part = part_of(module_of(path))
    roots = {part_of(name) for name in imports(path)}
    assert not roots & OUTSIDE.get(part, set())
    if part.partition(".")[0] not in ("hf", "backend", "continuous", "installation", "doctor", "server"):
        assert "transformers" not in roots


def test_nothing_is_too_long_to_read_at_once() -> None:
    long = [
        path.name
        for path in ROOT.rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and len(path.read_text().splitlines()) > 350
    ]
    long += [
        f"{module_of(path)}.{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 50
    ]
    assert long == []


def test_package_files_hold_a_docstring_and_no_more() -> None:
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT:
            (only,) = ast.parse(path.read_text()).body
            assert isinstance(only, ast.Expr)


CORE = sorted(f"hf_cb.{module_of(path)}" for path in (ROOT / "core").glob("*.py"))


def test_core_runs_without_torch() -> None:
    """Importing hf_cb itself imports torch, so the core is imported beside it, as if nothing else were there."""
    program = f"""
import sys, types
package = types.ModuleType("hf_cb")
package.__path__ = [{str(ROOT)!r}]
sys.modules["hf_cb"] = package
for name in {[name.removesuffix(".__init__") for name in CORE]!r}:
    __import__(name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "numpy", "transformers"}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


SERVICES = {"fastapi", "uvicorn", "starlette", "openai", "prometheus_client", "rich", "ray", "opentelemetry"}


def test_importing_the_package_imports_none_of_the_extras() -> None:
    program = f"import sys, hf_cb; print(*sorted({SERVICES!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
