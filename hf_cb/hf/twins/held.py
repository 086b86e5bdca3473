"""Reading: what modules hold beside parameters, buffers and submodules, described so that a change shows.

A description is made of plain values and of dicts, and keeps nothing of the user's alive. It is compared by `==`. Making and
comparing it runs no code of the user's: kinds are told by `type`, since `isinstance` asks the object, too.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.generation.utils import GenerationMixin

from hf_cb.hf.twins.weights import checksums, plain_parts, state_of

Parts = dict[Any, Any]
"""Some parts of something: name -> parts of the part, or {} for all of it."""

# The others are accelerate's, see dispatched.py, and transformers' notes of how the model was loaded and may be split.
_NOTES = (
    *("_hf_hook", "_is_hf_initialized", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan"),
    "_output_capturing_hooks_installed",
)
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *_NOTES))
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_CONTAINERS = frozenset((list, tuple, set, frozenset, torch.Size))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, weakref.ref)
_OF_WRAPPERS = frozenset((*functools.WRAPPER_ASSIGNMENTS, "__annotations__", "__signature__", "__wrapped__"))
_MOST_OBJECTS = 20_000  # some ten milliseconds
_ITEMS, _BYTES = 20, 10_000  # plain items of a container, or bytes of an array, that take as long as an object
_HEADER, _FIELDS = object(), object()  # keys of a description that no dict of the user's has
_SWITCHED: Parts = {
    "_attn_implementation_internal": {},
    "_experts_implementation_internal": {},
}  # by plain generate, as it runs
# Of the model itself: what plain generate reads and writes, which calls look at by themselves.
_SEEN_ELSEWHERE = (
    *vars(GenerationMixin),
    "generation_config",
    "warnings_issued",
    "_cache",
    "_compiled_call",
    "_previous_max_cache_length",
)
OF_GENERATE: Parts = {name: {} for name in _SEEN_ELSEWHERE}


class TooManyObjectsError(Exception):
    """There is more to look at than each call can wait for."""


class _Same:
    """Equal to itself and what is made of the same object."""

    __slots__ = ("_key",)

    def __init__(self, value: object) -> None:
        try:  # Python keeps one such reference per object
            self._key: object = weakref.ref(value)
        except TypeError:
            self._key = id(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (self._key is other._key or (type(self._key) is int and self._key == other._key))

    def __hash__(self) -> int:
        return id(self._key) if type(self._key) is not int else self._key


class Reading:
    """One look at what some modules hold. What several of them have in common is described once."""

    def __init__(self, places: Mapping[nn.Module, int]) -> None:
        """`places`: the modules that are looked at, in their order."""
        self._places = places
        self._left = _MOST_OBJECTS
        self._met: dict[int, tuple[object, object]] = {}  # by id: the object, which keeps the id its own, and what it reads as
        self.tensors: list[torch.Tensor] = []
        self.functions: list[types.FunctionType] = []

    def values(self, module: nn.Module, without: Parts | None = None) -> dict[str, object]:
        """The module's own attributes, described, except those parts."""
        own = vars(module).copy()  # others may be adding some
        return self._parts(own, own.keys() - _OF_EVERY_MODULE, without)

    def _parts(self, own: dict[Any, Any], names: Collection[Any], without: Parts | None) -> dict[Any, object]:
        if without:
            names = [name for name in names if without.get(name) != {}] if without.keys() & names else names
            return {name: self.of(own[name], without.get(name)) for name in names}
        return {name: value if type(value := own[name]) in _PLAIN else self.of(value) for name in names}

    def of(self, value: Any, without: Parts | None = None) -> object:
        """The description of any value."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        met = self._met.get(id(value))
        if met is not None:
            return met[1]
        self._spend(1 + len(value) // _ITEMS if kind in _CONTAINERS or kind is dict else 1)
        if kind in _CONTAINERS and _PLAIN.issuperset(map(type, value)):
            return kind, frozenset(value) if kind is set else tuple(value)
        if kind is dict and _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values())):
            return kind, tuple(value.items())
        same = _Same(value)
        self._met[id(value)] = value, same
        if issubclass(kind, torch.Tensor):
            self.tensors.append(value)
            return same, tuple(map(_state, plain_parts(value))), value.dtype, value.shape
        if issubclass(kind, nn.Module) and (place := self._places.get(value)) is not None:
            return nn.Module, place
        if issubclass(kind, _FUNCTIONS):
            if kind is types.FunctionType:
                self.functions.append(value)
            return same
        if issubclass(kind, np.ndarray):
            self._spend(value.nbytes // _BYTES)
            return same, value.shape, value.dtype.str, hash(value.tobytes())
        return self._composite(value, same, without or {})

    def _spend(self, objects: int) -> None:
        self._left -= objects
        if self._left < 0:
            raise TooManyObjectsError

    def _composite(self, value: Any, same: _Same, without: Parts) -> object:
        if issubclass(type(value), PreTrainedConfig):
            without = {**_SWITCHED, **without}
        read: Parts = {_HEADER: (type(value), same)}
        fields = read
        if (items := _items(value)) is not None:
            read = {_HEADER: type(value)}
            named = {_key(key): part for key, part in items}
            read |= self._parts(named, named, without)
            fields = {_HEADER: (type(value), same)}
            without = without.get(_FIELDS) or {}
        if issubclass(type(value), nn.Module):  # one that is hidden from the tree
            for table in (value._parameters, value._buffers, value._modules):
                fields |= self._parts(own := table.copy(), own, without)
            fields |= self.values(value, without)
        else:
            own = _fields(value)
            fields |= self._parts(own, own.keys() - _OF_WRAPPERS, without)
        if fields is not read and len(fields) > 1:
            read[_FIELDS] = fields
        return read


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """By which it is told that a tensor was written to. What has no counter is read as a whole."""
    if tensor.is_meta or not torch._C._has_storage(tensor):
        return 0, 0
    return checksums([tensor])[0] if tensor.is_inference() else state_of(tensor)[0], tensor.data_ptr()


def _key(key: Any) -> object:
    """A key that keeps nothing alive."""
    parts = key if type(key) is tuple else (key,)
    return key if all(type(part) in _PLAIN for part in parts) else _Same(key)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container by their keys; None: it is none."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.items(value))
    for sequence in (list, tuple, set, frozenset, deque):
        if issubclass(kind, sequence):
            return list(enumerate(list(sequence.__iter__(value))))
    if issubclass(kind, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if issubclass(kind, types.MethodType):
        return [("func", value.__func__), ("self", value.__self__)]
    return None


def _fields(value: Any) -> dict[str, Any]:
    """What an object has in its dict, and in its slots."""
    fields: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # past a `__getattribute__` of its own
        fields = object.__getattribute__(value, "__dict__").copy()
    for name in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # one that is not set
            fields[name] = object.__getattribute__(value, name)
    return fields


def _slots(kind: type) -> list[str]:
    tables = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for table in tables for name, found in table.items() if isinstance(found, types.MemberDescriptorType)]


def differences(before: object, after: object) -> Parts | None:
    """The parts in which two descriptions differ; None: in nothing."""
    if before == after:
        return None
    if not isinstance(before, dict) or not isinstance(after, dict) or before.get(_HEADER) != after.get(_HEADER):
        return {}
    is_container = isinstance(before.get(_HEADER), type)
    if is_container and before.keys() != after.keys():  # a log, or a cache: it will grow
        return {}
    found: Parts = {}
    for name in {**before, **after}:
        if name not in before or name not in after:
            found[name] = {}
        elif (parts := differences(before[name], after[name])) is not None:
            found[name] = parts
    return found


def within(parts: Parts, others: Parts) -> bool:
    """Whether each of `parts` is one of the others, or in one."""
    return not others or (bool(parts) and all(name in others and within(part, others[name]) for name, part in parts.items()))


def joined(some: Parts, others: Parts) -> Parts:
    """What is in either of two books."""
    common = {name: joined(some[name], others[name]) if some[name] and others[name] else {} for name in some if name in others}
    return {**some, **others, **common}
