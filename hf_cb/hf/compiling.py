"""torch.compile for the layers of a twin, one by one: what lies between attention and products becomes a few kernels.

The layers are the repeated ones: the children of the module list that has an attention module in each. All of them run what is
compiled for the first, for any number of tokens (and once more for a single one). Attention, and products over packed weights,
stay what they are (`opaque.py`).
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_cb.hf.attention import make_attention_opaque
from hf_cb.hf.opaque import call, make_opaque
from hf_cb.runtime.model_runner import Forward

logger = logging.getLogger("hf_cb")

NOT_ASKED_FOR = "not asked for"


class CompiledLayers:
    """The compiled layers of a twin, and why there are none."""

    def __init__(self) -> None:
        self.reason = NOT_ASKED_FOR
        self._layers: list[nn.Module] = []
        self._forwards: list[tuple[nn.Module, Any]] = []  # of packed products, as they were

    def compile(self, twin: nn.Module, attention: Sequence[nn.Module], try_out: Callable[[], object]) -> None:
        """Compile, and run `try_out`, which raises what goes wrong; then the layers are as they were, and `reason` says why."""
        began = time.perf_counter()
        self._layers = repeated_layers(twin, attention)
        if not self._layers:
            self.reason = "no list of modules with attention in each"
            return
        if any("_hf_hook" in vars(module) for module in twin.modules()):
            self.reason, self._layers = "accelerate's hooks move the model's tensors", []
            return
        for module in attention:
            make_attention_opaque(module)
        for layer in self._layers:
            self._forwards += [(module, vars(module)["forward"]) for module in layer.modules() if "forward" in vars(module)]
        for module, forward in self._forwards:
            make_opaque(module, forward)
            vars(module)["forward"] = types.MethodType(_opaque_product, module)
        for layer in self._layers:
            layer.compile(dynamic=True)
        try:
            with torch.inference_mode():  # as the engine runs it
                try_out()
        except Exception as error:  # whatever torch.compile may raise: it has many ways to fail
            self.give_up(error)
            return
        self.reason = f"{len(self._layers)} layers, in {time.perf_counter() - began:.1f} s"

    def give_up(self, error: Exception) -> None:
        """Leave the layers to their own forward."""
        brief = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        logger.warning("torch.compile is not used: the model's layers don't run with it (%s)", brief)
        self.reason = f"failed ({brief})"
        for layer in self._layers:
            layer._compiled_call_impl = None
        for module, forward in self._forwards:
            if "forward" in vars(module):  # its weights are still packed
                vars(module)["forward"] = forward
        self._layers, self._forwards = [], []

    def guarded(self, forward: Forward) -> Forward:
        """`forward`, and once more without what was compiled where the compiler fails later on: a step may run twice."""
        if not self._layers:
            return forward
        from torch._dynamo.exc import TorchDynamoException

        def run(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
            try:
                return forward(input_ids, position_ids, logits_indices)
            except TorchDynamoException as error:
                self.give_up(error)
            return forward(input_ids, position_ids, logits_indices)

        return run


def repeated_layers(twin: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The children of the outermost module list that has all attention modules, some in each child; none: []."""
    wanted = set(attention)
    for module in twin.modules():
        if isinstance(module, nn.ModuleList):
            own = [wanted.intersection(child.modules()) for child in module]
            if all(own) and set().union(*own) == wanted:
                return list(module)
    return []


def _opaque_product(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A packed layer's forward."""
    width = module.nf if hasattr(module, "nf") else module.out_features  # Conv1D, Linear
    return call(module, [x], [*x.shape[:-1], width])
