"""Models that transformers has split over several processes (`tp_plan="auto"`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cb.runtime.lockstep import Lockstep


def lockstep_of(model: nn.Module) -> Lockstep | None:
    """This rank's channel to the others that share the model; None for a model that is all here. Called by all of them."""
    mesh = _mesh_of(model)
    return None if mesh is None else Lockstep(mesh.get_group())


def is_split(model: nn.Module) -> bool:
    """Whether other ranks have parts of it."""
    return _mesh_of(model) is not None


def _mesh_of(model: nn.Module) -> Any:
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names is not None:
        mesh = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    return None if mesh is None or mesh.size() < 2 else mesh


def uneven_heads(model: Any, num_ranks: int) -> str | None:
    """In words, when the heads of this model's layers don't come out even: a likely reason why its parts don't run."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int) or not (heads % num_ranks or key_heads % num_ranks):
        return None
    return f"its {heads} attention heads and {key_heads} key heads can't be split evenly over {num_ranks} processes"
