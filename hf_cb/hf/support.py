"""Which models the engine can serve: observed, not declared.

Class flags lie: some models never call the registered attention function, others mix rows in convolutions or recurrent states.
So a short probe runs two packed rows in chunks on the twin and compares with the same weights run plainly on each row alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hf_cb.attention.backend import AttentionBackend, block_multiple, choose_attention_backend
from hf_cb.attention.native import NativeCPUBackend
from hf_cb.attention.step import LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.errors import InvalidArgumentError, brief
from hf_cb.hf.fast.equivalence import ERRORS
from hf_cb.hf.fast.fusing import Fused, calls_of, parents_of
from hf_cb.hf.fast.packing import Packs, group_by_input, linear_calls
from hf_cb.hf.twins.attention import IMPLEMENTATION, Observer, UnservableLayerError, register, set_port
from hf_cb.hf.twins.dispatched import device_of
from hf_cb.hf.twins.fingerprint import Books, Fingerprint, global_hooks
from hf_cb.hf.twins.forwards import wrapped_forward
from hf_cb.hf.twins.twin import forward_of, make_twin, rope_follows_length, set_attention
from hf_cb.runtime.input_batch import build_input_batch
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.model_runner import Forward
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.streams import streams_of

logger = logging.getLogger("hf_cb")

_BLOCK_SIZE = 4
_CHUNKS = (13, 22, 59, 1, 1)  # tokens of each row in the probe's steps
_LONGEST_PROBE = 96  # tokens of the longer row; windows beyond it are taken on trust in the layer's own argument


@dataclass(frozen=True, slots=True)
class Servable:
    """A twin that passed, with what the engine needs to run it."""

    twin: nn.Module
    forward: Forward
    packs: Packs
    modules: tuple[nn.Module, ...]
    specs: tuple[LayerSpec, ...]
    backend: AttentionBackend
    backend_reason: str
    device: torch.device
    vocab_size: int
    max_positions: int | None  # that rows can share
    goes_beyond_positions: bool  # whether the model goes on beyond those by itself
    max_step_tokens: int | None  # that may be packed into one step
    zeros_are_none: frozenset[str]  # arguments of its forward that may as well be left out where they are all zeros


class UnservableError(Exception):
    """The model cannot be served. The message is the reason, in words for the user."""


def examine(
    model: nn.Module,
    attention_backend: str | None = None,
    pack_memory: int = 0,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    books: Books | None = None,
) -> Servable:
    """Make a twin, probe it, and pack its weights into at most `pack_memory` bytes if it passes with them too.
    What its modules write as they run is added to `books`.

    Raises UnservableError with the reason; the model is not touched either way.
    """
    if (refusal := _refusal(model)) is not None:
        raise UnservableError(refusal)
    try:
        return _examine(model, attention_backend, pack_memory, block_size, kv_dtype, books)
    except UnservableError as error:
        if (name := wrapped_forward(model)) is None:
            raise
        raise UnservableError(
            f"the forward of {name} is a function round the user's own modules and runs those, not the engine's ({error})"
        ) from error


def _examine(
    model: nn.Module,
    attention_backend: str | None,
    pack_memory: int,
    block_size: int | None,
    kv_dtype: torch.dtype | None,
    books: Books | None,
) -> Servable:
    try:
        twin = make_twin(model)
    except Exception as error:
        raise UnservableError(f"its module tree cannot be copied ({brief(error)})") from error
    forward = forward_of(twin)
    if forward is None:
        raise UnservableError("its forward takes no position_ids")
    embeddings: Any = twin.get_input_embeddings()  # type: ignore[operator]
    try:  # it need not be torch's: adapters wrap it, and compute its weight from several
        vocab_size, device = int(embeddings.weight.shape[0]), device_of(embeddings)
    except (AttributeError, IndexError, StopIteration) as error:
        raise UnservableError(
            f"its input embedding is a {type(embeddings).__name__}, which has no weight to tell its size"
        ) from error
    longest = min(_LONGEST_PROBE, _max_positions(twin) or _LONGEST_PROBE)
    rows = _probe_rows(vocab_size, longest, device)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # the engine's thread knows nothing of the caller's
            plain = [_plain_logits(twin, rows[0])]  # what modules make of themselves when they run first is not their books
            before = Fingerprint.of(twin)
            plain += [_plain_logits(twin, row) for row in rows[1:]]
            zeros_are_none = _zeros_are_none(twin, rows[1], plain[1])
            if books is not None:
                books.update(before.written(Fingerprint.of(twin)))
            with linear_calls(twin) as calls:
                observer = _observe(twin, forward, rows)
            specs = tuple(_stored_in(kv_dtype, spec) for spec in observer.specs)
            backend, reason = choose_attention_backend(specs, attention_backend, block_size)

            def probe() -> list[torch.Tensor]:
                return _probe(twin, forward, observer, backend, rows, plain)

            probe()
            groups = group_by_input(calls)
            with calls_of([*observer.modules, *parents_of(twin, observer.modules)]) as calls_seen:
                packs = _pack(groups, pack_memory, probe)
            if packs.num_bytes:
                attention = [*zip(observer.modules, specs, strict=True)]
                own = forward if isinstance(backend, NativeCPUBackend) else None

                def probe_fused() -> None:
                    _probe_sparing(twin, forward, observer, backend, rows, probe())

                _fuse(lambda fused: fused.fuse(twin, groups, packs, attention, calls_seen, own), probe_fused)
            if specs != tuple(observer.specs):
                _try_stored(twin, forward, observer, specs, backend, rows)
    except UnservableLayerError as error:
        raise UnservableError(str(error)) from error
    except InvalidArgumentError as error:
        if attention_backend is not None:  # the user's choice, and the user's to correct
            raise
        raise UnservableError(str(error)) from error
    except UnservableError:
        raise
    except ERRORS as error:
        raise UnservableError(f"the packed probe failed ({brief(error)})") from error
    return Servable(
        twin=twin,
        forward=forward,
        packs=packs,
        modules=tuple(observer.modules),
        specs=specs,
        backend=backend,
        backend_reason=reason,
        device=device,
        vocab_size=vocab_size,
        max_positions=_max_positions(twin),
        goes_beyond_positions=_query_scale_span(twin) is not None or any(map(rope_follows_length, twin.modules())),
        max_step_tokens=_query_scale_span(twin),
        zeros_are_none=zeros_are_none,
    )


def _refusal(model: nn.Module) -> str | None:
    """What can be told without running it."""
    config: Any = model.config
    if config.is_encoder_decoder:
        return "encoder-decoder model"
    if getattr(config.get_text_config(), "alibi", False):
        return "its attention is biased by distance (ALiBi)"  # in a mask of its own, for one row's positions
    if global_hooks():
        return "a hook that torch runs for all modules: it would see packed rows, on the engine's thread"
    if _has_hooks(model):
        return "forward hooks on its modules: they would see packed rows, on the engine's thread"
    return None


def _pack(groups: list[list[nn.Module]], memory: int, probe: Callable[[], object]) -> Packs:
    """Packs with which the probe passes as before, else none."""
    packs = Packs()
    try:
        packs = Packs(groups, memory)
        probe()
    except (*ERRORS, UnservableError) as error:
        logger.warning("weights are not packed: the model does not run as before with them (%s)", brief(error))
        packs.undo()
        return Packs()
    return packs


def _fuse(fuse: Callable[[Fused], None], probe: Callable[[], object]) -> None:
    """Fused modules with which the probe passes as before, else none."""
    fused = Fused()
    try:
        fuse(fused)
        probe()
    except Exception as error:  # of foreign code, which may raise anything where it is not meant to be
        logger.warning("layers are not fused: the model does not run as before with that (%s)", brief(error))
        fused.undo()


def _has_hooks(model: nn.Module) -> bool:
    """Whether modules have forward hooks of the user's. transformers' and accelerate's own know how the model is run."""
    hooks = (hook for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks) for hook in table.values())
    owners = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks)
    return any(owner.partition(".")[0] not in ("transformers", "accelerate") for owner in owners)


