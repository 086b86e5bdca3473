"""hf_cb: continuous batching behind `model.generate()` for Hugging Face causal language models.

import hf_cb

engine = hf_cb.install(model)
model.generate(**inputs, max_new_tokens=64)  # from any thread; calls made at the same time share their batches
hf_cb.uninstall(model)
"""

from hf_cb.backend import GenerationBackend, SerializedBackend
from hf_cb.config import CBConfig
from hf_cb.continuous import ContinuousBatchingBackend
from hf_cb.engine import Engine
from hf_cb.errors import (
    AlreadyInstalledError,
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
