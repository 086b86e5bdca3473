"""CBConfig: what a user may set. ResolvedConfig: the same with every None decided."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_cb.errors import InvalidArgumentError

Fallback = Literal["native", "error"]
_KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_POLICIES = ("fcfs", "priority", "fair")

# Below these, a modest default: enough for many long conversations, a small part of any machine that runs the model.
_CPU_KV_BYTES = 4 << 30
_MOST_NAMES = 1 << 16  # blocks of a model without attention: names of prefixes, which take no memory of its device
_FEWEST_SAVED, _MANY_SAVED = 4, 64  # states
_UNITS = {f"{letter}{i}": (1024 if i else 1000) ** power for power, letter in enumerate("KMGT", 1) for i in ("i", "")}
_MOST_SECONDS = 1e6  # far beyond any use, and what clocks and locks can still wait for
_DEFAULT_BATCH_SIZE = 256
_MOST_GRAPH_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CBConfig:
    """Settings of the continuous-batching backend. None means "choose for me".

    Raises InvalidArgumentError at once for a wrong value, with the field's name and what it takes.
    """

    max_batch_tokens: int | None = None
    """Token budget: the most tokens that one step computes, prompts and outputs together."""

    target_itl_ms: float | None = None
    """Milliseconds between two tokens of a stream to aim at while prompts come in: their chunks are made as large as fits,
    by the times that steps took. None: max_batch_tokens alone limits them."""

    max_batch_size: int | None = None
    """The most sequences that run at the same time."""

    block_size: int | None = None
    """Tokens per block of the KV cache."""

    num_blocks: int | None = None
    """Blocks of all layers; overrides kv_cache_memory. Where layers differ in how far they look back, each is several blocks of
    the pool, one for each group of layers of equal reach."""

    kv_cache_memory: int | float | str | None = None
    """Memory for the KV cache: bytes, a string such as "4GiB" or "500MB", or a fraction of what is free, as 0.5."""

    pack_memory: int | None = None
    """Bytes that copies of the weights may take, in an order that is faster to compute with on a CPU; 0 for none. By default
    up to a quarter of the free memory. They take as much as the linear layers themselves: about the model once more."""

    graph_memory: int | str | None = None
    """Device memory for CUDA graphs of decode steps, in bytes or as "1GiB"; 0 for none. By default up to an eighth of what is
    free beside the KV cache, at most 2 GiB. They serve where the attention's kernels may be captured, on one device."""

    max_queue_size: int | None = None
    """The most requests that may wait; one more raises EngineOverloadedError. None: any number."""

    queue_timeout: float | None = None
    """Seconds after which a request that was never admitted ends with RequestTimeoutError. None: never."""

    policy: str | Callable[[], Any] = "fcfs"
    """Order of service: "fcfs", "priority", "fair", or a subclass of `hf_cb.core.policy.Policy`."""

    prefix_cache: bool | Literal["always"] = True
    """Whether a request takes over the keys and values that an earlier one with the same beginning has computed. True: unless a
    module's forward is code of your own, which may depend on what is outside of the model. "always": yours does not."""

    swap_space: int | str = 0
    """Host memory for preempted sequences, in bytes or as "4GiB": they are moved there where that is cheaper than to compute
    them again."""

    kv_dtype: str = "auto"
    """The dtype of the KV cache: "auto" for that of the model's keys and values, or "float32", "bfloat16", "float16",
    "float8_e4m3fn", "float8_e5m2". Another one than the model's is rounded to as it is, without a scale, at most to the dtype's
    largest number."""

    attention_backend: str | None = None
    """Name of the attention backend."""

    overlap: bool | None = None
    """Whether the next step is prepared and launched while the device computes this one. None: on GPUs, where the host's work
    then costs no time; a token comes when the step after it has begun."""

    fallback: Fallback = "native"
    """What becomes of a call that the engine cannot serve: "native" runs it plainly, "error" raises UnsupportedCallError."""

    record_steps: int = 0
    """How many of the latest steps `Engine.steps()` keeps."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_batch_size", "block_size", "num_blocks"):
            _check_int(name, getattr(self, name), minimum=1, none=True)
        _check_int("pack_memory", self.pack_memory, minimum=0, none=True)
        if self.graph_memory is not None and (self.graph_memory != 0 or isinstance(self.graph_memory, bool)):
            _memory("graph_memory", self.graph_memory, free=None)
        _check_int("record_steps", self.record_steps, minimum=0, none=False)
        _memory("kv_cache_memory", self.kv_cache_memory, free=0)
        if self.swap_space != 0 or not isinstance(self.swap_space, int) or isinstance(self.swap_space, bool):
            _memory("swap_space", self.swap_space, free=None)
        _check_int("max_queue_size", self.max_queue_size, minimum=0, none=True)
        for name in ("queue_timeout", "target_itl_ms"):
            _check_positive(name, getattr(self, name))
        if self.fallback not in get_args(Fallback):
            raise InvalidArgumentError(f"fallback: takes 'native' or 'error'; got {self.fallback!r}")
        if self.kv_dtype not in _KV_DTYPES:
            raise InvalidArgumentError(f"kv_dtype: takes {', '.join(_KV_DTYPES)}; got {self.kv_dtype!r}")
        if self.policy not in _POLICIES and (isinstance(self.policy, str) or not callable(self.policy)):
            raise InvalidArgumentError(f"policy: takes {', '.join(_POLICIES)}, or a class; got {self.policy!r}")
        if self.prefix_cache not in ("always",) and not isinstance(self.prefix_cache, bool):
            raise InvalidArgumentError(f"prefix_cache: takes True, False or 'always'; got {self.prefix_cache!r}")
        if not isinstance(self.overlap, bool | None):
            raise InvalidArgumentError(f"overlap: takes True, False or None; got {self.overlap!r}")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            raise InvalidArgumentError(f"attention_backend: takes a name or None; got {self.attention_backend!r}")

    def graph_bytes(self, free: int) -> int:
        """`graph_memory` in bytes, of a device with `free` bytes beside the KV cache."""
        if self.graph_memory is None:
            return min(_MOST_GRAPH_BYTES, free // 8)
        return _memory("graph_memory", self.graph_memory, free=None) or 0 if self.graph_memory else 0

    @classmethod
    def make(cls, config: CBConfig | None = None, **options: Any) -> CBConfig:
        """`config` (or the defaults) with `options` on top. An unknown field is an InvalidArgumentError."""
        if config is not None and not isinstance(config, cls):
            raise InvalidArgumentError(f"config: takes a CBConfig or None; got {type(config).__name__}")
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidArgumentError(f"{name}: no such field of CBConfig; it takes {', '.join(known)}")
        return dataclasses.replace(config or cls(), **options)

    def resolve(self, facts: ModelFacts) -> ResolvedConfig:
        """Decide every None for a model of which `facts` tells what matters.

        Raises InvalidArgumentError when the KV memory has no room for a single block, with the sum.
        """
        block_size = self.block_size or facts.default_block_size
        bytes_per_block = max(1, block_size * facts.kv_bytes_per_token)
        memory = _memory("kv_cache_memory", self.kv_cache_memory, facts.free_memory) or min(
            _CPU_KV_BYTES, facts.free_memory // 4
        )
        max_batch_size = self._batch_size(facts, memory)
        num_slots = _num_slots(facts, memory, max_batch_size)
        if self.num_blocks is not None:
            num_blocks = self.num_blocks
        elif not facts.kv_bytes_per_token:
            num_blocks = _MOST_NAMES
        else:
            memory -= num_slots * facts.state_bytes
            num_blocks = memory // bytes_per_block
            if self.kv_cache_memory is None and facts.max_positions is not None:
                # More than every running sequence at its longest could never be used.
                num_blocks = min(num_blocks, max_batch_size * -(-facts.max_positions // block_size))
            if num_blocks < 1:
                raise InvalidArgumentError(
                    f"kv_cache_memory: {memory} bytes hold no block of {block_size} tokens x {facts.kv_bytes_per_token} bytes; "
                    f"it takes at least {bytes_per_block}"
                )
        return ResolvedConfig(
            max_batch_tokens=min(self.max_batch_tokens or facts.default_batch_tokens, facts.max_step_tokens or sys.maxsize),
            max_batch_size=max_batch_size,
            block_size=block_size,
            num_blocks=num_blocks,
            num_state_slots=num_slots,
            kv_cache_memory=num_blocks * block_size * facts.kv_bytes_per_token + num_slots * facts.state_bytes,
            num_swap_blocks=((_memory("swap_space", self.swap_space, None) or 0) if self.swap_space else 0) // bytes_per_block,
            kv_dtype=facts.kv_dtype if self.kv_dtype == "auto" else self.kv_dtype,
            policy=self.policy,
            prefix_cache=self.prefix_cache == "always" or (self.prefix_cache and not facts.has_own_code),
            fallback=self.fallback,
            record_steps=self.record_steps,
        )

    def _batch_size(self, facts: ModelFacts, memory: int) -> int:
        """Sequences for whose states there is room in half of the memory: two slots for each."""
        if not facts.state_bytes:
            return self.max_batch_size or _DEFAULT_BATCH_SIZE
        most = memory // 2 // (2 * facts.state_bytes)
        if self.num_blocks is None and (self.max_batch_size or 1) > most:
            raise InvalidArgumentError(
                f"max_batch_size: {self.max_batch_size or 1} sequences take two states of {facts.state_bytes} bytes each, and "
                f"kv_cache_memory has {memory // 2} bytes for those, half of it: it takes at most {most}, or more memory"
            )
        return self.max_batch_size or max(1, min(_DEFAULT_BATCH_SIZE, most))


def _num_slots(facts: ModelFacts, memory: int, max_batch_size: int) -> int:
    """Two for each sequence, and some for states that are saved for others: as many again, or some dozens, in an eighth of
    the memory, but a few at least."""
    if not facts.state_bytes:
        return 0
    saved = min(max(2 * max_batch_size, _MANY_SAVED), memory // 8 // facts.state_bytes)
    return 2 * max_batch_size + max(_FEWEST_SAVED, saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What of a model and its device decides the defaults."""

    kv_bytes_per_token: int  # over all layers
    max_positions: int | None  # None: unbounded
    free_memory: int  # bytes free on the device that holds the KV cache
    default_batch_tokens: int
    kv_dtype: str  # of the model's keys and values
    default_block_size: int = 16
    max_step_tokens: int | None = None  # what the model bears in one step; None: any number
    state_bytes: int = 0  # of the states that its layers keep of one sequence
    has_own_code: bool = False  # whether a module runs code of the user's


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """CBConfig with nothing left open."""

    max_batch_tokens: int
    max_batch_size: int
    block_size: int
    num_blocks: int
    kv_cache_memory: int
    num_swap_blocks: int
    num_state_slots: int
    kv_dtype: str
    policy: str | Callable[[], Any]
    prefix_cache: bool
    fallback: Fallback
    record_steps: int

    def as_dict(self) -> Mapping[str, Any]:
        """Field names and values, for logs and reports."""
        return dataclasses.asdict(self)


def _check_int(name: str, value: object, *, minimum: int, none: bool) -> None:
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgumentError(f"{name}: takes an integer >= {minimum}{' or None' if none else ''}; got {value!r}")


def _memory(name: str, value: object, free: int | None) -> int | None:
    """An amount of memory in bytes, at least one; a fraction, or None, only where `free` memory counts."""
    if value is None and free is not None:
        return None
    number: float = 0.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]i?)?B\s*", value)
        if match:
            number = float(match[1]) * (_UNITS[match[2]] if match[2] else 1)
    elif isinstance(value, float) and free is not None and 0 < value < 1:
        return max(1, int(value * free))
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number < 1:
        raise InvalidArgumentError(
            f"{name}: takes bytes >= 1, a string such as '4GiB'"
            f"{', or 0' if free is None else ', a fraction below 1.0 of the free memory, or None'}; got {value!r}"
        )
    return int(number)


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST_SECONDS:
        raise InvalidArgumentError(f"{name}: takes a number > 0 or None; got {value!r}")
