"""The protocol that every attention backend meets, a lazy registry of them, and the choice between them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from hf_cb.attention.step import AttentionStep, LayerKV, LayerSpec
from hf_cb.errors import InvalidArgumentError


@runtime_checkable
class AttentionBackend(Protocol):
    """Varlen attention over blocks.

    One object may serve many engines at once, so it keeps no state between calls. Whatever a step's layers can share (gather
    indices, masks, groups of rows) is made once a step by `plan`, and passed back to `attend` for layers of an equal spec.

    A backend that wants blocks of a certain size says so: `block_multiple` (1 if it has no such attribute), of which a block
    must hold a multiple of tokens, and `block_size` (16), where the user names none. One that keeps keys and values in another
    dtype than the layer's, `spec.kv_dtype`, has a method `can_store(spec) -> bool`. And one whose `plan` and `attend` wait for
    nothing from the device, and read no `key_lens`, may say `captures = True`: they may become part of a CUDA graph.
    """

    name: str

    def why_not(self, spec: LayerSpec) -> str | None:
        """None if this backend can serve such a layer on this machine, else the reason in a few words."""
        ...

    def plan(self, step: AttentionStep, spec: LayerSpec) -> object:
        """What the layers with this spec share in this step."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        spec: LayerSpec,
        step: AttentionStep,
        plan: object,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into their slots, then attend.

        q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] (any strides); sinks [Hq], a learned logit per head that takes part in the
        softmax and has no value. Returns [T, Hq, Dv] in q's dtype. Reads no slot that the step's rows don't own: the rest may
        hold NaN.
        """
        ...


# name -> "module:attribute" of an AttentionBackend instance or class without arguments; imported at first use, so that a
# package that is not installed costs nothing. The order is the order of choice.
_REGISTRY: dict[str, str] = {
    "native_cpu": "hf_cb.attention.native:NativeCPUBackend",
    "torch_cpu": "hf_cb.attention.cpu:TorchCPUBackend",
    "flash_attn_3": "hf_cb.attention.flash:FlashAttention3",
    "flash_attn_4": "hf_cb.attention.flash:FlashAttention4",
    "flash_attn_2": "hf_cb.attention.flash:FlashAttention2",
    "torch_varlen": "hf_cb.attention.varlen:TorchVarlen",
    "torch_grouped": "hf_cb.attention.grouped:GroupedTorch",
    "reference": "hf_cb.attention.reference:ReferenceBackend",
}


def block_multiple(backend: AttentionBackend) -> int:
    """Blocks for it hold a multiple of so many tokens."""
    return getattr(backend, "block_multiple", 1)


def default_block_size(backend: AttentionBackend) -> int:
    """Tokens of a block for it, where the user names no number."""
    return getattr(backend, "block_size", 16)


def can_be_captured(backend: AttentionBackend) -> bool:
    """Whether its calls may become part of a CUDA graph."""
    return getattr(backend, "captures", False)


def register_attention_backend(name: str, target: str) -> None:
    """Add a backend; `target` is "module:Class". Names already taken are refused."""
    if name in _REGISTRY:
        raise InvalidArgumentError(f"name: the attention backend {name!r} is registered already")
    _REGISTRY[name] = target


def attention_backend_names() -> tuple[str, ...]:
    """Every registered name, in the order of choice."""
    return tuple(_REGISTRY)


def load_attention_backend(name: str) -> AttentionBackend:
    """Import and make the backend of that name."""
    if name not in _REGISTRY:
        raise InvalidArgumentError(f"attention_backend: takes one of {', '.join(_REGISTRY)}; got {name!r}")
    module, _, attribute = _REGISTRY[name].partition(":")
    backend = getattr(importlib.import_module(module), attribute)()
    assert isinstance(backend, AttentionBackend)
    return backend


def _why_not_stored(backend: AttentionBackend, spec: LayerSpec) -> str | None:
    if spec.stored_dtype == spec.dtype or getattr(backend, "can_store", lambda spec: False)(spec):
        return None
    own, stored = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, spec.stored_dtype))
    return f"keeps no keys and values of {own} in {stored}"


def choose_attention_backend(
    specs: Sequence[LayerSpec], name: str | None = None, block_size: int | None = None
) -> tuple[AttentionBackend, str]:
    """The first backend in the registry that serves every layer, in blocks of `block_size` tokens if that is given; or the one
    named. Returns it and the reason for the choice.

    Raises InvalidArgumentError when the named one cannot, with its reason.
    """
    refusals: list[str] = []
    for candidate in (name,) if name else attention_backend_names():
        backend = load_attention_backend(candidate)
        reason = next((r for spec in specs if (r := backend.why_not(spec) or _why_not_stored(backend, spec))), None)
        if reason is None and block_size is not None and block_size % block_multiple(backend):
            reason = f"takes blocks of a multiple of {block_multiple(backend)} tokens, and block_size is {block_size}"
        if reason is None:
            return backend, "named in the configuration" if name else "; ".join([*refusals, f"{candidate} serves every layer"])
        refusals.append(f"{candidate}: {reason}")
    raise InvalidArgumentError(f"attention_backend: none can serve this model ({'; '.join(refusals)})")
