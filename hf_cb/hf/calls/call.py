"""Call: one `generate()` after transformers' preamble, and what its rows and criteria say."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_cb.errors import InvalidArgumentError
from hf_cb.hf.calls.result_cache import NAME, KeptCache
from hf_cb.hf.calls.rules import GoNativeError
from hf_cb.hf.calls.surroundings import Surroundings


def number_of(name: str, value: Any) -> Any:
    """The number that an option of transformers' says, numpy's and torch's too. Raises GoNativeError where it is none: plain
    generate has an answer, or an error, for it."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(value, numbers.Real):
        raise GoNativeError(f"option {name} is no number")
    return value


def whole(name: str, value: Any) -> int:
    """The value of an option that must be a whole number."""
    number = number_of(name, value)
    if not isinstance(number, numbers.Integral):
        raise GoNativeError(f"option {name} is no whole number")
    return int(number)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Where a call's rows end."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    criteria: list[Any]  # to run as they are


@dataclass(frozen=True, slots=True)
class Call:
    """A call after the preamble, made on its caller's thread; its rows are as many as sequences (or beams) are asked for."""

    input_ids: torch.Tensor  # [B, T], left-padded
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    attention_mask: torch.Tensor | None  # [B, T], None: all ones; over what a passed cache has as well
    kept: KeptCache | None = None  # None: nobody will see a cache
    surroundings: Surroundings = field(default_factory=Surroundings)

    def keeps(self, name: str) -> bool:
        """Whether the caller wants `output_scores`, or whatever `name` says, in the result."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, name, None))

    @property
    def rows_per_prompt(self) -> int:
        """How many rows there are for a prompt where there are no beams: its samples."""
        return max(1, whole("num_return_sequences", self.config.num_return_sequences or 1))

    @property
    def pad_token(self) -> int | None:
        """What stands where a row has no token."""
        pad = self.config._pad_token_tensor
        return None if pad is None else whole("pad_token_id", pad)

    @property
    def has_eos(self) -> bool:
        """Whether plain generate puts pad tokens after a row's end."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    def keep(self, rows: torch.Tensor) -> dict[str, Any]:
        """The cache of these finished rows [B, n], as a field of the output; nothing, where plain generate has none."""
        if self.kept is None:
            return {}
        mask = self.attention_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), rows.shape[1] - self.input_ids.shape[1])], dim=1)
        return {NAME: self.kept.stand_for(rows, mask)}

    def stopping(self) -> Stopping:
        """What the criteria come to. Raises GoNativeError where there is no limit."""
        lengths, eos, own = [], set[int](), []
        for criterion in self.criteria:  # the first that is met counts
            if type(criterion) is MaxLengthCriteria:
                lengths.append(number_of("max_length", criterion.max_length))
            elif type(criterion) is EosTokenCriteria:
                eos.update(whole("eos_token_id", token) for token in criterion.eos_token_id.flatten().tolist())
            else:
                own.append(criterion)
        limits = [length for length in lengths if length < math.inf]  # no length comes to infinity, nor to what is no number
        if not limits and lengths and not (eos or own):
            raise InvalidArgumentError(
                f"max_new_tokens, max_length: take a finite number, unless an end-of-sequence token or a stopping criterion "
                f"ends the rows; got {lengths[0]!r}"
            )
        if not limits:
            raise GoNativeError("no limit on the length")
        # plain generate looks at the criteria after a token, not before
        least = min(limits) - self.input_ids.shape[1]
        return Stopping(1 if least < 1 else math.ceil(least), frozenset(eos), own)

    def prompts(self) -> list[tuple[int, ...]]:
        """Each row, with what a passed cache has of it, without its left padding. A mask with a hole, or with padding on the
        right, is plain generate's business."""
        if self.input_ids.dim() != 2 or self.input_ids.dtype not in (torch.int64, torch.int32):
            raise GoNativeError(f"input ids that are {self.input_ids.dtype} {list(self.input_ids.shape)}")
        rows = self.input_ids if self.kept is None else self.kept.whole(self.input_ids)
        ids = rows.tolist()
        if self.attention_mask is None:
            return [tuple(row) for row in ids]
        mask = self.attention_mask
        if mask.shape != rows.shape:
            raise GoNativeError("an attention mask of another shape than the ids")
        kept = mask != 0
        if not torch.equal(kept.to(mask.dtype), mask):
            raise GoNativeError("an attention mask with values other than 0 and 1")
        if not bool((kept[:, -1] & (kept.int().diff(dim=1) >= 0).all(dim=1)).all()):
            raise GoNativeError("an attention mask with a hole or with padding on the right")
        return [tuple(row[len(row) - n :]) for row, n in zip(ids, kept.sum(dim=1).tolist(), strict=True)]
