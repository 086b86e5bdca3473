"""What serving a model must leave as it is."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def snapshot(model: PreTrainedModel, writes_buffers: bool = False) -> dict[str, Any]:
    """Its configs, and every object that each module holds. What serving adds, `generate`, is left out; so are new values in
    buffers if its own forward writes them there."""
    modules = {name: _contents(module, writes_buffers) for name, module in model.named_modules()}
    modules[""].pop("generate", None)
    return {
        "config": model.config.to_dict(),
        "config vars": {key: value for key, value in vars(model.config).items() if not key.startswith("__")},
        "generation_config": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "modules": modules,
    }


def _contents(module: torch.nn.Module, writes_buffers: bool) -> dict[str, Any]:
    held = {**vars(module), **module._parameters, **module._buffers, **module._modules}
    tensors = [*module._parameters.values(), *([] if writes_buffers else module._buffers.values())]
    return {
        **{key: id(value) for key, value in held.items()},
        "type": type(module),
        "versions": [tensor._version for tensor in tensors if tensor is not None],
        "hooks": len(module._forward_hooks) + len(module._forward_pre_hooks),
    }
