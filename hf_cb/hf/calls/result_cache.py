"""The cache in a result, and in a call that goes on from one: its tokens are known, its keys and values are made when read.

The engine keeps keys and values in blocks of its own, and few callers look at those of a result. So what they get is the very
object that transformers made for the call, which stands for its tokens until somebody touches it. Then it becomes what plain
generate would have returned, by one forward of the user's model, on the reader's thread.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_cb.errors import CacheLostError
from hf_cb.hf.calls.modes import undisturbed
from hf_cb.hf.calls.rules import GoNativeError
from hf_cb.hf.twins.fingerprint import Fingerprint
from hf_cb.hf.twins.twin import in_training, shared_tensors
from hf_cb.hf.twins.weights import Marks

NAMES = ("cache", "past_key_values")
"""What a cache is called: the newer name first."""
NAME = next(name for name in NAMES if name in {field.name for field in fields(GenerateDecoderOnlyOutput)})
_CAME = "_is_user_defined"  # transformers' note, in a cache, that it came with a call

_swap = threading.Lock()  # held for two assignments


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The model as it was in one call. Keeps neither the model nor its backend alive."""

    model: weakref.ref[Any]
    turn: Callable[
        [], Callable[[], AbstractContextManager[Any]] | None
    ]  # weak: to run the model while no other plain call does
    fingerprint: Fingerprint
    weights: tuple[object, ...]  # marks of them
    is_inference: bool

    @classmethod
    def of(cls, model: Any, turn: Any, fingerprint: Fingerprint, marks: Marks) -> Origin:
        """The model as it is now; `marks`: of its weights."""
        return cls(weakref.ref(model), turn, fingerprint, marks.all(), torch.is_inference_mode_enabled())

    def is_like(self, other: Origin) -> bool:
        """Whether nothing has changed between the two that keys and values depend on."""
        same = self.model == other.model and self.weights == other.weights
        return same and (self.fingerprint is other.fingerprint or self.fingerprint.matches(other.fingerprint))


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a cache stands for."""

    tokens: torch.Tensor  # [B, n]
    mask: torch.Tensor | None  # [B, n]; None: all ones
    positions: torch.Tensor | None  # [B, n]; None: those that the mask gives
    prompt: int  # how many tokens the first forward had
    origin: Origin
    kind: Any  # its class
    blank: dict[str, Any]  # the attributes of the cache while it was empty


def is_blank(cache: Any) -> bool:
    """Whether it is transformers' default cache, and nothing has been put into it."""
    return type(cache) is DynamicCache and not any(getattr(layer, "is_initialized", True) for layer in cache.layers)


def contents_of(cache: Any) -> Contents | None:
    """What an unread cache stands for; None: it has been read, or is none of ours."""
    return vars(cache).get("_contents") if isinstance(cache, Cache) else None


def stand_for(
    cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, prompt: int, origin: Origin
) -> None:
    """Let a cache, empty or unread, stand for the keys and values of these tokens."""
    before = contents_of(cache)
    kind: Any = type(cache) if before is None else before.kind
    blank = dict(vars(cache)) if before is None else before.blank
    came_with_a_call = blank.pop(_CAME, None) or vars(cache).get(_CAME)
    contents = Contents(tokens, mask, positions, prompt, origin, kind, blank)
    with _swap:
        vars(cache).clear()
        vars(cache).update({"_contents": contents} | ({_CAME: True} if came_with_a_call else {}))
        object.__setattr__(cache, "__class__", _unread(kind))


@dataclass(frozen=True, slots=True, eq=False)
class KeptCache:
    """A cache that outlives its call: it goes with the result, or it came with the call."""

    cache: Any
    origin: Origin
    positions: torch.Tensor | None  # [B, T], where the caller gave them
    prompt: int  # how many tokens its first forward has, or had
    before: torch.Tensor | None = None  # [B, n]: tokens that it has and the call's ids don't repeat

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows, with what they go on from."""
        return rows if self.before is None else torch.cat([self.before, rows], dim=1)

    def stand_for(self, rows: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Let the cache stand for all tokens of `rows` but the last, which no step has had as its input. Returns the cache."""
        tokens = self.whole(rows)[:, :-1].clone()  # the caller may write into the result
        mask = None if mask is None else mask[:, :-1]
        stand_for(self.cache, tokens, mask, _continued(self.positions, tokens), self.prompt, self.origin)
        return self.cache


def kept_cache(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    config: Any,
    model_kwargs: dict[str, Any],
    is_callers: bool,
    origin: Callable[[], Origin],
) -> KeptCache | None:
    """The cache of a call after the preamble; None: nobody will see one. Raises GoNativeError for one that the call can't go on
    from as if its tokens came with the ids."""
    cache = next((model_kwargs[name] for name in NAMES if model_kwargs.get(name) is not None), None)
    if cache is None or not (is_callers or config.return_dict_in_generate):
        return None
    contents, now = contents_of(cache), origin()
    if not is_callers or (contents is None and is_blank(cache)):
        return KeptCache(cache, now, positions, input_ids.shape[1])
    if contents is None or not config.use_cache or config.num_beams > 1 or positions is not None or config.prefill_chunk_size:
        raise GoNativeError("a cache that was read, or beside other options than plain ones")
    if contents.kind is not DynamicCache:
        raise GoNativeError(f"a {contents.kind.__name__} to go on from")
    if not contents.origin.is_like(now):
        raise GoNativeError("a cache of another model, or of other weights")
    return KeptCache(cache, now, None, contents.prompt, _before(contents, input_ids, mask, config))


