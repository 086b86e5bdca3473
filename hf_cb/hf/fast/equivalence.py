"""What equivalence checks are made of: numbers to try them with, stand-ins for their parts, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ArithmeticError)
"""What code that is not what it seems may raise."""
_FAR = 1 << 20  # tokens: some scale by the position


class StandIn:
    """In a part's place: notes what it is given, and answers with something else of which it is known how it goes on."""

    def __init__(self, answer: torch.Tensor, more: tuple[Any, ...] = ()) -> None:
        """`more`: what it returns beside the answer."""
        self.answer = answer
        self.given: list[torch.Tensor] = []
        self.others: dict[str, Any] = {}
        self._more = more

    def __call__(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        """Note what is given, and answer with the noise."""
        self.given.append(hidden_states.clone())
        self.others = others
        answer = self.answer.clone()  # it may be written to
        return (answer, *self._more) if self._more else answer

    def was_given(self, wanted: torch.Tensor) -> bool:
        """Whether it was called once, with exactly these numbers."""
        return len(self.given) == 1 and same(self.given[0], wanted)


def scales(dtype: torch.dtype) -> tuple[float, ...]:
    """What numbers are multiplied by: some modules clip what is large. The square of the largest is finite."""
    return (1.0, 50.0) if dtype == torch.float16 else (1.0, 1e6)


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random numbers of this shape, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu").to(dtype)


def near_and_far(kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments as they are, and with other positions: far away, and at all distances up to there."""
    return [{**kwargs}, *({name: _moved(value, move) for name, value in kwargs.items()} for move in (_far, _spread))]


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return move(value) if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) else value


def _far(positions: torch.Tensor) -> torch.Tensor:
    return positions + _FAR


def _spread(positions: torch.Tensor) -> torch.Tensor:
    return spread(positions.shape[-1]).to(positions).expand(positions.shape)


def spread(count: int, most: int = _FAR) -> torch.Tensor:
    """Positions [count] from 0 on, ever farther apart."""
    return torch.logspace(0, math.log2(most), count, base=2, dtype=torch.float32, device="cpu").long() - 1


def same(one: Any, other: torch.Tensor) -> bool:
    """Whether they are the same bits."""
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def agree(got: Sequence[Any], wanted: Sequence[Any], half: float = 2e-4) -> bool:
    """Whether all are equal but for some last bits. `half`: the mean error in half precision, relative to the mean."""
    return len(got) == len(wanted) and all(_agrees(one, other, half) for one, other in zip(got, wanted, strict=True))


def _agrees(one: Any, other: Any, half: float) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = one.double(), other.double()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return False
    error, largest = (a - b).abs(), b.abs().amax()
    if one.dtype == torch.float32:
        return bool(error.amax() <= 2e-6 * largest)
    return bool(error.mean() <= half * b.abs().mean()) and bool(error.amax() <= 0.02 * largest)
