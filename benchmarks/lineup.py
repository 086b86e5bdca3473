"""Lineup: the peers of one measurement, loaded and warm, each ready to run a workload."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import external, machine, peers
from benchmarks.external import ExternalPeer
from benchmarks.machine import Usage
from benchmarks.outcome import Outcome
from benchmarks.subject import Subject
from benchmarks.workload import Workload

NAMES: tuple[str, ...] = (*peers.PEERS, *external.DRIVERS)


def names(text: str) -> list[str]:
    """The peers of a comma-separated argument; ArgumentTypeError for one that there isn't."""
    chosen = text.split(",")
    if unknown := set(chosen) - set(NAMES):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return chosen


class Lineup:
    """`names` of the peers, to be used with `with`. Those of this process share the subject's model.

    External ones hold their own copy in a process each, all loaded before the first run, and sleep while others run.
    `engine`: `CBConfig` fields for `hf_cb`.
    """

    def __init__(self, subject: Subject, names: Sequence[str], engine: Mapping[str, Any] | None = None) -> None:
        self.names, self.externals = tuple(names), dict[str, ExternalPeer]()
        self._subject, self._engine, self._stack = subject, dict(engine or {}), ExitStack()

    def __enter__(self) -> Lineup:
        subject = self._subject
        wanted = [
            ExternalPeer(name, subject.origin, subject.dtype, torch.get_num_threads(), subject.max_tokens)
            for name in self.names
            if name in external.DRIVERS
        ]
        with self._stack:  # closes what is open if a later one fails
            for peer in tqdm(wanted, desc="loading the external peers", unit="peer", leave=False):
                self.externals[peer.name] = self._stack.enter_context(peer)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm_up(self, workload: Workload) -> None:
        """One short run of each peer."""
        for name in tqdm(self.names, desc="warm-up", unit="peer", leave=False):
            self._run(name, workload.warmup(), tqdm(disable=True), len(workload.items))

    def run(self, name: str, workload: Workload, concurrency: int | None = None, title: str = "") -> tuple[Outcome, Usage]:
        """One measured run, with a progress bar; `concurrency` None: every request has a client of its own."""
        gc.collect()  # the memory of the peer before is not this one's
        peer = self.externals.get(name)
        with (
            tqdm(total=workload.output_tokens, desc=title or name, unit="tok", leave=False) as bar,
            machine.usage(*([peer.pid] if peer else [])) as usage,
        ):
            outcome = self._run(name, workload, bar, concurrency or len(workload.items))
        return outcome, usage

    def _run(self, name: str, workload: Workload, bar: tqdm, concurrency: int) -> Outcome:
        if peer := self.externals.get(name):
            return peer.run(workload, bar.update, concurrency).check(workload)
        options = self._engine if name.startswith("hf_cb") else {}
        return peers.PEERS[name](self._subject.model, workload, bar.update, concurrency, **options).check(workload)