def _before(contents: Contents, input_ids: torch.Tensor, mask: torch.Tensor | None, config: Any) -> torch.Tensor | None:
    (rows, num_cached), num_ids = contents.tokens.shape, input_ids.shape[1]
    num_masked = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    repeats = num_masked == num_ids  # all ids once more; otherwise the new ones alone, and a mask over all
    if rows != len(input_ids) or num_masked is None or num_masked != (num_ids if repeats else num_cached + num_ids):
        raise GoNativeError(
            "a cache that ids and mask don't go on from: they are all ids, or those that it lacks and a mask over all"
        )
    if repeats and not (num_ids > num_cached and torch.equal(input_ids[:, :num_cached], contents.tokens)):
        raise GoNativeError("a cache of other tokens than the ids")
    ones = contents.tokens.new_ones(contents.tokens.shape)
    before, now = (ones if m is None else m[:, :num_cached].to(ones.dtype) for m in (contents.mask, mask))
    if not torch.equal(before, now):
        raise GoNativeError("a cache with another mask")
    return None if repeats else contents.tokens


def _continued(positions: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
    if positions is None:
        return None
    new = torch.arange(1, tokens.shape[1] - positions.shape[1] + 1, dtype=torch.int64, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + new], dim=1)


class _Unread:
    """What an unread cache has before its own class's: whatever is missing is there once it has been read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and others look for in any object is nothing that a cache has in itself
            raise AttributeError(name)
        _read(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != _CAME:
            _read(self)
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(self)
        return self.__reduce_ex__(protocol)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How many tokens it has: known without reading it, where that is a plain number."""
        contents = contents_of(self)
        if contents is not None and layer_idx == 0 and issubclass(contents.kind, DynamicCache):
            layers = contents.blank["layers"]
            if not layers or isinstance(layers[0], DynamicLayer):
                return contents.tokens.shape[1]
        _read(self)
        return self.get_seq_length(layer_idx)


@functools.cache
def _unread(kind: Any) -> type[Any]:
    own = {name: value for name, value in vars(_Unread).items() if inspect.isfunction(value)}
    # A single base: an object can change to a class and back that has the same memory.
    return type(kind.__name__, (kind,), own | {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _read(cache: Any) -> None:
    """Make it what plain generate would have returned. Raises CacheLostError where that can't be."""
    contents = contents_of(cache)
    if contents is None:  # another thread has read it
        return
    with undisturbed():  # a reader's modes are not the call's
        filled = _filled(contents)
    with _swap:
        if contents_of(cache) is not contents:
            return
        del vars(cache)["_contents"]
        vars(cache).update(vars(filled) | vars(cache))
        object.__setattr__(cache, "__class__", contents.kind)


def _filled(contents: Contents) -> Any:
    filled = object.__new__(contents.kind)
    vars(filled).update(contents.blank, layers=copy.deepcopy(contents.blank["layers"]))
    origin = contents.origin
    model, turn = origin.model(), origin.turn()
    if model is None:
        raise _lost("no longer exists")
    with (
        nullcontext() if turn is None else turn(),
        torch.inference_mode(origin.is_inference),
        torch.autocast(contents.tokens.device.type, enabled=False),
    ):
        if (reason := in_training(model)) is not None:
            raise _lost(f"would now give others ({reason})")
        if not origin.is_like(
            Origin.of(model, None, Fingerprint.of(model, origin.fingerprint.books), Marks(shared_tensors(model)))
        ):
            raise _lost("has changed since: its weights, or its modules")
        for length in _forwards(contents):
            type(model).generate(model, **_call(contents, length), **{NAME: filled}, **_NO_OPTIONS, custom_generate=_prefill)
    vars(filled).pop(_CAME, None)
    return filled


def _forwards(contents: Contents) -> tuple[int, ...]:
    """After how many tokens each forward ends. A padding token attends to nothing, which eager attention takes as to all tokens
    of the forward: so the prompt has one of its own, as in plain generate."""
    length = contents.tokens.shape[1]
    is_padded = contents.mask is not None and not bool(contents.mask.all())
    return (contents.prompt, length) if is_padded and contents.prompt < length else (length,)


def _call(contents: Contents, length: int) -> dict[str, Any]:
    parts = {"input_ids": contents.tokens, "attention_mask": contents.mask, "position_ids": contents.positions}
    call = {name: part[:, :length] for name, part in parts.items() if part is not None}
    return {"attention_mask": torch.ones_like(call["input_ids"])} | call


def _lost(why: str) -> CacheLostError:
    return CacheLostError(
        f"{NAME}: its keys and values are made when they are first read, by the model that generated, which {why}; "
        f"call generate() with all ids and without it"
    )


# Whatever the model's generation config says, transformers' preamble is to prepare these tokens, and this cache, as they are.
_NO_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("max_length", "min_new_tokens", "cache_implementation", "prefill_chunk_size")),
    **dict.fromkeys(("max_new_tokens", "num_beams", "num_return_sequences"), 1),
    "min_length": 0,
    "token_healing": False,
    "use_cache": True,
}


def _prefill(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    model._prefill(input_ids, generation_config, model_kwargs)
    return input_ids
