"""The one lock under which the package, and the pipelines that it serves, use tokenizers.

A fast tokenizer keeps its padding and truncation in itself and sets them anew at each call: two threads that share one get
each other's settings, or "Already borrowed". One lock for all of them, since several Python tokenizers may stand before one
such object. It is held for a fraction of what a single token of the model takes.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_lock = threading.RLock()


def tokenizing() -> AbstractContextManager[object]:
    """The lock."""
    return _lock


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread that holds it is not in the child
    os.register_at_fork(after_in_child=_renew_lock)
