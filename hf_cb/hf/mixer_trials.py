"""What a mixer can do with several tokens and several rows at once, tried on the module alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_cb.core.output import RowMemory, ScheduledRow
from hf_cb.hf.twins.attention import UnservableLayerError
from hf_cb.hf.twins.mixers import FLAWS, Mixer
from hf_cb.hf.twins.mixing import Mixing
from hf_cb.runtime.state_pool import StatePool, group_states

_Part = tuple[int, int, int | None, int]
"""First token and number of tokens; the slot that it reads, None for a sequence that begins; the slot that it writes."""


def try_mixers(mixers: Sequence[Mixer]) -> None:
    """Note of each whether it `continues` and `batches`. Raises UnservableLayerError for one that does neither well."""
    for mixer in mixers:
        with _Trial.of(mixer) as trial:
            trial.judge()


class _Trial:
    """Packs tokens of the row that the mixer was watched on."""

    def __init__(self, mixer: Mixer, mixing: Mixing) -> None:
        self._mixer, self._mixing = mixer, mixing
        args, kwargs = mixer.call
        self._num_tokens = next(
            value.shape[1] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim >= 3
        )

    @classmethod
    @contextmanager
    def of(cls, mixer: Mixer) -> Iterator[_Trial]:
        """Serves the mixer from slots that hold no numbers yet."""
        pool = StatePool([mixer.specs], 4)
        for states in pool.states[0]:
            if states.is_floating_point():
                states.fill_(float("nan"))
        mixing = Mixing([mixer], pool)
        try:
            yield cls(mixer, mixing)
        finally:
            mixing.end()
            mixing.undo()

    def judge(self) -> None:
        """See `try_mixers`."""
        if not any(self._works(continues, "continues", self._in_parts) for continues in (True, False)):
            raise UnservableLayerError(f"{self._mixer.name} gives another answer for parts of a row than for the whole")
        if not any(self._works(batches, "batches", self._in_company) for batches in (True, False)):
            raise UnservableLayerError(f"{self._mixer.name} gives another answer for a row in company than alone")

    def _works(self, value: bool, ability: str, check: Any) -> bool:
        setattr(self._mixer, ability, value)
        try:
            return bool(check())
        except FLAWS:
            if not value:
                raise
            return False

    def _in_parts(self) -> bool:
        num_tokens, first = self._num_tokens, self._num_tokens * 2 // 3
        whole = self._run((0, num_tokens, None, 0))
        parts = [
            self._run((0, first, None, 1)),
            self._run((first, num_tokens - first - 1, 1, 2)),
            self._run((num_tokens - 1, 1, 2, 3)),
        ]
        return self._alike(torch.cat(parts, 1), whole)

    def _in_company(self) -> bool:
        length = self._num_tokens // 4
        first, second = (0, length, None, 0), (2 * length, length, None, 1)
        after, after_second = (length, 1, 0, 2), (3 * length, 1, 1, 3)
        alone = [self._run(part) for part in (first, second, after, after_second)]
        together = [self._run(first, second), self._run(after, after_second)]
        return self._alike(torch.cat(together, 1), torch.cat(alone, 1))

    def _alike(self, got: torch.Tensor, want: torch.Tensor) -> bool:
        error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-9)
        return bool(error < (5e-5 if want.dtype == torch.float32 else 5e-2))

    def _run(self, *parts: _Part) -> torch.Tensor:
        """The mixer's output [1, T, ...] for these parts, packed."""
        rows = [
            ScheduledRow(i, 0 if read is None else 1, (0,) * n, RowMemory((), read, ((n + (read is not None), write),)), 0)
            for i, (_, n, read, write) in enumerate(parts)
        ]
        args, kwargs = ([self._packed(value, parts) for value in given] for given in self._given())
        self._mixing.begin(group_states(rows, self._mixer.specs[0].device), sum(n for _, n, _, _ in parts))
        names = self._mixer.call[1].keys()
        out = self._mixer.module.forward(*args, **dict(zip(names, kwargs, strict=True)))
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def _given(self) -> tuple[Sequence[Any], Sequence[Any]]:
        args, kwargs = self._mixer.call
        return args, list(kwargs.values())

    def _packed(self, value: Any, parts: Sequence[_Part]) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == (1, self._num_tokens):
            return torch.cat([value[:, first : first + n] for first, n, _, _ in parts], 1)
        if isinstance(value, (tuple, list)):
            return type(value)(self._packed(item, parts) for item in value)
        return value
