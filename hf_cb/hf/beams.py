"""Calls with beams: one request per prompt, each with its search, and back to what plain generate returns."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from hf_cb.hf.beam_search import BeamOptions, BeamSearch
from hf_cb.hf.call import Call, whole
from hf_cb.hf.rules import GoNativeError, Part, processors_of
from hf_cb.request import Request


def beam_requests(call: Call, seed: int, vocab_size: int) -> list[Request]:
    """One per prompt. Raises GoNativeError where prompts of one call would not be as if alone."""
    options = _options(call, vocab_size)
    beams, stopping = options.num_beams, call.stopping()
    prompts = call.prompts()[::beams]
    if len(prompts) > 1:
        if options.keep_scores or options.keep_logits:
            raise GoNativeError("scores of several prompts with beams: plain generate goes on computing those that ended")
        if stopping.criteria:
            raise GoNativeError("stopping criteria for several prompts with beams: they may look across them")
    requests = []
    for i, prompt in enumerate(prompts):
        rows = slice(i * beams, (i + 1) * beams)
        processors = processors_of(call.processors, Part(rows, i), is_whole=len(prompts) == 1)
        row = call.input_ids[rows.start : rows.start + 1]
        search = BeamSearch(row, options, call.surroundings, processors, call.criteria, seed + i)
        max_new_tokens = options.max_length - call.input_ids.shape[1]
        requests.append(Request(prompt, max_new_tokens, stopping.eos_token_ids, search=search))
    return requests


def _options(call: Call, vocab_size: int) -> BeamOptions:
    config = call.config
    if getattr(config, "low_memory", None):
        raise GoNativeError("option low_memory")
    eos = config._eos_token_tensor
    num_eos = 0 if eos is None else len(eos)
    beams, pad = whole("num_beams", config.num_beams), call.pad_token
    if beams < 1:
        raise GoNativeError("option num_beams is none of a search")
    fill = -1 if eos is None else pad or whole("eos_token_id", eos[0])  # a pad id of 0 counts as none
    return BeamOptions(
        num_beams=beams,
        num_candidates=max(2, 1 + num_eos) * beams,
        max_length=whole("max_length", config.max_length),
        length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
        early_stopping=False if config.early_stopping is None else config.early_stopping,
        do_sample=bool(config.do_sample),
        fill=fill,
        vocab_size=vocab_size,
        keep_scores=call.keeps("output_scores"),
        keep_logits=call.keeps("output_logits"),
    )


def beam_output(call: Call, searches: list[BeamSearch]) -> Any:
    """Sequences [B * num_return_sequences, n], or an output object with them. Raises GoNativeError where a prompt did not
    fare as it does alone."""
    if len(searches) > 1 and any(search.met_dead_end for search in searches):
        raise GoNativeError("beams of several prompts, one of which found no way on: plain generate goes on with it")
    best, prompt_length = call.rows_per_prompt, call.input_ids.shape[1]
    longest = max(int(search.num_output_tokens[:best].max()) for search in searches)
    sequences = torch.cat([search.sequences[:best, : prompt_length + longest] for search in searches])
    if not call.config.return_dict_in_generate:
        return sequences
    indices = []
    for i, search in enumerate(searches):
        own = search.beam_indices[:best, :longest]
        indices.append(torch.where(own >= 0, own + i * search.width, own))  # beams are counted over the whole batch
    only = searches[0]  # scores and logits are kept for one prompt alone
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        sequences_scores=only.beam_scores[:best] if call.keeps("output_scores") else None,
        scores=only.all_scores,  # type: ignore[arg-type]
        logits=only.all_logits,  # type: ignore[arg-type]
        beam_indices=torch.cat(indices),  # type: ignore[arg-type]
    )
