"""The one lock under which the package, and the pipelines that it serves, use tokenizers; criteria made from them.

A fast tokenizer keeps its padding and truncation in itself and sets them anew at each call: two threads that share one get
each other's settings, or "Already borrowed". One lock for all of them, since several Python tokenizers may stand before one
such object. It is held for a fraction of what a single token of the model takes.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from transformers.generation.stopping_criteria import StopStringCriteria

from hf_cb import forks

_lock = threading.RLock()
forks.renewed_in_child(globals(), _lock=threading.RLock)


def tokenizing() -> AbstractContextManager[object]:
    """The lock, for a `with` statement."""
    return _lock


def stop_string_criterion(tokenizer: Any, strings: str | list[str]) -> StopStringCriteria:
    """transformers' criterion for these strings. It goes through the whole vocabulary, for a sixth of a second with 50,000
    tokens, and has no state: calls that want the same share one.
    """
    wanted = (len(tokenizer), (strings,) if isinstance(strings, str) else tuple(strings))
    with _lock:
        known = _criteria.setdefault(tokenizer, {})
        if wanted not in known:
            while len(known) >= _KEPT:
                known.pop(next(iter(known)))
            known[wanted] = StopStringCriteria(tokenizer, strings)
        return known[wanted]


_KEPT = 8  # for each tokenizer
_criteria: weakref.WeakKeyDictionary[Any, dict[Any, StopStringCriteria]] = weakref.WeakKeyDictionary()
