"""ServedModel: a model under the name that clients call it by, with its engine and its tokenizer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import hf_cb
from hf_cb.engine import Engine
from hf_cb.errors import InvalidArgumentError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`engine`: what hf_cb.install(model) returned. `model`: kept alive here; None if somebody else does."""

    name: str
    engine: Engine
    tokenizer: Any
    model: Any = field(default=None, repr=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError("name: takes a string that is not empty")
        if (reason := self.engine.unsupported_reason) is not None:
            raise UnsupportedModelError(f"{self.name}: the engine cannot serve this model: {reason}")
        if unserved := self.engine.unserved_options:
            raise UnsupportedModelError(f"{self.name}: its generation_config sets {unserved[0]}, which the server can't follow")

    def close(self) -> None:
        """Finish what runs, and take hf_cb off the model again."""
        if self.model is not None:
            hf_cb.uninstall(self.model)
        else:
            self.engine.shutdown()


def load_model(
    source: str, name: str | None = None, *, device: str | None = None, dtype: str = "auto", **options: Any
) -> ServedModel:
    """Load a model and its tokenizer, and install hf_cb on it.

    `source`: an id or a folder for `from_pretrained`; `name`: what clients call it, by default the last part of `source`.
    `device`: such as "cuda:1"; by default the GPU if there is one. `dtype`: such as "float32"; "auto": the checkpoint's own.
    `options`: fields of CBConfig. Raises what `from_pretrained` and `install` raise, UnsupportedModelError for a model that
    the engine cannot serve.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)  # in evaluation mode
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    engine = hf_cb.install(model, **options)
    assert engine is not None
    try:
        return ServedModel(name or source.rstrip("/").rpartition("/")[2], engine, tokenizer, model)
    except BaseException:
        hf_cb.uninstall(model)
        raise
