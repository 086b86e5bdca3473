"""Tensors inside of objects such as transformers' caches: where they are, and copies of the objects around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_DEEPEST = 6
_LEAVES = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Tensor,
    nn.Module,
)


class Place(NamedTuple):
    """A step into an object."""

    is_attribute: bool
    key: Any

    def of(self, holder: Any) -> Any:
        """What is there."""
        return getattr(holder, self.key) if self.is_attribute else holder[self.key]


Path = tuple[Place, ...]


def tensors_in(holder: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors that its attributes, dicts and lists lead to, but for those of modules and configs."""
    yield from _tensors_in(holder, (), set())


def _tensors_in(holder: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(holder, torch.Tensor):
        yield path, holder
    elif len(path) < _DEEPEST and not _is_leaf(holder) and id(holder) not in seen:
        seen.add(id(holder))
        for place, value in _inside(holder):
            yield from _tensors_in(value, (*path, place), seen)


def get(holder: Any, path: Path) -> Any:
    """What is at `path`."""
    for place in path:
        holder = place.of(holder)
    return holder


def put(holder: Any, path: Path, value: Any) -> None:
    """Put `value` at `path`; a tuple on the way is replaced."""
    parent, last = get(holder, path[:-1]), path[-1]
    if last.is_attribute:
        setattr(parent, last.key, value)
    elif isinstance(parent, tuple):
        put(holder, path[:-1], tuple(value if i == last.key else old for i, old in enumerate(parent)))
    else:
        parent[last.key] = value


def copy_along(holder: Any, paths: list[Path], tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """A copy of `holder`, whose tensors are what `tensor` makes of them. Elements of lists and tuples that no path leads to are
    not copied: of a cache of many layers, one layer is."""
    if isinstance(holder, torch.Tensor):
        return tensor(holder)
    if _is_leaf(holder):
        return holder
    onward = {place: [path[1:] for path in paths if path and path[0] == place] for place in {path[0] for path in paths if path}}

    def below(place: Place, value: Any) -> Any:
        return copy_along(value, onward.get(place, []), tensor)

    if isinstance(holder, (list, tuple)):
        items = [below(place, value) if place in onward else value for place, value in _inside(holder)]
        return items if isinstance(holder, list) else tuple(items)
    if isinstance(holder, dict):
        return {place.key: below(place, value) for place, value in _inside(holder)}
    made = object.__new__(type(holder))
    for place, value in _inside(holder):
        made.__dict__[place.key] = below(place, value)
    return made


def _inside(holder: Any) -> list[tuple[Place, Any]]:
    if isinstance(holder, dict):
        return [(Place(False, key), value) for key, value in holder.items()]
    if isinstance(holder, (list, tuple)):
        return [(Place(False, i), value) for i, value in enumerate(holder)]
    return [(Place(True, name), value) for name, value in vars(holder).items()]


def _is_leaf(holder: Any) -> bool:
    if isinstance(holder, (dict, list, tuple)):
        return False
    return isinstance(holder, _LEAVES) or not hasattr(holder, "__dict__") or callable(holder) or is_config(holder)


def is_config(value: Any) -> bool:
    """Whether it is a config of transformers' or of a model's own."""
    return type(value).__name__.endswith("Config")
