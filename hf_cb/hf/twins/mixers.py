"""Mixers: the modules of a twin that keep a state of each sequence, found by watching a row run with a cache.

A mixer is the innermost module whose forward changes a tensor in the cache that it is given, or one of its own attributes, and
that does not call the attention function. Recurrent, convolutional and linear-attention layers are mixers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_cb.hf.twins.attention import UnservableLayerError
from hf_cb.hf.twins.containers import Path, copy_along, get, is_config, tensors_in
from hf_cb.runtime.state_pool import StateSpec

FLAWS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What a module may raise that is called in a way that it was not made for."""

_MOST_PARTS = 12  # modules inside of one that keeps its state in its own attributes: a mixer, not half a model


@dataclass(slots=True, eq=False)
class Mixer:
    """A module, and where its states are in what it takes as `argument`, its cache; None: in attributes of its own modules."""

    name: str
    module: nn.Module
    argument: str | None
    fresh: Any  # the cache before a sequence's first token
    used: Any  # and after some
    paths: list[Path]  # of the states in the cache
    attributes: list[tuple[nn.Module, str]]  # or where they are else
    call: tuple[tuple[Any, ...], dict[str, Any]]  # the arguments that it was seen to take
    forced: dict[str, Any] = field(default_factory=dict)  # arguments that say that there is a cache
    continues: bool = True  # whether several tokens may follow a state in one call
    batches: bool = True  # whether several rows may be computed in one call
    specs: tuple[StateSpec, ...] = ()  # of its states

    @property
    def states(self) -> list[torch.Tensor]:
        """Those of the row that was watched, [1, ...] each."""
        if self.argument is None:
            return [vars(module)[name] for module, name in self.attributes]
        return [get(self.used, path) for path in self.paths]

    @property
    def position(self) -> int | None:
        """The place of `argument` among the positional ones."""
        names = list(inspect.signature(self.module.forward).parameters)
        return names.index(self.argument) if self.argument in names else None


@dataclass(slots=True)
class _Frame:
    """A module that is running."""

    caches: dict[str, tuple[Any, dict[Path, tuple[int, int]]]]  # argument -> itself, and its tensors' marks
    alive: list[torch.Tensor]  # those tensors: an id is one's own as long as one lives
    own: dict[tuple[nn.Module, str], tuple[int, int]]
    changed_below: set[tuple[int, Path]] = field(default_factory=set)


