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


class AttentionPort:
    """Serves the attention calls of one twin, one step at a time, on one thread."""

    def __init__(
        self, modules: Sequence[object], specs: Sequence[LayerSpec], backend: AttentionBackend, cache: KVCache
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._layers = {
            id(module): _Layer(module, spec, index)
            for index, (module, spec, _) in enumerate(zip(modules, specs, cache.layers, strict=True))
        }
        self._step: AttentionStep | None = None
        self._plans: dict[LayerSpec, object] = {}
        self.calls: list[int] = []  # how often each layer called in the current step, in layer order; see `serve`

    def begin(self, step: AttentionStep) -> None:
        """Make `step` the one that the modules' calls belong to."""
        self._step = step
        self._plans.clear()
        self.calls = [0] * len(self._layers)

    def end(self) -> None:
        """Forget the step: a call outside one is a mistake and fails."""
        self._step = None
        self._plans.clear()

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer's attention in the current step: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]."""
        step = self._step
        if step is None:
            raise RuntimeError("an attention module of the twin was called outside a step")
        key = id(module)
        layer = self._layers[key]
        self.calls[layer.index] += 1
        plan = self._plans.get(layer.spec)
        if plan is None:
            plan = self._plans[layer.spec] = self._backend.plan(step, layer.spec)
        return self._backend.attend(q, k, v, self._cache.layers[layer.index], layer.spec, step, plan, sinks)
