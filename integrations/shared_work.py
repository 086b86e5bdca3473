"""Work that processes share by load: each takes the next item when it has room, and tells the others how it gets on.

The counter lives in a TCPStore of the main process. It need not survive a kill: what is done stands in the answer log, and a
run that begins again makes a new counter over what is left.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore

_TAKEN, _DONE, _ENDED = "taken", "done", "ended"


class SharedWork:
    """Items for `num_workers` of the processes. Made by every one of them at the same time."""

    def __init__(self, state: PartialState, items: Sequence[int], num_workers: int) -> None:
        self._items = items
        self._num_workers = num_workers
        host = os.environ.get("MASTER_ADDR", "localhost")
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if state.is_main_process else None
        port = [store.port if store else None]
        broadcast_object_list(port)
        self._store = store or TCPStore(host, port[0], is_master=False)

    def take(self, in_hand: int) -> int | None:
        """The next item, for a process that has `in_hand` already. None: nothing for it now; for good if it has none.

        One of several holds at most its share of what is left, so that at the end all are busy until all are done.
        """
        left = len(self._items) - self._store.add(_TAKEN, 0)
        if self._num_workers > 1 and in_hand and in_hand * self._num_workers >= left:
            return None
        place = self._store.add(_TAKEN, 1) - 1
        return self._items[place] if place < len(self._items) else None

    def note_done(self) -> None:
        """One item more is done."""
        self._store.add(_DONE, 1)

    def num_done(self) -> int:
        """Items done by all processes."""
        return self._store.add(_DONE, 0)

    def note_end(self) -> None:
        """This process has done all it took, and there is nothing more: it may go, the main one when all have ended."""
        self._store.add(_ENDED, 1)

    def all_ended(self) -> bool:
        """Whether every worker has."""
        return self._store.add(_ENDED, 0) == self._num_workers
