"""Pacer: how many tokens a step may spend on prompts while others wait for their next token."""

from __future__ import annotations

from hf_cb.core.running_mean import RunningMean

_MARGIN = 0.9  # of the target is aimed at: steps scatter
_FIRST = 32  # tokens, before anything was measured


class Pacer:
    """Keeps the time between two tokens of a sequence near `target_seconds` while prompts come in.

    A step's time is taken as that of its single tokens together, plus so much per further token; both are running means over
    the steps that were measured, so they follow the machine, the number of sequences and their lengths. At least `least`
    tokens are always allowed, or prompts would never be computed where single tokens alone take longer than the target.
    """

    def __init__(self, target_seconds: float, least: int) -> None:
        self._target = _MARGIN * target_seconds
        self._least = least
        self._single_seconds = RunningMean()  # a step of single tokens alone; 0: never measured
        self._token_seconds = RunningMean()  # each token beyond those

    def allowance(self) -> int:
        """Tokens beyond the single ones that a step may compute now."""
        if not self._token_seconds.value:
            return max(self._least, _FIRST)
        return max(self._least, int((self._target - self._single_seconds.value) / self._token_seconds.value))

    def observe(self, num_singles: int, num_others: int, seconds: float) -> None:
        """A step with so many sequences of one token each, and so many tokens of others, took `seconds`."""
        if not num_others:
            self._single_seconds.observe(seconds)
        elif num_singles or not self._token_seconds.value:  # prompts alone share their fixed cost among more tokens
            beyond = max(seconds - self._single_seconds.value, 0.1 * seconds) if num_singles else seconds
            self._token_seconds.observe(beyond / num_others)
