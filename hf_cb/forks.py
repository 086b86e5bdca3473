"""Forks: what has to be put right in a forked child, where the threads that held locks are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def in_child(act: Callable[[], None]) -> None:
    """Call `act` in every child that is forked from now on, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


def renewed_in_child(scope: dict[str, Any], **makers: Callable[[], object]) -> None:
    """Make anew in every forked child what has these names in `scope`, a module's globals."""
    in_child(lambda: scope.update({name: make() for name, make in makers.items()}))
