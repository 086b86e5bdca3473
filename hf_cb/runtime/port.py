"""AttentionPort: where a twin's attention modules meet the engine.

Every module of the twin holds the same port, so that the registered attention function finds the current step through the
module that calls it: no globals, no thread-locals, and many engines in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec
from hf_cb.runtime.kv_cache import KVCache


@dataclass(slots=True)
class _Layer:
    """An attention module in service. It is kept so that its id, the key it is found by, stays its own."""

    module: object
    spec: LayerSpec
    index: int
    group: int  # of the cache's layout


class Together(NamedTuple):
    """What the attention of several layers takes in the current step."""

    caches: list[torch.Tensor]  # keys and values of each
    step: AttentionStep
    plan: object
    wanted: torch.Tensor | None  # see AttentionPort.begin


class AttentionPort:
    """Serves the attention calls of one twin, one step at a time, on one thread."""

    def __init__(
        self, modules: Sequence[object], specs: Sequence[LayerSpec], backend: AttentionBackend, cache: KVCache
    ) -> None:
        self._backend = backend
        self._cache = cache
        group_of = {layer: group for group, layers in enumerate(cache.layout.groups) for layer in layers}
        self._layers = {
            id(module): _Layer(module, spec, index, group_of[index])
            for index, (module, spec, _) in enumerate(zip(modules, specs, cache.layers, strict=True))
        }
        self._steps: tuple[AttentionStep, ...] = ()
        self._steps_on: dict[tuple[int, torch.device], AttentionStep] = {}  # of a model on several devices
        self._plans: dict[tuple[int, LayerSpec], object] = {}
        self._wanted: torch.Tensor | None = None
        self.calls: list[int] = []  # how often each layer called in the current step, in layer order

    def begin(self, steps: tuple[AttentionStep, ...], wanted: torch.Tensor | None = None) -> None:
        """Make `steps`, one for each group of layers, those that the modules' calls belong to. `wanted` [n] int64: the tokens
        of the step whose logits anybody looks at; None: all."""
        self._steps = steps
        self._wanted = wanted
        self._steps_on.clear()
        self._plans.clear()
        self.calls = [0] * len(self._layers)

    def end(self) -> None:
        """Forget the step: a call outside one is a mistake and fails."""
        self._steps = ()
        self._wanted = None
        self._steps_on.clear()
        self._plans.clear()

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer's attention in the current step: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]."""
        layer = self._layers[id(module)]
        step, plan = self._enter([layer])
        return self._backend.attend(LayerCall(q, k, v, self._cache.layers[layer.index], layer.spec, step, plan, sinks))

    def together(self, modules: Sequence[object]) -> Together | None:
        """For those who attend for all of these modules, of one spec, in one call, and do it now. None: their steps differ."""
        layers = [self._layers[id(module)] for module in modules]
        first = layers[0]
        if any(layer.group != first.group for layer in layers):
            return None
        step, plan = self._enter(layers)
        caches = [tensor for layer in layers for tensor in self._cache.layers[layer.index]]
        return Together(caches, step, plan, self._wanted)

    def _enter(self, layers: list[_Layer]) -> tuple[AttentionStep, object]:
        """The current step for layers of one group and spec that are called now, and what the backend has planned for it."""
        if not self._steps:
            raise RuntimeError("an attention module of the twin was called outside a step")
        layer = layers[0]
        step, key = self._step_on(layer.group, layer.spec.device), (layer.group, layer.spec)
        for one in layers:
            self.calls[one.index] += 1
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._backend.plan(step, layer.spec)
        return step, plan

    def _step_on(self, group: int, device: torch.device) -> AttentionStep:
        step = self._steps[group]
        if step.block_table.device == device:
            return step
        moved = self._steps_on.get((group, device))
        if moved is None:
            moved = self._steps_on[group, device] = step.to(device)
        return moved
