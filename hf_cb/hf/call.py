"""Call: one `generate()` after transformers' preamble, and what its rows and criteria say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_cb.hf.result_cache import NAME, KeptCache
from hf_cb.hf.rules import GoNativeError


@dataclass(frozen=True, slots=True)
class Stopping:
    """Where a call's rows end."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    criteria: list[Any]  # to run as they are


@dataclass(frozen=True, slots=True)
class Call:
    """A call after the preamble, its rows already as many as sequences (or beams) are asked for."""

    input_ids: torch.Tensor  # [B, T], left-padded
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    attention_mask: torch.Tensor | None  # [B, T], None: all ones; over what a passed cache has as well
    kept: KeptCache | None = None  # None: nobody will see a cache

    def keeps(self, name: str) -> bool:
        """Whether the caller wants `output_scores`, or whatever `name` says, in the result."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, name, None))

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
                lengths.append(criterion.max_length - self.input_ids.shape[1])
            elif type(criterion) is EosTokenCriteria:
                eos.update(criterion.eos_token_id.flatten().tolist())
            else:
                own.append(criterion)
        if not lengths:
            raise GoNativeError("no limit on the length")
        # plain generate looks at the criteria after a token, not before
        return Stopping(max(1, min(lengths)), frozenset(eos), own)

    def prompts(self) -> list[tuple[int, ...]]:
        """Each row, with what a passed cache has of it, without its left padding. A mask with a hole, or with padding on the
        right, is plain generate's business."""
        if self.input_ids.dim() != 2 or self.input_ids.dtype not in (torch.int64, torch.int32):
            raise GoNativeError(f"input ids that are {self.input_ids.dtype} {list(self.input_ids.shape)}")
        whole = self.input_ids if self.kept is None else self.kept.whole(self.input_ids)
        ids = whole.tolist()
        if self.attention_mask is None:
            return [tuple(row) for row in ids]
        mask = self.attention_mask
        if mask.shape != whole.shape:
            raise GoNativeError("an attention mask of another shape than the ids")
        kept = mask != 0
        if not torch.equal(kept.to(mask.dtype), mask):
            raise GoNativeError("an attention mask with values other than 0 and 1")
        if not bool((kept[:, -1] & (kept.int().diff(dim=1) >= 0).all(dim=1)).all()):
            raise GoNativeError("an attention mask with a hole or with padding on the right")
        return [tuple(row[len(row) - n :]) for row, n in zip(ids, kept.sum(dim=1).tolist(), strict=True)]
