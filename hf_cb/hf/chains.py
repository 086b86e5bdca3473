"""Chains: whether the layers of a twin follow each other, and what the model does with the last one's answer.

The twin's own code runs with stand-ins for all layers (`trials.py`), so that what it does between and behind them is seen bare,
with answers of ordinary and of enormous size, at positions near and far. Weights that are zero now, and something else later,
can hide nothing: modules that have any must be called before the first layer or behind the last one, and those that hold the
layers have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cb.hf.forwards import replaced
from hf_cb.hf.trials import ERRORS, FAR, StandIn, noise, same
from hf_cb.runtime.model_runner import Forward


@dataclass(frozen=True, slots=True)
class Chain:
    """Of some layers in the order of their calls."""

    follows: tuple[bool, ...]  # whether each but the first takes what the one before gives, which nobody else sees
    selects: bool  # whether of what the last one gives only the tokens matter whose logits are wanted

    @classmethod
    def of(cls, twin: nn.Module, layers: Sequence[nn.Module], x: torch.Tensor, forward: Forward) -> Chain:
        """`x` [1, T, width]: as the first is given. `forward`: of the twin."""
        apart = cls((False,) * (len(layers) - 1), False)
        inner = {module for layer in layers for module in layer.modules()}
        outer = [module for module in twin.modules() if module not in inner and _has_numbers(module)]
        if any(not inner.isdisjoint(module.modules()) for module in outer):
            return apart
        positions = torch.arange(x.shape[1], device=x.device)
        try:
            tried = [  # far positions first: rotary embeddings that follow the length are then themselves again
                _Trial(layers, outer, x, loud, forward, where).chain()
                for where in (positions + FAR, positions)
                for loud in (False, True)
            ]
        except ERRORS:
            return apart
        follows = tuple(map(all, zip(*(one.follows for one in tried), strict=True)))
        return cls(follows, all(one.selects for one in tried))


def _has_numbers(module: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    layers: Sequence[nn.Module]
    outer: Sequence[nn.Module]  # with numbers of their own
    x: torch.Tensor
    loud: bool
    forward: Forward
    positions: torch.Tensor

    def chain(self) -> Chain:
        """What is seen here."""
        everything = torch.arange(len(self.positions), device=self.x.device)
        some = everything[[-1, len(everything) // 2]]
        count = len(self.layers)
        answers, others = ([self._answer(first + i) for i in range(count)] for first in (1, 1 + count))
        seen, logits = self._run(answers, everything)
        turns = [stand_in.others["position_embeddings"] for stand_in in seen]
        # The last answer alone decides, of every token: else the next comparisons would be of what never changes.
        decides = same(self._run([*others[:-1], answers[-1]], everything)[1], logits) and bool(
            (self._run([*answers[:-1], others[-1]], everything)[1] != logits).any(-1).all()
        )
        follows = (seen[i].was_given(answers[i - 1]) and turns[i] is turns[i - 1] for i in range(1, count))
        blurred = others[-1].clone()
        blurred[:, some] = answers[-1][:, some]
        selects = same(self._run([*answers[:-1], blurred], some)[1], self._run(answers, some)[1])
        return Chain(tuple(decides and one for one in follows), decides and selects)

    def _answer(self, seed: int) -> torch.Tensor:
        answer = noise(self.x.shape, torch.float32, seed)
        if self.loud:
            most = torch.finfo(self.x.dtype).max
            answer = (answer * 1e6).clamp(-most, most)
        return answer.to(self.x.dtype)

    def _run(self, answers: list[torch.Tensor], indices: torch.Tensor) -> tuple[list[StandIn], torch.Tensor]:
        """The stand-ins with what they were given, and the logits [n, vocab]. Raises ValueError for numbers between layers."""
        stand_ins = [StandIn(answer) for answer in answers]

        def beside(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                called = [bool(stand_in.given) for stand_in in stand_ins]
                if any(called) and not all(called):
                    raise ValueError("a module with numbers of its own between layers")
                return forward(*args, **kwargs)

            return run

        forwards = {module: beside(module.forward) for module in self.outer}
        with replaced({**forwards, **dict(zip(self.layers, stand_ins, strict=True))}):
            return stand_ins, self.forward(self.positions[None] % 2, self.positions[None], indices)
