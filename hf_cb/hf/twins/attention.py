"""The attention function that transformers calls inside a twin, and the observer that learns what its layers ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from hf_cb.attention.step import LayerSpec

IMPLEMENTATION = "hf_cb"
_PORT = "_hf_cb_port"


class Port(Protocol):
    """What stands behind a twin's attention modules: the observer at first, then the runtime's port."""

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]."""
        ...


def register() -> None:
    """Make the name known to transformers, once a process. It has no mask function, so models build no masks for it."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


def set_port(model: nn.Module, port: Port) -> None:
    """Point every module of a twin at `port`: whichever of them calls the attention function finds it."""
    for module in model.modules():
        object.__setattr__(module, _PORT, port)


def port_of(module: nn.Module) -> Port:
    """The port that `set_port` put behind a module."""
    return module.__dict__[_PORT]  # type: ignore[no-any-return]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    port = module.__dict__[_PORT]
    if isinstance(port, Observer):
        port.observe(module, query, key, value, attention_mask, kwargs)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return port.serve(module, q, k, v, kwargs.get("s_aux"))[None], None


class UnservableLayerError(Exception):
    """A layer asked for something that no backend of ours does. The message is the reason."""


@dataclass
class Observer:
    """Learns each layer's spec from its first call, in call order. Attends to nothing: gives zeros of the right shape."""

    modules: list[nn.Module] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)

    def observe(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Note one call, or raise UnservableLayerError."""
        if any(module is known for known in self.modules):
            raise UnservableLayerError("an attention layer attends more than once a step")
        if attention_mask is not None:
            raise UnservableLayerError("an attention layer adds a mask or bias of its own")
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise UnservableLayerError("an attention layer is not causal")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnservableLayerError("an attention layer reshapes the packed tokens")
        if torch.is_autocast_enabled(query.device.type):  # the probe itself runs without
            raise UnservableLayerError("its forward runs under autocast (mixed precision, as accelerate's prepare sets it up)")
        scale = kwargs.get("scaling")
        self.modules.append(module)
        self.specs.append(
            LayerSpec(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=key.shape[3],
                value_head_size=value.shape[3],
                dtype=key.dtype,
                device=key.device,
                scale=float(scale) if scale is not None else 1 / math.sqrt(query.shape[3]),
                window=kwargs.get("sliding_window") or None,
                chunk=_chunk(module),
                softcap=kwargs.get("softcap") or None,
                has_sinks=kwargs.get("s_aux") is not None,
            )
        )

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Zeros: only the shapes matter while observing."""
        return q.new_zeros((*q.shape[:2], v.shape[2]))


def _chunk(module: nn.Module) -> int | None:
    """Chunked attention is told to the mask builder alone, not to the attention function: the config names its layers."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if layer_types is None or index is None or layer_types[index] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]
