"""From a model to something an engine can serve."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_cb.attention.step import LayerSpec
from hf_cb.config import CBConfig, ModelFacts, ResolvedConfig
from hf_cb.core.block_pool import BlockPool
from hf_cb.core.fair import Fair
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.pacing import Pacer
from hf_cb.core.policy import FCFS, Policy
from hf_cb.core.priority import Priority
from hf_cb.core.reach import Reach
from hf_cb.core.scheduler import Scheduler
from hf_cb.core.slot_pool import SlotPool
from hf_cb.core.state_manager import StateManager
from hf_cb.core.swap_cost import SwapCost
from hf_cb.engine_core import EngineCore, FollowWeights, Look
from hf_cb.errors import InvalidArgumentError
from hf_cb.hf.calls.generate import defaults_of
from hf_cb.hf.calls.seeds import draw_seed
from hf_cb.hf.probe import UnservableError
from hf_cb.hf.support import Servable, Wishes, examine
from hf_cb.hf.twins.attention import set_port
from hf_cb.hf.twins.fingerprint import Books
from hf_cb.hf.twins.own_code import own_code
from hf_cb.hf.twins.tensor_parallel import lockstep_of, uneven_heads
from hf_cb.hf.twins.twin import merge_notes, shared_tensors
from hf_cb.hf.twins.weights import WeightWatch, plain_parts
from hf_cb.intake import Served
from hf_cb.options import Defaults
from hf_cb.runtime import graphs
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.kv_layout import KVLayout
from hf_cb.runtime.lockstep import Lockstep
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.state_pool import StatePool, slot_bytes
from hf_cb.runtime.streams import streams_of
from hf_cb.runtime.swap_space import SwapSpace

# A CPU's step time grows with each token, so a budget this large already hides the cost of reading the weights.
_BATCH_TOKENS = {"cpu": 512}
_BATCH_TOKENS_ELSEWHERE = 4096
_COPY_BYTES_PER_SECOND = 4e9  # between device and host, until it is measured


def build(model: Any, config: CBConfig, books: Books) -> Served:
    """Examine the model and put the twin into service. Raises UnservableError with the reason, or InvalidArgumentError.

    What the modules write as they run is added to `books`, either way.
    """
    lockstep = lockstep_of(model)
    servable = _examine(model, config, lockstep, books)
    layout = KVLayout.of(servable.specs)
    code = own_code(model)
    facts = _facts(servable, layout, code)
    resolved = config.resolve(facts)
    if lockstep is not None:
        resolved = _agree(resolved, lockstep)
    reference = weakref.ref(model)  # the engine must not keep the user's model alive

    def defaults() -> Defaults:
        current = reference()
        return Defaults() if current is None else defaults_of(current.generation_config, servable.max_positions)

    return Served(
        core=_core(servable, config, resolved, facts, layout, lockstep),
        config=resolved,
        vocab_size=servable.vocab_size,
        max_positions=servable.max_positions,
        goes_beyond_positions=servable.goes_beyond_positions,
        attention_backend=servable.backend.name,
        attention_reason=servable.backend_reason,
        prefix_reason=_prefix_reason(config, code),
        packed_bytes=servable.packs.num_bytes,
        zeros_are_none=servable.zeros_are_none,
        defaults=defaults,
        draw_seed=draw_seed,
    )


def _core(
    servable: Servable,
    config: CBConfig,
    resolved: ResolvedConfig,
    facts: ModelFacts,
    layout: KVLayout,
    lockstep: Lockstep | None,
) -> EngineCore:
    num_groups, streams = len(layout.groups), streams_of(servable.device)
    cache, states = _allocate(servable, resolved, facts, layout)
    port = AttentionPort(servable.modules, servable.specs, servable.backend, cache)
    set_port(servable.twin, port)
    graphs = _graphs(servable, config, resolved, port, cache, lockstep)
    runner = ModelRunner(
        servable.forward, port, resolved.block_size, servable.device, num_groups, lockstep, streams, graphs, servable.mixing
    )
    host = _host_memory(resolved, facts)
    swap_space = SwapSpace(cache, host.num_blocks * num_groups, streams) if host.num_blocks else None
    if states is not None and host.num_slots:
        states.add_host_slots(host.num_slots)
    scheduler = _scheduler(config, resolved, facts, layout, cache.num_blocks, host)
    overlaps = _overlaps(config, servable.device, lockstep)
    return EngineCore(scheduler, runner, cache, swap_space, _follower(servable), lockstep, overlaps, states)


class _HostMemory(NamedTuple):
    """Of the host, for sequences that wait."""

    num_blocks: int  # of each group of layers
    num_slots: int = 0
    slot_blocks: int = 0  # blocks that are as long to copy as a slot


def _host_memory(resolved: ResolvedConfig, facts: ModelFacts) -> _HostMemory:
    """Swap space as blocks, and, for layers with states, one slot for so many blocks as a short sequence has."""
    num_blocks = resolved.num_swap_blocks
    if not facts.state_bytes:
        return _HostMemory(num_blocks)
    if not facts.kv_bytes_per_token:  # blocks are but names, so all of it is for slots
        num_slots = min(resolved.max_batch_size, resolved.num_swap_blocks // facts.state_bytes)
        return _HostMemory(resolved.num_blocks if num_slots else 0, num_slots, slot_blocks=1)
    slot_blocks = -(-facts.state_bytes // (resolved.block_size * facts.kv_bytes_per_token))
    num_slots = min(resolved.max_batch_size, num_blocks // (2 * slot_blocks))
    return _HostMemory(num_blocks - num_slots * slot_blocks if num_slots else 0, num_slots, slot_blocks)


def _scheduler(
    config: CBConfig, resolved: ResolvedConfig, facts: ModelFacts, layout: KVLayout, num_blocks: int, host: _HostMemory
) -> Scheduler:
    num_groups = len(layout.groups)
    options: dict[str, Any] = {
        "shares": resolved.prefix_cache,
        "num_host_blocks": host.num_blocks * num_groups,
        "reaches": tuple(Reach(window, chunk) for window, chunk in layout.reaches),
        "max_step_tokens": resolved.max_batch_tokens,
    }
    memory: KVManager
    if resolved.num_state_slots:
        options |= {"num_host_slots": host.num_slots, "slot_blocks": host.slot_blocks * num_groups}
        memory = StateManager(BlockPool(num_blocks), SlotPool(resolved.num_state_slots), resolved.block_size, **options)
    else:
        memory = KVManager(BlockPool(num_blocks), resolved.block_size, **options)
    return Scheduler(
        memory,
        max_batch_tokens=resolved.max_batch_tokens,
        max_batch_size=resolved.max_batch_size,
        policy=make_policy(resolved.policy),
        pacer=None if config.target_itl_ms is None else Pacer(config.target_itl_ms / 1000, resolved.block_size),
        swap_cost=SwapCost(facts.kv_bytes_per_token * resolved.block_size / num_groups / _COPY_BYTES_PER_SECOND),
    )


def _prefix_reason(config: CBConfig, own_code: str | None) -> str:
    if not config.prefix_cache:
        return "prefix_cache is False"
    if own_code is None or config.prefix_cache == "always":
        return "on"
    return (
        f"off: {own_code} is code of your own, which may read what is outside of the model; prefix_cache='always' says that it "
        f"doesn't"
    )


def _overlaps(config: CBConfig, device: torch.device, lockstep: Lockstep | None) -> bool:
    if lockstep is not None:  # the other ranks get sampled tokens with the next step
        return False
    return device.type == "cuda" if config.overlap is None else config.overlap


def _examine(model: Any, config: CBConfig, lockstep: Lockstep | None, books: Books) -> Servable:
    """As `examine`; the ranks of a tensor-parallel model, which all come here, serve it together or not at all."""
    kv_dtype = None if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    wishes = Wishes(config.attention_backend, block_size=config.block_size, kv_dtype=kv_dtype)
    if lockstep is None:
        return examine(model, wishes._replace(pack_memory=_pack_memory(config)), books)
    if config.swap_space:
        raise InvalidArgumentError(f"swap_space: takes 0 for a tensor-parallel model; got {config.swap_space!r}")
    reason: str | None = None
    try:
        servable = examine(model, wishes)
    except UnservableError as error:
        reason = uneven_heads(model, lockstep.size) or str(error)
    if reason is None and servable.mixing is not None:
        reason = "layers keep a state, of which each process would have a part"
    if not lockstep.least(reason is None):
        raise UnservableError(reason or "another rank cannot serve its part of it")
    return servable


def _agree(resolved: ResolvedConfig, lockstep: Lockstep) -> ResolvedConfig:
    """As many blocks as all ranks have room for: a block is the same one everywhere."""
    num_blocks = lockstep.least(resolved.num_blocks)
    memory = resolved.kv_cache_memory // resolved.num_blocks * num_blocks
    return dataclasses.replace(resolved, num_blocks=num_blocks, kv_cache_memory=memory)


_POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}


def make_policy(named: str | Callable[[], Policy]) -> Policy:
    """A fresh one of what `CBConfig.policy` names."""
    policy = (_POLICIES[named] if isinstance(named, str) else named)()
    if not isinstance(policy, Policy):
        raise InvalidArgumentError(f"policy: takes a subclass of hf_cb.core.policy.Policy; got {type(policy).__name__}")
    return policy


def _allocate(
    servable: Servable, resolved: ResolvedConfig, facts: ModelFacts, layout: KVLayout
) -> tuple[KVCache, StatePool | None]:
    """The memory of keys and values, and of states."""
    if resolved.kv_cache_memory > facts.free_memory:
        weights = sum(tensor.nbytes for tensor in servable.twin.parameters())
        raise InvalidArgumentError(
            f"kv_cache_memory: {resolved.num_blocks} blocks x {resolved.block_size} tokens x {facts.kv_bytes_per_token} "
            f"bytes{_and_states(resolved, facts)} = {resolved.kv_cache_memory} bytes; {servable.device} has "
            f"{facts.free_memory} bytes free beside the weights' {weights}: "
            f"{resolved.kv_cache_memory - facts.free_memory} too many"
        )
    try:
        cache = KVCache(servable.specs, resolved.num_blocks * len(layout.groups), resolved.block_size, layout)
        if servable.mixing is None:
            return cache, None
        states = StatePool(servable.states, resolved.num_state_slots)
        servable.mixing.use(states)
        return cache, states
    except (RuntimeError, MemoryError, ValueError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise InvalidArgumentError(
            f"kv_cache_memory: {resolved.num_blocks} blocks take {resolved.kv_cache_memory} bytes, and {servable.device} has "
            f"no room for them"
        ) from error


def _and_states(resolved: ResolvedConfig, facts: ModelFacts) -> str:
    return f" + {resolved.num_state_slots} states x {facts.state_bytes} bytes" if facts.state_bytes else ""


def _graphs(
    servable: Servable,
    config: CBConfig,
    resolved: ResolvedConfig,
    port: AttentionPort,
    cache: KVCache,
    lockstep: Lockstep | None,
) -> graphs.DecodeGraphs:
    tensors, notes = (*servable.twin.parameters(), *servable.twin.buffers()), merge_notes(servable.twin)
    limit = config.graph_bytes(_free_memory(servable.device))
    return graphs.DecodeGraphs(
        servable.forward,
        port,
        cache,
        limit=limit,
        max_rows=min(resolved.max_batch_size, resolved.max_batch_tokens),
        # By their notes of what is merged, PEFT's layers choose in Python what to compute.
        baked=lambda: ([tensor.data_ptr() for tensor in tensors], [*map(tuple, notes)]),
        off=_why_no_graphs(servable, lockstep) or (None if limit else "graph_memory is 0"),
    )


def _why_no_graphs(servable: Servable, lockstep: Lockstep | None) -> str | None:
    tensors = (*servable.twin.parameters(), *servable.twin.buffers())
    devices = {*(spec.device for spec in servable.specs), *(tensor.device for tensor in tensors)}
    if servable.device.type not in graphs.DEVICES:
        return f"CUDA graphs run on {' or '.join(graphs.DEVICES)}, not on {servable.device.type}"
    if lockstep is not None:
        return "other processes take part in each step"
    if servable.mixing is not None:
        return "layers keep a state, by the model's own code"
    if len(devices) > 1:
        return f"the model lies on several devices ({', '.join(sorted(map(str, devices)))})"
    if any("_hf_hook" in vars(module) for module in servable.twin.modules()):
        return "accelerate's hooks move the model's tensors"
    if not servable.backend.captures:
        return f"{servable.backend.name} needs numbers on the host in each step"
    return None


def _follower(servable: Servable) -> FollowWeights:
    watched = (part for tensor in shared_tensors(servable.twin) for part in plain_parts(tensor))
    watch = WeightWatch(watched, merge_notes(servable.twin))

    def follow(look: Look) -> bool:
        changed = watch.changed(samples=look is not Look.QUICK)
        servable.packs.repack(None if look is Look.NONE_NEEDED else changed)
        return bool(changed)

    return follow


def _pack_memory(config: CBConfig) -> int:
    return _free_memory(torch.device("cpu")) // 4 if config.pack_memory is None else config.pack_memory


def _facts(servable: Servable, layout: KVLayout, own_code: str | None) -> ModelFacts:
    return ModelFacts(
        kv_bytes_per_token=layout.bytes_per_token(servable.specs),
        max_positions=servable.max_positions,
        free_memory=_room(servable.specs) if servable.specs else _free_memory(servable.device),
        default_batch_tokens=_BATCH_TOKENS.get(servable.device.type, _BATCH_TOKENS_ELSEWHERE),
        state_bytes=slot_bytes(servable.states),
        kv_dtype=str(_dtype(servable)).removeprefix("torch."),
        default_block_size=servable.backend.block_size,
        max_step_tokens=servable.max_step_tokens,
        has_own_code=own_code is not None,
    )


def _dtype(servable: Servable) -> torch.dtype:
    """Of its keys and values, or else of its weights."""
    return servable.specs[0].dtype if servable.specs else next(servable.twin.parameters()).dtype


def _room(specs: Sequence[LayerSpec]) -> int:
    """Bytes that a cache may take over all devices, each of which holds the keys and values of its own layers."""
    parts: Counter[torch.device] = Counter()
    for spec in specs:
        parts[spec.device] += spec.bytes_per_token
    return min(_free_memory(device) * parts.total() // part for device, part in parts.items())


def _free_memory(device: torch.device) -> int:
    if device.type != "cpu" and hasattr(getattr(torch, device.type, None), "mem_get_info"):
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):  # free, or in caches that the system gives up when asked
                return int(line.split()[1]) * 1024
    counted = (
        "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    )  # macOS knows only how many there are
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(counted)
