"""Succession: whether the layers of a twin follow each other, and what the model does with the last one's answer.

The twin's own code runs with stand-ins for all layers, and every operation on a tensor outside of them is seen: there may be
none between two layers, and none that takes the answer of another than the last. So nothing hides behind weights that are zero
today, nor behind tokens or positions that the trial doesn't have. What is done with the last answer is tried with several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_cb.hf.fast.equivalence import noise, same, spread
from hf_cb.hf.twins.forwards import replaced
from hf_cb.runtime.model_runner import Forward

_FAR = 1 << 15  # tokens: some rotary embeddings keep a table as long as the farthest position


@dataclass(frozen=True, slots=True)
class Succession:
    """Which of some layers, in the order of their calls, may be one call."""

    follows: tuple[bool, ...]  # whether each but the first takes what the one before gives, which nobody else sees
    selects: bool  # whether of what the last one gives only the tokens matter whose logits are wanted

    @classmethod
    def of(cls, twin: nn.Module, layers: Sequence[nn.Module], x: torch.Tensor, forward: Forward) -> Succession:
        """`x` [1, T, width]: as the first is given. `forward`: of the twin."""
        inner = {module for layer in layers for module in layer.modules()}
        before = [(module, {**vars(module)}, {**module._buffers}) for module in twin.modules() if module not in inner]
        near, far = torch.arange(x.shape[1], device=x.device, dtype=torch.int64), spread(x.shape[1], _FAR).to(x.device)
        try:
            # Far positions first: rotary embeddings that follow the length are themselves again after the others.
            tried = [_Check(layers, x, loud, forward, where).succession() for where in (far, near) for loud in (False, True)]
        except Exception:  # of foreign code, which may raise anything where it is not meant to be
            return cls((False,) * (len(layers) - 1), False)
        finally:
            for module, values, buffers in before:  # tables that grew
                vars(module).update(values)
                module._buffers.update(buffers)
        follows = tuple(map(all, zip(*(one.follows for one in tried), strict=True)))
        return cls(follows, all(one.selects for one in tried))


class _Watch(TorchDispatchMode):
    """Counts the operations on tensors, and notes whether one takes a tensor that is nobody else's business."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.hidden: set[int] = set()  # addresses of memory
        self.saw_hidden = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        for value in tree_iter((args, kwargs)) if self.hidden else ():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.hidden:
                self.saw_hidden = True
        return func(*args, **(kwargs or {}))


class _StandIn:
    """What stands in a layer's place."""

    def __init__(self, answer: torch.Tensor, watch: _Watch) -> None:
        self.answer = answer
        self.given: torch.Tensor | None = None
        self.turns: object = None  # the positions', as rotary embeddings have them
        self.calls = 0
        self.began = self.ended = 0  # operations so far
        self._watch = watch

    def __call__(self, hidden_states: torch.Tensor, *, position_embeddings: object, **_: Any) -> torch.Tensor:
        """Note what is given, and answer with noise."""
        self.calls += 1
        self.given, self.turns = hidden_states, position_embeddings
        self.began = self.ended = self._watch.count
        return self.answer

    def follows(self, other: _StandIn) -> bool:
        """Whether it was called right after the other, with its answer."""
        return (
            (self.calls, other.calls) == (1, 1)
            and self.began == other.ended
            and self.given is other.answer
            and self.turns is other.turns
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    layers: Sequence[nn.Module]
    x: torch.Tensor
    loud: bool
    forward: Forward
    positions: torch.Tensor

    def succession(self) -> Succession:
        """What the run has shown of the layers."""
        everything = torch.arange(len(self.positions), device=self.x.device, dtype=torch.int64)
        some = everything[[-1, len(everything) // 2]]
        count = len(self.layers)
        answers, other = [self._answer(1 + i) for i in range(count)], self._answer(1 + count)
        seen, watch, logits = self._run(answers, everything)
        follows = [not watch.saw_hidden and one.follows(before) for before, one in pairwise(seen)]
        # Every token's logits follow the last answer: else the next comparison would be of what never changes.
        heard = bool((self._run([*answers[:-1], other], everything)[2] != logits).any(-1).all())
        blurred = other.clone()
        blurred[:, some] = answers[-1][:, some]
        selects = same(self._run([*answers[:-1], blurred], some)[2], self._run(answers, some)[2])
        return Succession(tuple(follows), heard and selects and not watch.saw_hidden)

    def _answer(self, seed: int) -> torch.Tensor:
        answer = noise(self.x.shape, torch.float32, seed)
        if self.loud:
            most = torch.finfo(self.x.dtype).max
            answer = (answer * 1e6).clamp(-most, most)
        return answer.to(self.x)

    def _run(self, answers: list[torch.Tensor], indices: torch.Tensor) -> tuple[list[_StandIn], _Watch, torch.Tensor]:
        """The stand-ins with what they were given, and the logits [n, vocab]."""
        watch = _Watch()
        answers = [answer.clone() for answer in answers]  # they may be written to
        watch.hidden = {answer.untyped_storage().data_ptr() for answer in answers[:-1]}
        stand_ins = [_StandIn(answer, watch) for answer in answers]
        ids = torch.arange(len(self.positions), device=self.x.device, dtype=torch.int64) % 2
        with replaced(dict(zip(self.layers, stand_ins, strict=True))), watch:
            logits = self.forward(ids[None], self.positions[None], indices)
        return stand_ins, watch, logits.clone()
