"""Whose code a function is: transformers' and its companions', or the user's."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_cb.hf.twins.twin import read_all

# What is known of these: a forward of theirs gives what it is given and what its module holds.
_QUANTISERS = (
    "aqlm",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "eetq",
    "gptqmodel",
    "hqq",
    "optimum",
    "quark",
    "torchao",
    "vptq",
)
_COMPANIONS = frozenset(("transformers", "torch", "peft", "accelerate", "kernels", *_QUANTISERS))
_DECORATORS = frozenset(("torch.utils._contextlib", "contextlib"))


def is_transformers(function: Any) -> bool:
    """Whether it is transformers' own, and nobody has wrapped it in something else."""
    links = [*_links(function)]
    return links[-1].partition(".")[0] == "transformers" and all(
        link in _DECORATORS or link.partition(".")[0] == "transformers" for link in links
    )


def own_code(model: nn.Module) -> str | None:
    """A function that the model's modules run or hold and that is not known here, by its place in the model."""
    for name, module in model.named_modules():
        kind, own = type(module), vars(module)
        forwards = [kind.forward, kind.__call__, own.get("forward", kind.forward), own.get("_old_forward", kind.forward)]
        if not all(map(_is_companions, forwards)):
            return f"{name or 'the model'} ({kind.__name__})"
    for function in read_all(model).functions:
        if not _is_companions(function):
            return getattr(function, "__qualname__", repr(function))
    return None


def _is_companions(function: Any) -> bool:
    return all(link.partition(".")[0] in _COMPANIONS for link in _links(function))


def _links(function: Any) -> Iterator[str]:
    """The modules whose code a call of it runs: its own, and those of all that it wraps.

    By what its code refers to: `functools.wraps` copies the name of a module with the others.
    """
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        if type(function) in (types.MethodType, staticmethod, classmethod):
            function = function.__func__
        if isinstance(function, types.BuiltinFunctionType | type | types.ModuleType):
            yield "torch"  # what has no code in Python depends on nothing of Python's
            return
        # By its own type: a proxy, as tracers put round a function, has the function's attributes, and says that it is one.
        code = function if type(function) is types.FunctionType else type(function).__call__
        yield getattr(code, "__globals__", {}).get("__name__") or "?"
        function = getattr(function, "__wrapped__", None)
