"""Values as callers give them: numbers of any kind, and token ids in whatever they come."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any

from hf_cb.errors import InvalidArgumentError


def is_int(value: Any) -> bool:
    """Whether it is a whole number: Python's, numpy's, but no bool."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Whether it is a real number, but no bool."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def is_finite(value: Any) -> bool:
    """Whether it is a number, and neither infinite nor NaN."""
    return is_number(value) and abs(value) <= sys.float_info.max


def ids_of(name: str, value: Any) -> frozenset[int]:
    """One token id or several, in whatever they come. Raises InvalidArgumentError that begins with `name`."""
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = [] if value is None else list(value) if isinstance(value, (Sequence, frozenset, set)) else [value]
    if not all(is_int(token) and token >= 0 for token in ids):
        raise InvalidArgumentError(f"{name}: takes a token id, several, or None; got {value!r}")
    return frozenset(map(int, ids))
