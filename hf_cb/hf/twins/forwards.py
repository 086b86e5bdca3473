"""Forwards that modules have in the place of their class's: for a while, in a copy, or of somebody else's making."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


@contextlib.contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, these are the modules' forwards; then they have again what they had, their class's or one of their own."""
    own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]
        for module, forward in own.items():
            vars(module)["forward"] = forward


def compiled_from(forward: Any) -> Any:
    """What torch.compile was given to make this; anything else as it is."""
    while callable(inner := getattr(forward, "_torchdynamo_orig_callable", None)):
        forward = inner
    return forward


def follow_compiled(copies: Mapping[nn.Module, nn.Module]) -> None:
    """Let compiled forwards in a copied tree (original -> copy) run what they were compiled from, on the copies.

    A function is copied as it is: what `module.forward = torch.compile(module.forward)` made would run the original.
    """
    for module, copied in copies.items():
        own = vars(module).get("forward")
        inner = compiled_from(own)
        if inner is own:
            continue
        vars(copied)["forward"] = inner
        target = copies.get(inner.__self__) if isinstance(inner, types.MethodType) else None  # type: ignore[call-overload]
        if target is not None:
            vars(copied)["forward"] = types.MethodType(inner.__func__, target)
            if target is copied and inner.__func__ is type(module).forward:
                del vars(copied)["forward"]


def wrapped_forward(model: nn.Module) -> str | None:
    """The name of a module whose forward is a function round one of the model's own modules, which a copy of it runs, too.

    As `inner = model.forward; model.forward = lambda *args, **kwargs: inner(*args, **kwargs)` makes them.
    """
    modules = set(model.modules())
    for name, module in model.named_modules():
        own = compiled_from(vars(module).get("forward"))
        if isinstance(own, types.MethodType):  # bound to the copy in a copy
            own = own.__func__
        if isinstance(own, types.FunctionType) and any(held in modules for held in _held(own)):
            return name or "the model"
    return None


def _held(function: types.FunctionType) -> Iterator[nn.Module]:
    """The modules that a function refers to beside its arguments, itself or by what it wraps."""
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            yield thing
        else:
            pending += _parts(thing)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), vars(thing).get("__wrapped__"))
        used = (thing.__globals__.get(name) for name in thing.__code__.co_names)
        yield from (value for value in used if isinstance(value, (nn.Module, types.MethodType)))
    elif callable(thing) and not isinstance(thing, type):  # an object that stands for a function
        yield from getattr(thing, "__dict__", {}).values()
