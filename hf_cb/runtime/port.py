"""AttentionPort: where a twin's attention modules meet the engine.

Every module of the twin holds the same port, so that the registered attention function finds the current step through the
module that calls it: no globals, no thread-locals, and many engines in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerSpec
from hf_cb.runtime.kv_cache import KVCache


@dataclass(slots=True)
class _Layer:
    """An attention module in service. It is kept so that its id, the key it is found by, stays its own."""

    module: object
    spec: LayerSpec
    index: int
    group: int  # of the cache's layout


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
        self.calls: list[int] = []  # how often each layer called in the current step, in layer order; see `serve`

    def begin(self, steps: tuple[AttentionStep, ...]) -> None:
        """Make `steps`, one for each group of layers, those that the modules' calls belong to."""
        self._steps = steps
        self._steps_on.clear()
        self._plans.clear()
        self.calls = [0] * len(self._layers)

    def end(self) -> None:
        """Forget the step: a call outside one is a mistake and fails."""
        self._steps = ()
        self._steps_on.clear()
        self._plans.clear()

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer's attention in the current step: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]."""
        if not self._steps:
            raise RuntimeError("an attention module of the twin was called outside a step")
        layer = self._layers[id(module)]
        step, key = self._step_on(layer.group, layer.spec.device), (layer.group, layer.spec)
        self.calls[layer.index] += 1
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._backend.plan(step, layer.spec)
        return self._backend.attend(q, k, v, self._cache.layers[layer.index], layer.spec, step, plan, sinks)

    def _step_on(self, group: int, device: torch.device) -> AttentionStep:
        step = self._steps[group]
        if step.block_table.device == device:
            return step
        moved = self._steps_on.get((group, device))
        if moved is None:
            moved = self._steps_on[group, device] = step.to(device)
        return moved
