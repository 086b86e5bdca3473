"""hf_cb: continuous batching behind `model.generate()` for Hugging Face causal language models.

import hf_cb

engine = hf_cb.install(model)
model.generate(**inputs, max_new_tokens=64)  # from any thread; calls made at the same time share their batches
hf_cb.uninstall(model)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_cb.backend import GenerationBackend, SerializedBackend
    from hf_cb.config import CBConfig
    from hf_cb.continuous import ContinuousBatchingBackend
    from hf_cb.engine import Engine
    from hf_cb.errors import (
        AlreadyInstalledError,
        CacheLostError,
        EngineClosedError,
        EngineDeadError,
        EngineOverloadedError,
        HFCBError,
        InvalidArgumentError,
        NotInstalledError,
        PipelineItemsError,
        RequestCancelledError,
        RequestFailedError,
        RequestTimeoutError,
        RequestTooLongError,
        UnsupportedCallError,
        UnsupportedModelError,
    )
    from hf_cb.handle import GenerationHandle, GenerationResult
    from hf_cb.installation import continuous_batching, get_engine, install, register_backend, uninstall
    from hf_cb.request import FinishReason, TokenLogprobs
    from hf_cb.stats import EngineStats, StepRecord
    from hf_cb.text import stream_text

__all__ = [
    "AlreadyInstalledError",
    "CBConfig",
    "CacheLostError",
    "ContinuousBatchingBackend",
    "Engine",
    "EngineClosedError",
    "EngineDeadError",
    "EngineOverloadedError",
    "EngineStats",
    "FinishReason",
    "GenerationBackend",
    "GenerationHandle",
    "GenerationResult",
    "HFCBError",
    "InvalidArgumentError",
    "NotInstalledError",
    "PipelineItemsError",
    "RequestCancelledError",
    "RequestFailedError",
    "RequestTimeoutError",
    "RequestTooLongError",
    "SerializedBackend",
    "StepRecord",
    "TokenLogprobs",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "continuous_batching",
    "get_engine",
    "install",
    "register_backend",
    "stream_text",
    "uninstall",
]

__version__ = "0.1.0"

# Where each public name is. Most of these modules import torch and transformers, which takes seconds: they are imported when a
# name of theirs is first asked for.
_HOMES = {name: "hf_cb.errors" for name in __all__ if name.endswith("Error")} | {
    "CBConfig": "hf_cb.config",
    "ContinuousBatchingBackend": "hf_cb.continuous",
    "Engine": "hf_cb.engine",
    "EngineStats": "hf_cb.stats",
    "FinishReason": "hf_cb.request",
    "GenerationBackend": "hf_cb.backend",
    "GenerationHandle": "hf_cb.handle",
    "GenerationResult": "hf_cb.handle",
    "SerializedBackend": "hf_cb.backend",
    "StepRecord": "hf_cb.stats",
    "TokenLogprobs": "hf_cb.request",
    "continuous_batching": "hf_cb.installation",
    "get_engine": "hf_cb.installation",
    "install": "hf_cb.installation",
    "register_backend": "hf_cb.installation",
    "stream_text": "hf_cb.text",
    "uninstall": "hf_cb.installation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
