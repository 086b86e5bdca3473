"""Log-probabilities of output and prompt tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_cb.request import TokenLogprobs


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row's token, with its `counts[i]` most probable tokens, from logits [n, vocab] of any float dtype."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None])[:, 0].tolist()
    most = min(max(counts), logits.shape[-1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    return [TokenLogprobs(own[i], tuple(ids[i][:k]), tuple(values[i][:k])) for i, k in enumerate(counts)]


class PromptLogprobs:
    """Those of one prompt, in the order of its positions, as its chunks are computed. What was preempted is not noted twice."""

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt, self._count = prompt, count
        self._noted: list[TokenLogprobs] = []

    def wanted(self, start: int, end: int) -> range:
        """Which positions' logits to compute when a step covers `start` to `end`."""
        return range(max(start, len(self._noted)), min(end, len(self._prompt) - 1))

    def note(self, first: int, logits: torch.Tensor) -> None:
        """Take the logits [n, vocab] of the positions from `first` on. A position's logits are about the token after it."""
        if first != len(self._noted):  # a gap: it never becomes whole
            return
        tokens = self._prompt[first + 1 : first + 1 + len(logits)]
        self._noted += token_logprobs(logits, tokens, [self._count] * len(tokens))

    @property
    def is_whole(self) -> bool:
        """Whether every position has been noted."""
        return len(self._noted) == len(self._prompt) - 1

    def result(self) -> tuple[TokenLogprobs | None, ...]:
        """One for each token of the prompt; None for the first, which nothing comes before."""
        return (None, *self._noted)
