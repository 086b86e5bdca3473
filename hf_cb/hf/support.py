"""Which models the engine can serve: observed, not declared.

Class flags lie: some models never call the registered attention function, others mix rows in convolutions or recurrent states.
So a twin is made and probed; then faster forms of its layers are tried, each kept if the probe passes with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_cb.attention.backend import AttentionBackend, choose_attention_backend
from hf_cb.attention.step import LayerSpec
from hf_cb.errors import InvalidArgumentError, brief
from hf_cb.hf.fast.equivalence import ERRORS
from hf_cb.hf.fast.fusing import Fused, calls_of, parents_of
from hf_cb.hf.fast.packing import Packs, group_by_input, linear_calls
from hf_cb.hf.probe import Probe, UnservableError
from hf_cb.hf.twins.attention import UnservableLayerError
from hf_cb.hf.twins.dispatched import device_of
from hf_cb.hf.twins.fingerprint import Books, global_hooks
from hf_cb.hf.twins.forwards import wrapped_forward
from hf_cb.hf.twins.mixing import Mixing
from hf_cb.hf.twins.positions import goes_beyond, max_positions, query_scale_span
from hf_cb.hf.twins.twin import forward_of, make_twin
from hf_cb.runtime.model_runner import Forward
from hf_cb.runtime.state_pool import StateSpec

logger = logging.getLogger("hf_cb")


class Wishes(NamedTuple):
    """What the user wants of it. `pack_memory`: bytes for copies of the weights. The rest: None for what suits the model."""

    attention_backend: str | None = None
    pack_memory: int = 0
    block_size: int | None = None
    kv_dtype: torch.dtype | None = None


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
    mixing: Mixing | None = None  # of its layers that keep a state
    states: tuple[tuple[StateSpec, ...], ...] = ()  # the states of each of those


def examine(model: nn.Module, wishes: Wishes, books: Books | None = None) -> Servable:
    """Make a twin, probe it, and pack its weights and fuse its layers if it passes with that too. What its modules write as
    they run is added to `books`.

    Raises UnservableError with the reason; the model is not touched either way.
    """
    if (refusal := _refusal(model)) is not None:
        raise UnservableError(refusal)
    try:
        with _reasons(wishes):
            return _examine(model, wishes, {} if books is None else books)
    except UnservableError as error:
        if (name := wrapped_forward(model)) is None:
            raise
        raise UnservableError(
            f"the forward of {name} is a function round the user's own modules and runs those, not the engine's ({error})"
        ) from error


@contextlib.contextmanager
def _reasons(wishes: Wishes) -> Iterator[None]:
    """What goes wrong inside, as UnservableError."""
    try:
        yield
    except UnservableLayerError as error:
        raise UnservableError(str(error)) from error
    except InvalidArgumentError as error:
        if wishes.attention_backend is not None:  # the user's choice, and the user's to correct
            raise
        raise UnservableError(str(error)) from error
    except ERRORS as error:
        raise UnservableError(f"the packed probe failed ({brief(error)})") from error


def _examine(model: nn.Module, wishes: Wishes, books: Books) -> Servable:
    twin, forward = _twin(model)
    vocab_size, device = _embeddings(twin)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):  # the engine's thread knows nothing of the caller's
        probe = Probe(twin, forward, vocab_size, device)
        books.update(probe.written)
        with linear_calls(twin) as calls:
            probe.observe()
        probe.observe_states()
        specs = tuple(_stored_in(wishes.kv_dtype, spec) for spec in probe.specs)
        backend, reason = choose_attention_backend(specs, wishes.attention_backend, wishes.block_size)
        probe.check(backend)
        packs = _made_fast(probe, backend, specs, group_by_input(calls), wishes.pack_memory)
        if specs != tuple(probe.specs):
            probe.check_stored(specs, backend)
    return Servable(
        twin=twin,
        forward=forward,
        packs=packs,
        modules=tuple(probe.modules),
        specs=specs,
        backend=backend,
        backend_reason=reason,
        device=device,
        vocab_size=vocab_size,
        max_positions=max_positions(twin),
        goes_beyond_positions=goes_beyond(twin),
        max_step_tokens=query_scale_span(twin),
        zeros_are_none=probe.zeros_are_none,
        mixing=probe.mixing,
        states=tuple(mixer.specs for mixer in probe.mixers),
    )


def _twin(model: nn.Module) -> tuple[nn.Module, Forward]:
    try:
        twin = make_twin(model)
    except Exception as error:
        raise UnservableError(f"its module tree cannot be copied ({brief(error)})") from error
    return twin, forward_of(twin)


def _embeddings(twin: nn.Module) -> tuple[int, torch.device]:
    """How many tokens they know, and where they lie."""
    embeddings: Any = twin.get_input_embeddings()  # type: ignore[operator]
    try:  # it need not be torch's: adapters wrap it, and compute its weight from several
        return int(embeddings.weight.shape[0]), device_of(embeddings)
    except (AttributeError, IndexError, StopIteration) as error:
        raise UnservableError(
            f"its input embedding is a {type(embeddings).__name__}, which has no weight to tell its size"
        ) from error


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


def _has_hooks(model: nn.Module) -> bool:
    """Whether modules have forward hooks of the user's. transformers' and accelerate's own know how the model is run."""
    hooks = (hook for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks) for hook in table.values())
    owners = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks)
    return any(owner.partition(".")[0] not in ("transformers", "accelerate") for owner in owners)


def _stored_in(kv_dtype: torch.dtype | None, spec: LayerSpec) -> LayerSpec:
    return spec if kv_dtype in (None, spec.dtype) else dataclasses.replace(spec, kv_dtype=kv_dtype)


def _made_fast(
    probe: Probe, backend: AttentionBackend, specs: tuple[LayerSpec, ...], groups: list[list[nn.Module]], memory: int
) -> Packs:
    """Pack the twin's weights, and fuse its layers over the packs, as far as the probe passes with that."""
    with calls_of([*probe.modules, *parents_of(probe.twin, probe.modules)]) as calls:
        packs = _packed(probe, backend, groups, memory)
    if packs.num_bytes:
        fused = Fused()
        own = probe.forward if backend.fuses else None
        try:
            fused.fuse(probe.twin, groups, packs, dict(zip(probe.modules, specs, strict=True)), calls, own)
            probe.check_sparing(backend)
        except Exception as error:  # of foreign code, which may raise anything where it is not meant to be
            logger.warning("layers are not fused: the model does not run as before with that (%s)", brief(error))
            fused.undo()
    return packs


def _packed(probe: Probe, backend: AttentionBackend, groups: list[list[nn.Module]], memory: int) -> Packs:
    """Packs with which the probe passes as before, else none."""
    packs = Packs()
    try:
        packs = Packs(groups, memory)
        probe.check(backend)
    except (*ERRORS, UnservableError) as error:
        logger.warning("weights are not packed: the model does not run as before with them (%s)", brief(error))
        packs.undo()
        return Packs()
    return packs
