"""Draws: `torch.multinomial` of one token, with a generator of the request's own.

torch draws by a race: token i's time is exponential with its probability as rate, and the first one wins. On a CPU most of the
cost are the exponentials of all the tokens that have no chance. `MersenneDraws` takes the same numbers from numpy's generator,
which is the same, and works out the times of those alone that can win; `NativeDraws` does so in C++, for all rows at once.
Whether this torch's numbers are those is tried once for each, by comparing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hf_cb.kernels import extension

_BITS = 53  # of a double's fraction
_HIGH_BITS = 21  # that a float32 holds as they are
_SLACK = 1 + 1e-5  # far above a quotient's rounding


class Draws(Protocol):
    """A request's source of chance."""

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab] float32. Raises RuntimeError, as torch does, if those are none."""


class TorchDraws:
    """torch's own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab]."""
        return int(torch.multinomial(probs, 1, generator=self._generator))

    def take(self, times: torch.Tensor) -> None:
        """Put in the times [vocab] of the race that `draw` decides, as it takes them from the generator."""
        times.exponential_(generator=self._generator)


class MersenneDraws:
    """The same tokens from the same seed, on a CPU."""

    def __init__(self, seed: int) -> None:
        self._words = _mersenne_twister(seed)

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab]."""
        if probs.dtype != torch.float32:
            return _race_of_all(self._words, probs)
        p = probs.numpy()
        best = int(p.argmax())
        if not (np.isfinite(p[best]) and p[best] > 0):  # argmax finds a NaN, too
            return _refused(probs)
        words = _draw_words(self._words, len(p))
        # A time is no shorter than its uniform number, so what is slower by that number than the best token cannot win.
        limit = p * np.float32(_SLACK * 2.0**_HIGH_BITS * _times(words[best]) / p[best])
        runners = np.flatnonzero((words >> np.uint64(_BITS - _HIGH_BITS)).astype(np.int32).astype(np.float32) < limit)
        with np.errstate(divide="ignore"):  # a time of zero wins
            return int(runners[np.argmax(p[runners] / _times(words[runners]))]) if len(runners) else best


class NativeDraws:
    """The same, compiled (kernels/csrc/draws.h)."""

    def __init__(self, seed: int) -> None:
        state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)["state"]
        self.state = torch.from_numpy(np.append(state["key"], np.uint32(state["pos"])).view(np.int32))

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab]."""
        if probs.dtype != torch.float32:
            return self._draw_in_numpy(probs)
        token = int(torch.ops.hf_cb.draw([self.state], probs[None].contiguous()))
        return _refused(probs) if token < 0 else token

    def _draw_in_numpy(self, probs: torch.Tensor) -> int:
        state, bits = self.state.numpy().view(np.uint32), np.random.MT19937()
        bits.state = {"bit_generator": "MT19937", "state": {"key": state[:-1], "pos": int(state[-1])}}
        token = _race_of_all(np.random.Generator(bits), probs)
        after: Any = bits.state["state"]
        state[:-1], state[-1] = after["key"], after["pos"]
        return token


def draw_all(sources: Sequence[Draws], probs: torch.Tensor) -> torch.Tensor:
    """A token for each row of probs [n, vocab], by its own source: [n] int64, on the device of probs, without waiting for it.
    -1 where a row's are no probabilities."""
    native = [source.state for source in sources if isinstance(source, NativeDraws)]
    if len(native) == len(sources):
        tokens: torch.Tensor = torch.ops.hf_cb.draw(native, probs.contiguous())
        return tokens
    drawn = [source for source in sources if isinstance(source, TorchDraws)]
    if len(drawn) == len(sources):
        return _race(drawn, probs)
    return torch.tensor(
        [_draw(source, row) for source, row in zip(sources, probs, strict=True)], dtype=torch.int64, device="cpu"
    )


def _race(sources: Sequence[TorchDraws], probs: torch.Tensor) -> torch.Tensor:
    """What `multinomial` does, all but its look at the probabilities, for which it waits for the device."""
    least, most = probs.aminmax(dim=-1)  # a NaN is both
    bad = ~((least >= 0) & (most > 0) & most.isfinite())
    times = torch.empty_like(probs)  # all memory first: a step for which there is none is tried again, a draw is not
    for source, row in zip(sources, times, strict=True):
        source.take(row)
    return torch.div(probs, times, out=times).argmax(dim=-1).masked_fill_(bad, -1)


def _draw(source: Draws, probs: torch.Tensor) -> int:
    try:
        return source.draw(probs)
    except RuntimeError:
        return -1


def refusal() -> RuntimeError:
    """torch's own error for what are no probabilities."""
    try:
        torch.multinomial(torch.tensor([math.nan], dtype=torch.float32, device="cpu"), 1)
    except RuntimeError as error:
        return error
    raise AssertionError("multinomial drew from NaN")


def _refused(probs: torch.Tensor) -> int:
    """Raises it where probs are none."""
    return int(torch.multinomial(probs, 1, generator=torch.Generator(probs.device)))


def draws(seed: int, device: torch.device) -> Draws:
    """A source for one request."""
    if device.type == "cpu" and _native_is_torchs():
        return NativeDraws(seed)
    if device.type == "cpu" and _torch_is_mersenne():
        return MersenneDraws(seed)
    return TorchDraws(seed, device)


def _mersenne_twister(seed: int) -> np.random.Generator:
    """numpy's generator in the state that torch's has after `manual_seed`, which takes the low 32 bits."""
    state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
    bits = np.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": state["state"]}
    return np.random.Generator(bits)


def _race_of_all(source: np.random.Generator, probs: torch.Tensor) -> int:
    """A token by probs [m] of any dtype, by the times of all."""
    _refused(probs)
    times = torch.from_numpy(-np.log1p(_draw_words(source, len(probs)) * -(2.0**-_BITS)))
    return int((probs / times.to(probs.dtype)).argmax())


def _draw_words(source: np.random.Generator, count: int) -> np.ndarray:
    """The bits of so many uniform numbers."""
    return source.integers(0, 1 << 64, size=count, dtype=np.uint64) & np.uint64((1 << _BITS) - 1)


def _times(words: np.ndarray) -> np.ndarray:
    """Exponential times, float32, from 53 random bits each."""
    return (-np.log1p(words * -(2.0**-_BITS))).astype(np.float32)


@functools.cache
def _native_is_torchs() -> bool:
    """Whether the compiled form is there and draws what torch draws."""
    try:
        extension.load()
    except extension.BuildError:
        return False
    ours, theirs = NativeDraws(20), TorchDraws(20, torch.device("cpu"))
    rows = (torch.linspace(0, power, 3000, dtype=torch.float32, device="cpu").exp().softmax(-1) for power in (0, 1, 2, 3))
    return all(ours.draw(row) == theirs.draw(row) for row in rows)


@functools.cache
def _torch_is_mersenne() -> bool:
    """Whether this torch makes its exponential numbers of the same bits in the same way."""
    seed, words = 20, _mersenne_twister(20)
    generator = torch.Generator().manual_seed(seed)
    for length in (1, 7, 3000):
        times = torch.empty(length, dtype=torch.float32, device="cpu").exponential_(generator=generator).numpy()
        if not np.array_equal(times, _times(_draw_words(words, length))):
            return False
    return True