class MixerWatch:
    """Watches every module of `model` for a while. `attention`: modules whose caches are known."""

    def __init__(self, model: nn.Module, attention: Iterable[nn.Module]) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._attention = set(attention)
        self._frames: list[_Frame] = []
        self._found: dict[nn.Module, Mixer] = {}

    def watch(self, run: Callable[[], Any]) -> list[Mixer]:
        """The mixers that `run` ran, in the order of their calls."""
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return self._outermost()

    def _outermost(self) -> list[Mixer]:
        """A mixer inside of another is a part of it."""
        found = list(self._found.values())
        parts = {part: mixer for mixer in found for part in mixer.module.modules() if part is not mixer.module}
        for mixer in found:
            if mixer.module in parts:
                whole = parts[mixer.module]
                whole.attributes = list(dict.fromkeys([*whole.attributes, *mixer.attributes]))
        return [mixer for mixer in found if mixer.module not in parts]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: value for name, value in _arguments(module, args, kwargs).items() if _may_hold_states(value)}
        alive = [tensor for value in given.values() for _, tensor in tensors_in(value)]
        caches = {name: (value, _marks(tensors_in(value))) for name, value in given.items()}
        self._frames.append(_Frame(caches, alive, _own_marks(module)))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        frame = self._frames.pop()
        changed = set(frame.changed_below)
        for name, (cache, before) in frame.caches.items():
            paths = [path for path, mark in _marks(tensors_in(cache)).items() if mark != before.get(path)]
            mine = [path for path in paths if (id(cache), path) not in frame.changed_below]
            changed.update((id(cache), path) for path in paths)
            if mine and module not in self._attention:
                used = copy_along(cache, mine, torch.clone)
                mixer = Mixer(self._names[module], module, name, None, used, mine, [], (args, dict(kwargs)))
                self._found.setdefault(module, mixer)
        self._note_attributes(module, frame, (args, dict(kwargs)))
        if self._frames:
            self._frames[-1].changed_below |= changed

    def _note_attributes(self, module: nn.Module, frame: _Frame, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        parts = list(module.modules())
        if len(parts) > _MOST_PARTS or module is self._model or not self._attention.isdisjoint(parts):
            return
        changed = [key for key, mark in _own_marks(module).items() if frame.own.get(key) != mark]
        if not any(part is module for part, _ in changed):
            return
        forced = {"use_cache": True} if call[1].get("use_cache") else {}
        mixer = Mixer(self._names[module], module, None, None, None, [], changed, call, forced)
        self._found.setdefault(module, mixer).attributes = changed


def find_mixers(model: nn.Module, attention: Iterable[nn.Module], rows: Iterable[Callable[[], None]]) -> list[Mixer]:
    """Note what keeps a state in `rows`, two functions that run a row with a new cache each, as plain generate does at first.
    The second row is shorter.

    Raises UnservableLayerError where something grows with the row: keys and values that no attention layer of ours knows.
    """
    first, second = rows
    mixers = MixerWatch(model, attention).watch(first)
    before = [[_spec(state) for state in mixer.states] for mixer in mixers]
    handles = [mixer.module.register_forward_pre_hook(partial(_note_fresh, mixer), with_kwargs=True) for mixer in mixers]
    try:
        shorter = MixerWatch(model, attention).watch(second) if mixers else []
    finally:
        for handle in handles:
            handle.remove()
    for mixer, specs, again in zip(mixers, before, shorter, strict=True):
        stays = [spec is not None and spec == _spec(state) for spec, state in zip(specs, again.states, strict=True)]
        if mixer.argument is not None and not all(stays):
            raise UnservableLayerError(f"{mixer.name} keeps keys and values without calling the registered attention function")
        # What grows in a module's own attributes is but a note of what it has computed.
        mixer.attributes = [place for place, stay in zip(mixer.attributes, stays, strict=False) if stay]
        mixer.specs = tuple(spec for spec, stay in zip(specs, stays, strict=True) if spec is not None and stay)
    return [mixer for mixer in mixers if mixer.specs]


def _spec(state: Any) -> StateSpec | None:
    """None: it is no state of one sequence."""
    if not isinstance(state, torch.Tensor) or state.shape[:1] != (1,):
        return None
    return StateSpec(tuple(state.shape[1:]), state.dtype, state.device)


def _note_fresh(mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if mixer.argument is not None and mixer.fresh is None:
        cache = _arguments(module, args, kwargs)[mixer.argument]
        mixer.fresh = copy_along(cache, mixer.paths, torch.clone)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By name."""
    try:
        bound = dict(inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments)
    except (TypeError, ValueError):
        bound = {}
    return {**bound, **bound.get("kwargs", {}), **kwargs}


def _may_hold_states(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, torch.Tensor) for item in value)
    plain = isinstance(value, (int, float, str, bytes, tuple, dict, type(None), type, torch.Tensor, nn.Module, torch.dtype))
    return not plain and not callable(value) and not is_config(value) and hasattr(value, "__dict__")


def _marks(tensors: Iterable[tuple[Path, torch.Tensor]]) -> dict[Path, tuple[int, int]]:
    """What changes where a tensor is replaced or written to."""
    return {path: (id(tensor), tensor._version) for path, tensor in tensors}


def _own_marks(module: nn.Module) -> dict[tuple[nn.Module, str], tuple[int, int]]:
    return {
        (part, name): (id(value), value._version)
        for part in module.modules()
        for name, value in list(vars(part).items())
        if isinstance(value, torch.Tensor)
    }
