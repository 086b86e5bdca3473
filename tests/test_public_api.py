"""What users may rely on: the names, the types, the tree of errors."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib import resources
from importlib.metadata import version

import pytest

import hf_cb
from hf_cb import errors

NAMES = [
    "AlreadyInstalledError",
    "CBConfig",
    "CacheLostError",
    "ContinuousBatchingBackend",
    "Engine",
    "EngineClosedError",
    "EngineDeadError",
    "EngineOverloadedError",
    "EngineStats",
    "FinishReason",
    "GenerationBackend",
    "GenerationHandle",
    "GenerationResult",
    "HFCBError",
    "InvalidArgumentError",
    "NotInstalledError",
    "PipelineItemsError",
    "RequestCancelledError",
    "RequestFailedError",
    "RequestTimeoutError",
    "RequestTooLongError",
    "SerializedBackend",
    "StepRecord",
    "TokenLogprobs",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "continuous_batching",
    "get_engine",
    "install",
    "register_backend",
    "stream_text",
    "uninstall",
]


def test_names() -> None:
    assert sorted(hf_cb.__all__) == hf_cb.__all__ == NAMES == sorted(hf_cb._HOMES)
    assert set(NAMES) <= set(dir(hf_cb))
    for name, home in hf_cb._HOMES.items():
        assert getattr(hf_cb, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        hf_cb.instal  # noqa: B018


def test_the_package_alone_imports_nothing_heavy() -> None:
    """So that a program that may not need it starts at once; `hf-cb top` among them."""
    program = """
import sys
import hf_cb, hf_cb.cli.main
heavy = {"torch", "transformers", "fastapi", "uvicorn", "rich", "ray", "prometheus_client", "opentelemetry"}
print(*sorted(heavy & set(sys.modules)))
from hf_cb import install
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "\nTrue\n"
    assert all(getattr(hf_cb, name) is not None for name in NAMES)


def test_version() -> None:
    assert hf_cb.__version__ == version("hf-cb")


def test_types_are_shipped() -> None:
    assert resources.files(hf_cb).joinpath("py.typed").is_file()


def test_every_public_object_is_documented() -> None:
    for name in NAMES:
        assert getattr(hf_cb, name).__doc__, name


def documented_tree() -> dict[str, tuple[str, str | None]]:
    """name -> (its base of ours, its built-in base), as the docstring of hf_cb.errors draws them."""
    tree: dict[str, tuple[str, str | None]] = {}
    above: list[str] = ["HFCBError"]
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│ ]*)[├└]── (\w+)(?: \((\w+)\))?  ", line)
        if found:
            depth = len(found[1]) // 4 + 1
            above[depth:] = [found[2]]
            tree[found[2]] = (above[depth - 1], found[3])
    return tree


def test_the_errors_are_as_documented() -> None:
    tree = documented_tree()
    assert set(tree) | {"HFCBError"} == {name for name in NAMES if name.endswith("Error")}
    builtins = {base.__name__: base for base in (ValueError, TypeError, RuntimeError, TimeoutError)}
    for name, (parent, builtin) in tree.items():
        bases = [getattr(errors, parent), *([builtins[builtin]] if builtin else [])]
        assert list(getattr(errors, name).__bases__) == bases
    assert hf_cb.HFCBError.__bases__ == (Exception,)


def test_every_error_is_defined_in_errors() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {name for name in NAMES if name.endswith("Error")}


@pytest.mark.parametrize(
    "cls", [hf_cb.CBConfig, hf_cb.EngineStats, hf_cb.StepRecord, hf_cb.GenerationResult, hf_cb.TokenLogprobs]
)
def test_data_is_frozen(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(cls)
