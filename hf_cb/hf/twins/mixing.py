"""Mixing: the mixers of a twin in the shared batch: each computes the rows of a step by groups, over states in slots.

Rows of like length, of which all begin or all go on, are one call of the model's own forward, with a cache whose tensors are
views of the slots, or copies. So most decode rows are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_cb.hf.twins.containers import copy_along, get, put
from hf_cb.hf.twins.mixers import Mixer
from hf_cb.runtime.state_pool import Slots, StateGroup, StatePool


class Mixing:
    """Stands in the mixers' place from now on, over `pool`, which has the states of each in this order. Between `begin` and
    `end` their calls are those of a step; else they run as they are."""

    def __init__(self, mixers: Sequence[Mixer], pool: StatePool) -> None:
        self._pool = pool
        self._groups: tuple[StateGroup, ...] | None = None
        self._num_tokens = 0
        self._mixers = tuple(mixers)
        for index, mixer in enumerate(mixers):
            mixer.module.forward = self._served(index, mixer, mixer.module.forward)

    def undo(self) -> None:
        """Let the mixers be as they were."""
        for mixer in self._mixers:
            vars(mixer.module).pop("forward", None)

    def use(self, pool: StatePool) -> None:
        """Let the states be in `pool` from now on."""
        self._pool = pool

    def begin(self, groups: tuple[StateGroup, ...], num_tokens: int) -> None:
        """The next calls are of a step of so many packed tokens."""
        self._groups, self._num_tokens = groups, num_tokens

    def end(self) -> None:
        """The step is over."""
        self._groups = None

    def _served(self, index: int, mixer: Mixer, own: Callable[..., Any]) -> Callable[..., Any]:
        one = _OneMixer(mixer, own)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._groups is None:
                return own(*args, **kwargs)
            outputs: list[torch.Tensor | None] | None = None
            for group in self._groups if mixer.batches else _row_by_row(self._groups):
                result = one.run(args, kwargs, group, self._num_tokens, self._pool.states[index])
                parts = result if isinstance(result, tuple) else (result,)
                outputs = self._join(outputs, parts, group)
            assert outputs is not None
            return tuple(outputs) if isinstance(result, tuple) else outputs[0]

        return forward

    def _join(
        self, outputs: list[torch.Tensor | None] | None, parts: Sequence[Any], group: StateGroup
    ) -> list[torch.Tensor | None]:
        """Put a group's parts [B, L, ...] where its tokens are packed; what has no place for each token is nothing."""
        form = (group.num_rows, group.length)
        flat = [part.flatten(0, 1) if isinstance(part, torch.Tensor) and part.shape[:2] == form else None for part in parts]
        if group.places is None:
            return [None if part is None else part[None] for part in flat]
        if outputs is None:
            outputs = [None if part is None else part.new_empty((1, self._num_tokens, *part.shape[1:])) for part in flat]
        for whole, part in zip(outputs, flat, strict=True):
            if whole is not None and part is not None:
                whole[0].index_copy_(0, group.places, part)
        return outputs