def _max_positions(model: nn.Module) -> int | None:
    """Positions that every row may use whatever its neighbours' length."""
    text_config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    limit = getattr(text_config, "max_position_embeddings", None)
    if any(rope_follows_length(module) for module in model.modules()):
        # Beyond the original length the frequencies of the whole batch would change with its longest row.
        parameters = getattr(text_config, "rope_parameters", None) or {}
        nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
        limits = [p.get("original_max_position_embeddings") for p in nested]
        known = [value for value in (*limits, getattr(text_config, "original_max_position_embeddings", None), limit) if value]
        limit = min(known, default=None)
    span = _query_scale_span(model)
    limits_known = [int(value) for value in (limit, span) if value]
    return min(limits_known, default=None)


def _query_scale_span(model: nn.Module) -> int | None:
    """Llama 4 scales the queries of layers without rotary embedding by position, in steps of `floor_scale`, and counts
    positions from the start of what it is given rather than by position_ids. Below the first step the scale is one for all."""
    spans = [
        int(state["floor_scale"]) - 1
        for state in map(vars, model.modules())
        if state.get("attn_temperature_tuning") and "floor_scale" in state and not state.get("use_rope")
    ]
    return min(spans, default=None)


def _probe_rows(vocab_size: int, longest: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, min(longest, 36))
    return [
        torch.randint(0, vocab_size, (n,), generator=generator, dtype=torch.int64, device="cpu").to(device) for n in lengths
    ]


