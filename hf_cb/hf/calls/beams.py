"""Calls with beams: one request per prompt, each with its search, and back to what plain generate returns."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from hf_cb.hf.calls.beam_search import BeamOptions, Beams, BeamSearch
from hf_cb.hf.calls.call import Call, whole
from hf_cb.hf.calls.company import Steps, joined
from hf_cb.hf.calls.rules import GoNativeError, Part, processors_of
from hf_cb.request import Request


def beam_requests(call: Call, seed: int, vocab_size: int) -> list[Request]:
    """One per prompt. Raises GoNativeError where prompts of one call would not be as if alone."""
    options = _options(call, vocab_size)
    beams, stopping = options.num_beams, call.stopping()
    prompts = call.prompts()[::beams]
    if len(prompts) > 1 and stopping.criteria:
        raise GoNativeError("stopping criteria for several prompts with beams: they may look across them")
    # What shows in a dict besides the sequences (scores, the cache) goes on until the last search ends.
    together = Steps[Beams](len(prompts)) if call.config.return_dict_in_generate else None
    requests = []
    for i, prompt in enumerate(prompts):
        rows = slice(i * beams, (i + 1) * beams)
        processors = processors_of(call.processors, Part(rows, i), is_whole=len(prompts) == 1)
        steps, number = (Steps[Beams](1), 0) if together is None else (together, i)
        row = call.input_ids[rows.start : rows.start + 1]
        search = BeamSearch(row, options, call.surroundings, processors, call.criteria, seed + i, steps, number)
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
    is_dict = bool(call.config.return_dict_in_generate)
    if len(searches) > 1 and not is_dict and any(search.met_dead_end for search in searches):
        raise GoNativeError("beams of several prompts, one of which found no way on: plain generate goes on with it")
    best, prompt_length = call.rows_per_prompt, call.input_ids.shape[1]
    found = [search.beams for search in searches]
    longest = max(int(beams.num_output_tokens[:best].max()) for beams in found)
    sequences = torch.cat([beams.sequences[:best, : prompt_length + longest] for beams in found])
    num_steps = found[0].num_chosen
    cache = call.keep(torch.cat([beams.running[:, : prompt_length + num_steps] for beams in found])) if call.kept else {}
    if not is_dict:
        return sequences
    indices = []
    for i, beams in enumerate(found):
        own = beams.beam_indices[:best, :longest]
        indices.append(torch.where(own >= 0, own + i * searches[i].width, own))  # beams are counted over the whole batch
    scores = torch.cat([beams.beam_scores[:best] for beams in found]) if call.keeps("output_scores") else None
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        sequences_scores=scores,
        scores=joined([search.all_scores for search in searches], num_steps),
        logits=joined([search.all_logits for search in searches], num_steps),
        beam_indices=torch.cat(indices),  # type: ignore[arg-type]
        **cache,
    )
