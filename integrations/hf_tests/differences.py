"""What differs between two results of `generate()`, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache

TOLERANCE = 2e-4  # of the largest number, at least of 1: scores and logits in float32


def differences(got: Any, want: Any, values: bool = True) -> list[str]:
    """Of what the engine gave and what plain generate gave, or raised. Without `values`: of types and keys alone."""
    if isinstance(got, Exception) or isinstance(want, Exception):
        said = [f"{type(r).__name__}: {r}" if isinstance(r, Exception) else "an answer" for r in (got, want)]
        return [] if said[0] == said[1] else [f"{said[0]} where plain has {said[1]}"]
    if type(got) is not type(want):
        return [f"a {type(got).__name__} where plain has a {type(want).__name__}"]
    parts, others = _flat("", got), _flat("", want)
    if not values:
        parts, others = (dict.fromkeys(name for name in p if "." not in name[1:]) for p in (parts, others))
    found = [f"{name} is missing" for name in _more(others, parts)] + [f"{name} is too much" for name in _more(parts, others)]
    return found + [
        f"{name[1:] or 'tokens'}: {said}"
        for name in parts
        if name in others and (said := _difference(parts[name], others[name])) is not None
    ]


def _more(parts: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """What only the first has, without what is in it."""
    return [name[1:] for name in parts if name not in others and name.rpartition(".")[0] in others]


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The tensors and plain values in a result, each by its path."""
    if isinstance(value, Cache):
        layers = [layer for layer in getattr(value, "layers", []) if getattr(layer, "keys", None) is not None]
        inside: Mapping[Any, Any] = {i: (layer.keys, layer.values) for i, layer in enumerate(layers)}
    elif isinstance(value, Mapping):
        inside = value
    elif isinstance(value, tuple | list):
        inside = dict(enumerate(value))
    else:
        return {name: value}
    found = {name: type(value).__name__}
    for key, part in inside.items():
        found |= _flat(f"{name}.{key}", part)
    return found


def _difference(got: Any, want: Any) -> str | None:
    if not (isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)):
        same = type(got) is type(want) and (got == want or not isinstance(got, int | float | str | None))
        return None if same else f"{_named(got)} where plain has {_named(want)}"
    if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
        return f"{_named(got)} where plain has {_named(want)}"
    if not got.is_floating_point():
        return None if torch.equal(got, want) else f"{got.tolist()} where plain has {want.tolist()}"
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return f"infinite elsewhere than plain's, in {int((got.isfinite() != finite).sum())} of {got.numel()} numbers"
    got, want = got[finite].double(), want[finite].double()
    off = float((got - want).abs().max()) if want.numel() else 0.0
    return f"off by {off:.2g}" if off > TOLERANCE * max(1.0, float(want.abs().max()) if want.numel() else 0.0) else None


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return repr(value)[:60]