def _plain_logits(twin: nn.Module, row: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocab] of a row alone, by the model's own attention. Positions are left to the model, as in plain use."""
    return twin(input_ids=row[None], use_cache=False, return_dict=True, **arguments).logits[0].float()  # type: ignore[no-any-return]


def _zeros_are_none(twin: nn.Module, row: torch.Tensor, logits: torch.Tensor) -> frozenset[str]:
    """Tokenizers give types of tokens for a single text, too: all zeros. Some models add something for those, some don't."""
    if "token_type_ids" not in inspect.signature(twin.forward).parameters:
        return frozenset()
    with_zeros = _plain_logits(twin, row, token_type_ids=torch.zeros_like(row)[None])
    return frozenset({"token_type_ids"} if torch.equal(with_zeros, logits) else ())


def _observe(twin: nn.Module, forward: Forward, rows: list[torch.Tensor]) -> Observer:
    register()
    set_attention(twin, IMPLEMENTATION)
    observer = Observer()
    set_port(twin, observer)
    row = rows[1]
    forward(
        row[None],
        torch.arange(len(row), device=row.device, dtype=torch.int64)[None],
        torch.tensor([len(row) - 1], device=row.device, dtype=torch.int64),
    )
    if not observer.specs:
        raise UnservableError("its layers never call the registered attention function")
    return observer


