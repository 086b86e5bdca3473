"""Draws: `torch.multinomial` of one token, with a generator of the request's own.

torch draws by a race: token i's time is exponential with its probability as rate, and the first one wins. On a CPU most of the
cost are the exponentials of all the tokens that have no chance. `NativeDraws` takes the same numbers from the same generator in
C++ and works out the times of those alone that can win, for all rows at once. Whether this torch's numbers are those is tried
once, by comparing. (The same in numpy, for machines without a compiler, brought 1.13x, and is not kept.)
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


class Draws(Protocol):
    """A request's source of chance."""

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab] float32. Raises RuntimeError, as torch does, if those are none."""


class TorchDraws:
    """Draws by torch's own generator and `multinomial`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, probs: torch.Tensor) -> int:
        """A token by probs [vocab]."""
        return int(torch.multinomial(probs, 1, generator=self._generator))

    def take(self, times: torch.Tensor) -> None:
        """Put in the times [vocab] of the race that `draw` decides, as it takes them from the generator."""
        times.exponential_(generator=self._generator)


class NativeDraws:
    """The same tokens from the same seed on a CPU, compiled (kernels/csrc/draws.h)."""

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
    return _race([source for source in sources if isinstance(source, TorchDraws)], probs)


def _race(sources: Sequence[TorchDraws], probs: torch.Tensor) -> torch.Tensor:
    """What `multinomial` does, all but its look at the probabilities, for which it waits for the device."""
    least, most = probs.aminmax(dim=-1)  # a NaN is both
    bad = ~((least >= 0) & (most > 0) & most.isfinite())
    times = torch.empty_like(probs)  # all memory first: a step for which there is none is tried again, a draw is not
    for source, row in zip(sources, times, strict=True):
        source.take(row)
    return torch.div(probs, times, out=times).argmax(dim=-1).masked_fill_(bad, -1)


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
    return TorchDraws(seed, device)


def _race_of_all(source: np.random.Generator, probs: torch.Tensor) -> int:
    """A token by probs [m] of any dtype, by the times of all."""
    _refused(probs)
    words = source.integers(0, 1 << 64, size=len(probs), dtype=np.uint64) & np.uint64((1 << _BITS) - 1)  # of uniform numbers
    times = torch.from_numpy(-np.log1p(words * -(2.0**-_BITS)))
    return int((probs / times.to(probs.dtype)).argmax())


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
