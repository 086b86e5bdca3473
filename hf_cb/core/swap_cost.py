"""SwapCost: whether a preempted sequence's keys and values are sooner copied to the host and back, or computed again."""

from __future__ import annotations

_WEIGHT = 0.25  # of the latest measurement in the running means


class SwapCost:
    """Running means of what was measured. `block_seconds`: to copy one block one way, as a first guess."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._token_seconds = 0.0  # of each token of steps with prompts in them; 0: never measured

    def is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to copy so many blocks out and in again takes less time than to compute so many tokens."""
        return not self._token_seconds or 2 * num_blocks * self._block_seconds < num_tokens * self._token_seconds

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step with more tokens than sequences took so long."""
        latest = seconds / num_tokens
        self._token_seconds += (_WEIGHT if self._token_seconds else 1.0) * (latest - self._token_seconds)

    def observe_swap(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied in so long."""
        self._block_seconds += _WEIGHT * (seconds / num_blocks - self._block_seconds)