def _probe(
    twin: nn.Module,
    forward: Forward,
    observer: Observer,
    backend: AttentionBackend,
    rows: list[torch.Tensor],
    plain: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Run the rows packed and in chunks, once more beside other neighbours, and compare. The logits of each row, packed."""
    _check_layer_types(observer)
    port, block_size = _probe_port(twin, observer, observer.specs, backend)
    first, second = (row.tolist() for row in rows)
    packed = _run_packed(forward, port, [first, second], rows[0].device, block_size)
    other = [*first[1:], first[0]]
    beside_other = _run_packed(forward, port, [other, second], rows[0].device, block_size)
    half = plain[0].new_empty(0).dtype != torch.float32 or any(s.dtype.itemsize < 4 for s in observer.specs)
    for got, want in zip(packed, plain, strict=True):
        if not _close(got, want, half):
            raise UnservableError("packed rows give other logits than the same rows alone")
    # The same shapes in both runs: what differs can only have come from the neighbour.
    if not _close(beside_other[1], packed[1], half=False, rtol=1e-2 if half else 1e-4):
        raise UnservableError("packed rows see their neighbours")
    return packed


def _probe_sparing(
    twin: nn.Module,
    forward: Forward,
    observer: Observer,
    backend: AttentionBackend,
    rows: list[torch.Tensor],
    whole: list[torch.Tensor],
) -> None:
    """Ask for few logits, as a step does, and compare with what they are among all."""
    port, block_size = _probe_port(twin, observer, observer.specs, backend)
    few = _run_packed(forward, port, [row.tolist() for row in rows], rows[0].device, block_size, sparing=True)
    for own, all_of_row in zip(few, whole, strict=True):
        ends = dict.fromkeys(min(end, len(all_of_row)) - 1 for end in accumulate(_CHUNKS))
        if not _close(own, all_of_row[[*ends]], half=False, rtol=5e-2):
            raise UnservableError("logits depend on which are asked for")


def _probe_port(
    twin: nn.Module, observer: Observer, specs: Sequence[LayerSpec], backend: AttentionBackend
) -> tuple[AttentionPort, int]:
    """A port behind the twin's modules, over a cache for two rows, and the size of its blocks."""
    block_size = max(_BLOCK_SIZE, block_multiple(backend))
    cache = KVCache(specs, 2 * -(-_LONGEST_PROBE // block_size) + 1, block_size)
    port = AttentionPort(observer.modules, specs, backend, cache)
    set_port(twin, port)
    return port, block_size


def _stored_in(kv_dtype: torch.dtype | None, spec: LayerSpec) -> LayerSpec:
    return spec if kv_dtype in (None, spec.dtype) else dataclasses.replace(spec, kv_dtype=kv_dtype)


def _try_stored(
    twin: nn.Module,
    forward: Forward,
    observer: Observer,
    specs: Sequence[LayerSpec],
    backend: AttentionBackend,
    rows: list[torch.Tensor],
) -> None:
    """Run the rows over a cache in the dtype that the user wants: that it runs is asked, its rounding is the user's."""
    port, block_size = _probe_port(twin, observer, specs, backend)
    for logits in _run_packed(forward, port, [row.tolist() for row in rows], rows[0].device, block_size):
        if not bool(torch.isfinite(logits).all()):
            raise UnservableError("a KV cache of another dtype gives logits that are not numbers")


def _check_layer_types(observer: Observer) -> None:
    """A window that the config declares must have reached the attention function: the probe is too short to see a long one."""
    for module, spec in zip(observer.modules, observer.specs, strict=True):
        config: Any = getattr(module, "config", None)
        types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        kind = types[index] if types and index is not None else None
        if kind == "sliding_attention" and spec.window is None:
            raise UnservableError("a sliding-window layer does not pass its window to the attention function")


def _run_packed(
    forward: Forward,
    port: AttentionPort,
    rows: list[list[int]],
    device: torch.device,
    block_size: int,
    sparing: bool = False,
) -> list[torch.Tensor]:
    """Logits of every position of each row, computed together in uneven chunks over shuffled blocks, a last token by itself.
    `sparing`: of each chunk's last position, and only they are asked for, as in service."""
    generator = torch.Generator().manual_seed(1)
    per_row = -(-_LONGEST_PROBE // block_size)
    blocks = (torch.randperm(2 * per_row, generator=generator, dtype=torch.int64, device="cpu") + 1).tolist()
    tables = [blocks[:per_row], blocks[per_row:]]
    done = [0, 0]
    logits: list[list[torch.Tensor]] = [[], []]
    for chunk in _CHUNKS:
        parts = [(i, rows[i][done[i] : done[i] + chunk]) for i in range(len(rows))]
        scheduled = tuple(
            ScheduledRow(i, done[i], tuple(part), RowMemory(tuple(tables[i][: -(-(done[i] + len(part)) // block_size)])), 1)
            for i, part in parts
            if part
        )
        if not scheduled:
            break
        total = sum(len(row.token_ids) for row in scheduled)
        batch = build_input_batch(SchedulerOutput(scheduled, total), block_size, streams_of(device))
        asked = batch.logits_indices if sparing else torch.arange(total, device=device, dtype=torch.int64)
        port.begin(batch.steps, asked if sparing else None)
        out = forward(batch.input_ids, batch.position_ids, asked).float()
        if any(calls != 1 for calls in port.calls):
            raise UnservableError("an attention layer was not called exactly once a step")
        port.end()
        lengths = [1 if sparing else len(row.token_ids) for row in scheduled]
        for row, part_logits in zip(scheduled, torch.split(out, lengths), strict=True):
            logits[row.request_id].append(part_logits)
            done[row.request_id] += len(row.token_ids)
    return [torch.cat(parts_of_row) for parts_of_row in logits]


def _close(got: torch.Tensor, want: torch.Tensor, half: bool, rtol: float = 5e-3) -> bool:
    """Whether two sets of logits [n, vocab] agree, relative to the spread of each position's logits.

    In float32 at every position. In half precision at most of them: one expert chosen otherwise moves a position honestly.
    """
    want = want.to(got.device)
    spread = (want.amax(-1) - want.amin(-1)).clamp_min(1e-6)
    error = (got - want).abs().amax(-1) / spread
    if not bool(torch.isfinite(error).all()):
        return False
    return bool(error.median() < 0.05) if half else bool(error.max() < rtol)
