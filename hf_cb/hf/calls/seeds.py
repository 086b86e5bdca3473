"""torch's global generator, as far as calls on many threads share it.

Plain `generate()` samples from it, so a seeded native call has to take it over for its duration. Who needs a seed meanwhile, on
another thread, must neither disturb that call nor get a number that follows from its seed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hf_cb import forks
from hf_cb.blocking import holding

_seeded = threading.RLock()  # one call at a time, of whatever model
_guard = threading.Lock()  # of the two below together
_stand_in: torch.Generator | None = None  # goes on where the global generator was, while a seeded call has that

forks.renewed_in_child(globals(), _seeded=threading.RLock, _guard=threading.Lock)


def draw_seed() -> int:
    """One draw from torch's global generator, so that `torch.manual_seed` makes a run repeatable."""
    with _guard:
        return int(torch.randint(0, 1 << 62, (), generator=_stand_in, dtype=torch.int64, device="cpu").item())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators (all devices') begin at `seed`. Afterwards they are as if only others had used them."""
    global _stand_in
    with holding(_seeded):
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        outside = torch.Generator()
        with _guard:
            outside.set_state(torch.get_rng_state())
            before = _stand_in
        try:
            with _guard:
                _stand_in = before or outside  # a seeded call inside of another one: the state before the outer one goes on
                torch.manual_seed(seed)
            yield
        finally:
            with _guard:
                torch.set_rng_state(outside.get_state())
                _stand_in = before
            if devices:
                torch.cuda.set_rng_state_all(devices)
