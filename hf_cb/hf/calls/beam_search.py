"""Beam search for one prompt: how transformers chooses, step by step, over logits that the engine has computed.

The arithmetic, its order and its precision are those of `GenerationMixin._beam_search` (transformers 5), for a batch of one
prompt: each step keeps more candidates than beams, so that beams enough go on when the best of them end; what has ended
competes by score / length ** length_penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_cb.hf.calls.company import Steps
from hf_cb.hf.calls.rules import no_such_token
from hf_cb.hf.calls.surroundings import Surroundings
from hf_cb.request import Choice

_NEVER = -1.0e9  # the score of what is not to be chosen


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """What a call says about its search."""

    num_beams: int
    num_candidates: int  # kept per step
    max_length: int  # of prompt, padding and output together
    length_penalty: float
    early_stopping: bool | Literal["never"]
    do_sample: bool
    fill: int  # the token that stands where a sequence has none
    vocab_size: int  # of what the model can be given: no beam goes on from another token
    keep_scores: bool
    keep_logits: bool


@dataclass(frozen=True, slots=True, eq=False)
class Beams:
    """What a search has after a step.

    sequences: [num_beams, max_length] int64, the prompt included, the best that have ended first; beam_scores: [num_beams]
    float32; beam_indices: [num_beams, max_length - prompt] int32, the beam that each token came from, -1 where there is none.
    """

    sequences: torch.Tensor
    beam_scores: torch.Tensor
    beam_indices: torch.Tensor
    running: torch.Tensor  # as `sequences`: those that go on
    num_chosen: int  # steps
    can_improve: bool
    are_full: bool  # as many have ended as there are beams
    all_end: bool  # each candidate ended in this step

    @property
    def num_output_tokens(self) -> torch.Tensor:
        """[num_beams]: of each of `sequences`."""
        return (self.beam_indices >= 0).sum(dim=1)


class BeamSearch:
    """One prompt's search (`hf_cb.request.Search`). After its end `beams` is what it has found."""

    def __init__(
        self,
        row: torch.Tensor,
        options: BeamOptions,
        surroundings: Surroundings,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        seed: int,
        steps: Steps[Beams],
        number: int = 0,
    ) -> None:
        """`row`: [1, n] ids, padding included. `seed`: of the draws, if it samples. `steps`: of the searches that end with this
        one, which is `number` of them."""
        self._steps, self._number = steps, number
        self.width = options.num_beams
        self.num_chosen = 0
        self.error: BaseException | None = None  # the caller's own, with its traceback
        self.all_scores: tuple[torch.Tensor, ...] | None = () if options.keep_scores else None  # [num_beams, vocab] a step
        self.all_logits: tuple[torch.Tensor, ...] | None = () if options.keep_logits else None
        self._options, self._surroundings, self._processors, self._criteria = options, surroundings, processors, criteria
        self.met_dead_end = False  # a beam went on where nothing could: equal scores, whose order hangs on every step
        self._num_prompt = row.shape[1]
        with torch.inference_mode(False):  # else the engine's thread could not write into them
            self._begin(row)
            self._generator = torch.Generator(row.device).manual_seed(seed) if options.do_sample else None

    def _begin(self, row: torch.Tensor) -> None:
        beams, room = self.width, self._options.max_length
        self._running = torch.full((beams, room), self._options.fill, dtype=torch.int64, device=row.device)
        self._running[:, : self._num_prompt] = row
        self._running_scores = torch.full((beams,), _NEVER, dtype=torch.float32, device=row.device)
        self._running_scores[0] = 0.0  # all begin alike: only one of them counts at first
        self._running_indices = torch.full((beams, room - self._num_prompt), -1, dtype=torch.int32, device=row.device)
        self._sequences = self._running.clone()
        self._beam_scores = torch.full((beams,), _NEVER, dtype=torch.float32, device=row.device)
        self._beam_indices = self._running_indices.clone()
        self._ended = torch.zeros(beams, dtype=torch.bool, device=row.device)  # which of `sequences` there are
        self._can_improve = True

    @property
    def beams(self) -> Beams:
        """What there was when all searches of the call that end together had ended."""
        return self._steps.last(self._number)

    def choose(self, logits: Any) -> Choice:
        """One step: which beams go on, and with which tokens."""
        if not self._processors and bool(logits.isnan().any()):  # a processor may know what to do with it
            raise FloatingPointError("its logits hold NaN")
        try:
            return self._surroundings.run(self._choose, logits.to(self._running.device))
        except BaseException as error:  # of a processor or criterion; SystemExit too is this caller's affair
            self.error = error
            raise

    def _choose(self, logits: torch.Tensor) -> Choice:
        total = self._total_scores(logits)
        scores, picked = self._candidates(total)
        vocab = total.shape[1] // self.width
        parents, tokens = picked // vocab, picked % vocab
        place = self._num_prompt + self.num_chosen
        rows, indices = self._running[parents], self._running_indices[parents]
        rows[:, place] = tokens
        indices[:, self.num_chosen] = parents.to(torch.int32)
        ends = self._criteria(rows[:, : place + 1], self.all_scores)

        self._finish(rows, indices, scores, ends)
        kept = (scores + ends.float() * _NEVER)[None].topk(self.width).indices[0]
        self._running, self._running_indices = rows[kept], indices[kept]
        self._running_scores = (scores + ends.float() * _NEVER)[kept]
        self.num_chosen += 1
        self._can_improve = self._can_improve and self._may_improve()
        if self._is_over(bool(ends.all())):
            self.met_dead_end |= bool((self._beam_scores < _NEVER / 2).any())
            return Choice(
                (), (), tuple(self._sequences[0, self._num_prompt :][: int((self._beam_indices[0] >= 0).sum())].tolist())
            )
        self.met_dead_end |= bool((self._running_scores < _NEVER / 2).any())
        chosen = tokens[kept].tolist()
        if max(chosen) >= self._options.vocab_size:
            raise no_such_token(max(chosen), self._options.vocab_size)
        return Choice(tuple(parents[kept].tolist()), tuple(chosen))

    def _is_over(self, all_end: bool) -> bool:
        """Whether all searches have ended with this step, or before it; or this one can't go on, and they will."""
        beams = Beams(
            self._sequences,
            self._beam_scores,
            self._beam_indices,
            self._running,
            self.num_chosen,
            self._can_improve,
            bool(self._ended.all()),
            all_end,
        )
        if (step := self._steps.add(self._number, beams)) is not None:
            is_full = self._options.early_stopping is True and all(each.are_full for each in step)
            if is_full or not any(each.can_improve for each in step) or all(each.all_end for each in step):
                self._steps.end = self.num_chosen
        return self._steps.end is not None or self._num_prompt + self.num_chosen == self._options.max_length

    def _total_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[1, num_beams * vocab]: of every token after every beam."""
        logits = logits.float().expand(self.width, -1).clone()  # the prompt's are the same for all beams
        rows: Any = self._running[:, : self._num_prompt + self.num_chosen]
        scores = self._processors(rows, logits.log_softmax(dim=-1))
        if self.all_logits is not None:
            self.all_logits += (logits,)
        if self.all_scores is not None:
            self.all_scores += (scores.clone(),)
        return (scores + self._running_scores[:, None]).reshape(1, -1)

    def _candidates(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and places in `total` of the candidates, the best first."""
        if self._generator is None:
            scores, picked = total.topk(self._options.num_candidates)
        else:
            drawn = torch.multinomial(total.softmax(dim=-1), self._options.num_candidates, generator=self._generator)
            scores, order = total.gather(1, drawn).sort(dim=-1, descending=True)
            picked = drawn.gather(1, order)
        return scores[0], picked[0]

    def _finish(self, rows: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor, ends: torch.Tensor) -> None:
        """Let the candidates that end compete with those that have ended before; only what would be a beam counts."""
        counts = ends.clone()
        counts[self.width :] = False
        scores = scores / ((self.num_chosen + 1) ** self._options.length_penalty)
        if (bool(self._ended.all()) and self._options.early_stopping is True) or not self._can_improve:
            scores = scores + _NEVER
        scores = scores + (~counts).float() * _NEVER
        merged = torch.cat((self._beam_scores, scores))
        best = merged[None].topk(self.width).indices[0]
        self._sequences = torch.cat((self._sequences, rows))[best]
        self._beam_indices = torch.cat((self._beam_indices, indices))[best]
        self._ended = torch.cat((self._ended, counts))[best]
        self._beam_scores = merged[best]

    def _may_improve(self) -> bool:
        """Whether a running beam could still beat the worst of what has ended, by transformers' estimate of its length."""
        options = self._options
        if options.early_stopping == "never" and options.length_penalty > 0.0:
            length = options.max_length - self._num_prompt
        else:
            length = self.num_chosen
        best_possible = self._running_scores[0] / (length**options.length_penalty)
        worst = torch.where(self._ended, self._beam_scores.min(), _NEVER)
        return bool((best_possible > worst).any())
