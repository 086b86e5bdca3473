"""Beams: the logits of one request's beams on their way to a choice."""

from __future__ import annotations

import torch

from hf_cb.core.output import ScheduledRow
from hf_cb.request import Choice, Request, Search


class Beams:
    """Keeps each beam's logits until those of all are there.

    A step may compute some of them only: the budget ends, the step failed and is tried in parts, or they were preempted and are
    on their way again. What comes twice is the same.
    """

    def __init__(self, request: Request, search: Search) -> None:
        self._search = search
        self._num_prompt_tokens = len(request.prompt)
        self._logits: dict[int, torch.Tensor] = {}  # beam -> [vocab]

    def take(self, row: ScheduledRow, logits: torch.Tensor) -> None:
        """The logits [vocab] after the last token of a row."""
        is_late = row.end != self._num_prompt_tokens + self._search.num_chosen  # the choice has been made without it
        if not is_late:
            self._logits[row.beam] = logits.clone()  # not a view that keeps those of the whole step

    def choose(self) -> Choice | None:
        """How the beams go on; None: some are still to come. Raises what the search raises."""
        expected = self._search.width if self._search.num_chosen else 1  # at first there is the prompt alone
        if len(self._logits) < expected:
            return None
        logits = torch.stack([self._logits[beam] for beam in range(expected)])
        self._logits.clear()
        return self._search.choose(logits)
