"""SwapCost: whether a preempted sequence's keys and values are sooner copied to the host and back, or computed again."""

from __future__ import annotations

from hf_cb.core.running_mean import RunningMean


class SwapCost:
    """Running means of what was measured. `block_seconds`: to copy one block one way, as a first guess."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = RunningMean(block_seconds)
        self._token_seconds = RunningMean()  # of each token of steps with prompts in them; 0: never measured

    def is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to copy so many blocks out and in again takes less time than to compute so many tokens."""
        token_seconds = self._token_seconds.value
        return not token_seconds or 2 * num_blocks * self._block_seconds.value < num_tokens * token_seconds

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step with more tokens than sequences took so long."""
        self._token_seconds.observe(seconds / num_tokens)

    def observe_swap(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied in so long."""
        self._block_seconds.observe(seconds / num_blocks)
