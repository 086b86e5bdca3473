"""From a model to something an engine can serve."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_cb.config import CBConfig, ModelFacts, ResolvedConfig
from hf_cb.core.fair import Fair
from hf_cb.core.policy import FCFS, Policy
from hf_cb.core.priority import Priority
from hf_cb.core.scheduler import Scheduler
from hf_cb.core.swap_cost import SwapCost
from hf_cb.engine import Served
from hf_cb.errors import InvalidArgumentError
from hf_cb.hf.attention import set_port
from hf_cb.hf.generate import defaults_of
from hf_cb.hf.seeds import draw_seed
from hf_cb.hf.support import Servable, examine
from hf_cb.hf.twin import merge_notes, shared_tensors
from hf_cb.hf.weights import WeightWatch
from hf_cb.machinery import FollowWeights, Look, Machinery
from hf_cb.options import Defaults
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.swap_space import SwapSpace

# A CPU's step time grows with each token, so a budget this large already hides the cost of reading the weights.
_BATCH_TOKENS = {"cpu": 512}
_BATCH_TOKENS_ELSEWHERE = 4096
_COPY_BYTES_PER_SECOND = 4e9  # between device and host, until it is measured


def build(model: Any, config: CBConfig) -> Served:
    """Examine the model and put the twin into service. Raises UnservableError with the reason, or InvalidArgumentError."""
    servable = examine(model, config.attention_backend, _pack_memory(config))
    facts = _facts(servable)
    resolved = config.resolve(facts)
    cache = _allocate(servable, resolved, facts)
    port = AttentionPort(servable.modules, servable.specs, servable.backend, cache)
    set_port(servable.twin, port)
    runner = ModelRunner(servable.forward, port, resolved.block_size, servable.device)
    scheduler = Scheduler(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_batch_tokens=resolved.max_batch_tokens,
        max_batch_size=resolved.max_batch_size,
        policy=make_policy(resolved.policy),
        prefix_cache=resolved.prefix_cache,
        num_host_blocks=resolved.num_swap_blocks,
        swap_cost=SwapCost(facts.kv_bytes_per_token * resolved.block_size / _COPY_BYTES_PER_SECOND),
        target_itl=None if config.target_itl_ms is None else config.target_itl_ms / 1000,
    )
    blocks = resolved.num_swap_blocks
    swap_space = SwapSpace(cache, servable.specs, blocks) if blocks else None
    reference = weakref.ref(model)  # the engine must not keep the user's model alive

    def defaults() -> Defaults:
        current = reference()
        return Defaults() if current is None else defaults_of(current.generation_config, servable.max_positions)

    return Served(
        machinery=Machinery(scheduler, runner, cache, swap_space, _follower(servable)),
        config=resolved,
        vocab_size=servable.vocab_size,
        max_positions=servable.max_positions,
        stretches=servable.stretches,
        attention_backend=servable.backend.name,
        attention_reason=servable.backend_reason,
        packed_bytes=servable.packs.num_bytes,
        defaults=defaults,
        draw_seed=draw_seed,
    )


_POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}


def make_policy(named: str | Callable[[], Policy]) -> Policy:
    """A fresh one of what `CBConfig.policy` names."""
    policy = (_POLICIES[named] if isinstance(named, str) else named)()
    if not isinstance(policy, Policy):
        raise InvalidArgumentError(f"policy: takes a subclass of hf_cb.core.policy.Policy; got {type(policy).__name__}")
    return policy


def _allocate(servable: Servable, resolved: ResolvedConfig, facts: ModelFacts) -> KVCache:
    if resolved.kv_cache_memory > facts.free_memory:
        weights = sum(tensor.nbytes for tensor in servable.twin.parameters())
        raise InvalidArgumentError(
            f"kv_cache_memory: {resolved.num_blocks} blocks x {resolved.block_size} tokens x {facts.kv_bytes_per_token} "
            f"bytes = {resolved.kv_cache_memory} bytes; {servable.device} has {facts.free_memory} bytes free beside the "
            f"weights' {weights}: {resolved.kv_cache_memory - facts.free_memory} too many"
        )
    try:
        return KVCache(servable.specs, resolved.num_blocks, resolved.block_size)
    except (RuntimeError, MemoryError, ValueError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise InvalidArgumentError(
            f"kv_cache_memory: {resolved.num_blocks} blocks take {resolved.kv_cache_memory} bytes, and {servable.device} has "
            f"no room for them"
        ) from error


def _follower(servable: Servable) -> FollowWeights:
    watch = WeightWatch(shared_tensors(servable.twin), merge_notes(servable.twin))

    def follow(look: Look) -> bool:
        changed = watch.changed(samples=look is not Look.QUICK)
        servable.packs.repack(None if look is Look.NONE_NEEDED else changed)
        return bool(changed)

    return follow


def _pack_memory(config: CBConfig) -> int:
    return _free_memory(torch.device("cpu")) // 4 if config.pack_memory is None else config.pack_memory


def _facts(servable: Servable) -> ModelFacts:
    return ModelFacts(
        kv_bytes_per_token=sum(spec.bytes_per_token for spec in servable.specs),
        max_positions=servable.max_positions,
        free_memory=_free_memory(servable.device),
        default_batch_tokens=_BATCH_TOKENS.get(servable.device.type, _BATCH_TOKENS_ELSEWHERE),
        max_step_tokens=servable.max_step_tokens,
    )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):  # free, or in caches that the system gives up when asked
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
