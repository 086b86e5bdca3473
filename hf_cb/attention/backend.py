"""AttentionBackend: what every backend is, a lazy registry of them, and the choice between them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec
from hf_cb.errors import InvalidArgumentError


class AttentionBackend(ABC):
    """Varlen attention over blocks. Subclass it, and say by the attributes what the backend is able to do.

    One object may serve many engines at once, so it keeps no state between calls. Whatever a step's layers can share (gather
    indices, masks, groups of rows) is made once a step by `plan`, and handed to `attend` for layers of an equal spec.
    """

    name: str
    block_multiple = 1
    """A block must hold a multiple of so many tokens."""
    block_size = 16
    """Tokens of a block where the user names no number."""
    captures = False
    """Whether `plan` and `attend` wait for nothing from the device and read no `key_lens`: they may be part of a CUDA graph."""
    fuses = False
    """Whether whole layers may be computed by the compiled kernels round this backend's attention."""

    @abstractmethod
    def why_not(self, spec: LayerSpec) -> str | None:
        """None if this backend can serve such a layer on this machine, else the reason in a few words."""

    def can_store(self, spec: LayerSpec) -> bool:
        """Whether it can keep keys and values in `spec.kv_dtype`, another dtype than the layer's."""
        return False

    @abstractmethod
    def plan(self, step: AttentionStep, spec: LayerSpec) -> object:
        """What the layers with this spec share in this step."""

    @abstractmethod
    def attend(self, call: LayerCall) -> torch.Tensor:
        """Write the new keys and values into their slots, then attend: [T, Hq, Dv] in q's dtype. Reads no slot that the step's
        rows don't own: the rest may hold NaN."""

    def refusal(self, spec: LayerSpec, block_size: int | None = None) -> str | None:
        """Why it can't serve such a layer, in blocks of `block_size` tokens if that is given; None: it can."""
        if (reason := self.why_not(spec)) is not None:
            return reason
        if spec.stored_dtype != spec.dtype and not self.can_store(spec):
            own, stored = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, spec.stored_dtype))
            return f"keeps no keys and values of {own} in {stored}"
        if block_size is not None and block_size % self.block_multiple:
            return f"takes blocks of a multiple of {self.block_multiple} tokens, and block_size is {block_size}"
        return None


# name -> "module:attribute" of an AttentionBackend instance or class without arguments; imported at first use, so that a
# package that is not installed costs nothing. The order is the order of choice.
_REGISTRY: dict[str, str] = {
    "native_cpu": "hf_cb.attention.native:NativeCPUBackend",
    "flash_attn_3": "hf_cb.attention.flash:FlashAttention3",
    "flash_attn_4": "hf_cb.attention.flash:FlashAttention4",
    "flash_attn_2": "hf_cb.attention.flash:FlashAttention2",
    "torch_varlen": "hf_cb.attention.varlen:TorchVarlen",
    "torch_grouped": "hf_cb.attention.grouped:GroupedTorch",
    "reference": "hf_cb.attention.reference:ReferenceBackend",
}


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
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, AttentionBackend):
        raise InvalidArgumentError(
            f"attention_backend: takes a subclass of AttentionBackend; {name} is a {type(made).__name__}"
        )
    return made


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
        reason = next((r for spec in specs if (r := backend.refusal(spec, block_size))), None)
        if reason is None:
            return backend, "named in the configuration" if name else "; ".join([*refusals, f"{candidate} serves every layer"])
        refusals.append(f"{candidate}: {reason}")
    raise InvalidArgumentError(f"attention_backend: none can serve this model ({'; '.join(refusals)})")
