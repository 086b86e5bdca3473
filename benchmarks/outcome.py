"""Outcome: what one run of one peer gave, as data."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.workload import Item, Workload


@dataclass(frozen=True, slots=True)
class Row:
    """One request's result. Times are on `time.perf_counter()`'s clock; `token_times` has one for each token."""

    item: Item
    sent_at: float
    tokens: tuple[int, ...]
    token_times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. None: the peer doesn't tell.

    `kv_waste`: the part of the KV memory held that stored no token in use, over the run. `steps`: forward passes.
    `outside_model`: the part of the steps' time not spent in the model's forward pass.
    """

    rows: tuple[Row, ...]
    wall_seconds: float
    steps: int
    kv_waste: float | None = None
    outside_model: float | None = None
    notes: str = ""

    def check(self, workload: Workload) -> Outcome:
        """Itself, if every request has exactly its forced number of tokens, each with a time; else RuntimeError."""
        if sorted(row.item.index for row in self.rows) != sorted(item.index for item in workload.items):
            raise RuntimeError(f"{len(self.rows)} results for {len(workload.items)} requests, or not the same ones")
        for row in self.rows:
            want = row.item.output_length
            if len(row.tokens) != want or len(row.token_times) != want:
                raise RuntimeError(
                    f"request {row.item.index}: {len(row.tokens)} tokens and {len(row.token_times)} times, not {want}"
                )
        return self