class _OneMixer:
    """Runs one mixer on one group."""

    def __init__(self, mixer: Mixer, own: Callable[..., Any]) -> None:
        self._mixer = mixer
        self._own = own
        self._position = mixer.position
        self._used: Any = None  # a cache for rows that go on: its tensors are put in anew for each call
        self._fresh_states = [] if mixer.argument is None else [_found(mixer.fresh, path) for path in mixer.paths]

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], group: StateGroup, num_tokens: int, states: Sequence[torch.Tensor]
    ) -> Any:
        """Outputs of a group, [B, L, ...] each; leaves its rows' states where they belong."""
        own_args = [_of_group(value, group, num_tokens) for value in args]
        own_kwargs = {name: _of_group(value, group, num_tokens) for name, value in kwargs.items()} | self._mixer.forced
        if self._mixer.continues or group.reads is None or group.length == 1:
            return self._call(own_args, own_kwargs, group.num_rows, group.reads, group.writes, states)
        return self._token_by_token(own_args, own_kwargs, group, states)

    def _token_by_token(
        self, args: list[Any], kwargs: dict[str, Any], group: StateGroup, states: Sequence[torch.Tensor]
    ) -> Any:
        form, results = (group.num_rows, group.length), []
        for i in range(group.length):
            token_args = [_token(value, i, form) for value in args]
            token_kwargs = {name: _token(value, i, form) for name, value in kwargs.items()}
            reads = group.reads if i == 0 else group.writes
            results.append(self._call(token_args, token_kwargs, group.num_rows, reads, group.writes, states))
        if not isinstance(results[0], tuple):
            return torch.cat(results, 1)
        return (torch.cat([result[0] for result in results], 1), *results[0][1:])

    def _call(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        num_rows: int,
        reads: Slots | None,
        writes: Slots,
        states: Sequence[torch.Tensor],
    ) -> Any:
        given = [] if reads is None else [_moved(reads, writes, own) for own in states]
        if self._mixer.argument is None:
            return self._call_with_attributes(args, kwargs, given, writes, states)
        cache = self._fresh_cache(num_rows) if reads is None else self._used_cache(given)
        if self._position is not None and len(args) > self._position:
            args[self._position] = cache
        else:
            kwargs[self._mixer.argument] = cache
        result = self._own(*args, **kwargs)
        for i, path in enumerate(self._mixer.paths):
            _keep(get(cache, path), given[i] if given else None, writes, states[i])
        return result

    def _call_with_attributes(
        self, args: list[Any], kwargs: dict[str, Any], given: list[torch.Tensor], writes: Slots, states: Sequence[torch.Tensor]
    ) -> Any:
        places = self._mixer.attributes
        for i, (module, name) in enumerate(places):
            setattr(module, name, given[i] if given else None)
        result = self._own(*args, **kwargs)
        for i, (module, name) in enumerate(places):
            _keep(getattr(module, name), given[i] if given else None, writes, states[i])
            setattr(module, name, None)
        return result

    def _fresh_cache(self, num_rows: int) -> Any:
        cache = copy_along(self._mixer.fresh, self._mixer.paths)
        for path, state in zip(self._mixer.paths, self._fresh_states, strict=True):
            if state is not None:
                put(cache, path, state.expand(num_rows, *state.shape[1:]).clone())
        return cache

    def _used_cache(self, given: list[torch.Tensor]) -> Any:
        if self._used is None:
            self._used = copy_along(self._mixer.used, self._mixer.paths)
        for path, state in zip(self._mixer.paths, given, strict=True):
            put(self._used, path, state)
        return self._used


def _found(cache: Any, path: Any) -> torch.Tensor | None:
    """A state that a cache has before a sequence's first token."""
    try:
        value = get(cache, path)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return value if isinstance(value, torch.Tensor) else None


def _moved(reads: Slots, writes: Slots, states: torch.Tensor) -> torch.Tensor:
    """The rows' states [B, ...] to be changed in place: already where they will be, if those slots follow one another."""
    if reads is writes and writes.first is not None:
        return writes.take(states)
    if writes.first is None:
        return states.index_select(0, reads.index)
    target = writes.take(states)
    target.copy_(reads.take(states))
    return target


def _keep(state: torch.Tensor, given: torch.Tensor | None, writes: Slots, states: torch.Tensor) -> None:
    if state is not given or writes.first is None:
        writes.put(states, state)


def _of_group(value: Any, group: StateGroup, num_tokens: int) -> Any:
    """An argument [1, T, ...] as its group has it, [B, L, ...]; others as they are."""
    if isinstance(value, torch.Tensor):
        if value.ndim < 2 or value.shape[0] != 1 or value.shape[1] != num_tokens:
            return value
        own = value if group.places is None else value.index_select(1, group.places)
        return own.reshape(group.num_rows, group.length, *value.shape[2:])
    if isinstance(value, (tuple, list)):
        return type(value)(_of_group(item, group, num_tokens) for item in value)
    return value


def _token(value: Any, index: int, form: tuple[int, int]) -> Any:
    """Token `index` of each row of an argument [B, L, ...]."""
    if isinstance(value, torch.Tensor):
        return value[:, index : index + 1] if value.ndim >= 2 and value.shape[:2] == form else value
    if isinstance(value, (tuple, list)):
        return type(value)(_token(item, index, form) for item in value)
    return value


def _row_by_row(groups: Sequence[StateGroup]) -> Iterator[StateGroup]:
    for group in groups:
        if group.num_rows == 1:
            yield group
            continue
        places = group.places
        if places is None:
            places = torch.arange(group.num_rows * group.length, dtype=torch.int64, device=group.writes.index.device)
        for i in range(group.num_rows):
            yield replace(
                group,
                places=places[i * group.length : (i + 1) * group.length],
                num_rows=1,
                reads=None if group.reads is None else _one(group.reads, i),
                writes=_one(group.writes, i),
            )


def _one(slots: Slots, i: int) -> Slots:
    return Slots(slots.index[i : i + 1], None if slots.first is None else slots.first + i)
