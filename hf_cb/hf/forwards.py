"""Other forwards for modules, for a while."""

from __future__ import annotations

import contextlib
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
