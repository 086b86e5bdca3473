"""What becomes of every option of `generate()`. The docs' table is made from this; a test walks transformers' own list.

The decision itself is taken in `generate.py`, on what transformers has made of the options (its processors and criteria).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hf_cb.sampling_options import SAMPLING

Where = Literal["engine", "native"]


class Handling(NamedTuple):
    """Where a call that uses this option runs, and what there is to say about it."""

    where: Where
    note: str = ""


_SAME = "changes how plain generate computes, not what: no effect"
_ROWS = "transformers' own processor or criterion, run row by row with the whole history"
_MODE = "a decoding mode of its own"
_OWN = (
    "the engine's thread calls it once per token, with your thread's context variables; "
    "a call runs natively if its `needs_callers_thread` is true"
)
_BEAMS = "beam search and beam sampling; the beams share the blocks of what they have in common"

HANDLING: dict[str, Handling] = {
    # Arguments of generate() itself
    "inputs": Handling("engine", "token ids, also as `input_ids`; without any, the bos token"),
    "generation_config": Handling("engine", "merged by transformers"),
    "attention_mask": Handling("engine", "left padding; any other mask runs natively"),
    "streamer": Handling("engine", "on the caller's thread"),
    "seed": Handling("engine", "ours: row i of a call gets what plain generate gives it after `torch.manual_seed(seed + i)`"),
    "logits_processor": Handling(
        "engine",
        f"{_OWN}, or if it has several rows and `supports_continuous_batching` is not true",
    ),
    "stopping_criteria": Handling("engine", f"{_OWN}, or if it has several rows"),
    "prefix_allowed_tokens_fn": Handling("engine", _ROWS),
    "tokenizer": Handling("engine", "for `stop_strings`"),
    "synced_gpus": Handling("native", "if true"),
    "assistant_model": Handling("native", _MODE),
    "negative_prompt_ids": Handling("native", "classifier-free guidance"),
    "negative_prompt_attention_mask": Handling("native", "classifier-free guidance"),
    "custom_generate": Handling("native"),
    "past_key_values": Handling(
        "engine",
        "also as `cache`: that of an earlier result, if nobody has looked into it, or an empty `DynamicCache`; any other runs "
        "natively; with all ids so far, or only those that it lacks (from the last generated token on) and a full mask",
    ),
    "position_ids": Handling("engine", "if they are those that the mask gives; any others run natively"),
    "token_type_ids": Handling(
        "engine", "if they are all zero, and zeros make no difference to the model; any others run natively"
    ),
    "kwargs": Handling("native", "arguments of the model's forward, such as `inputs_embeds`, `pixel_values`"),
    # Length and ends
    "max_new_tokens": Handling("engine"),
    "max_length": Handling("engine"),
    "min_length": Handling("engine"),
    "eos_token_id": Handling("engine", "one or several"),
    "pad_token_id": Handling("engine"),
    "bos_token_id": Handling("engine"),
    "max_time": Handling("engine", _ROWS),
    "stop_strings": Handling("engine", _ROWS),
    "token_healing": Handling("native"),
    # Choosing tokens
    **{option.name: Handling("engine") for option in SAMPLING if option.in_config},
    "num_return_sequences": Handling("engine", "samples fork from the first one's prompt; or the best of the beams"),
    **dict.fromkeys(
        (
            "top_h",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "encoder_repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "sequence_bias",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "renormalize_logits",
            "remove_invalid_values",
            "watermarking_config",
        ),
        Handling("engine", _ROWS),
    ),
    "guidance_scale": Handling("native", "calls the model itself"),
    # Decoding modes
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), Handling("engine", _BEAMS)),
    **dict.fromkeys(
        (
            "num_beam_groups",
            "diversity_penalty",
            "constraints",
            "force_words_ids",
            "penalty_alpha",
            "dola_layers",
            "low_memory",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "speculation_type",
            "use_mtp",
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
            "target_lookbehind",
        ),
        Handling("native", _MODE),
    ),
    # Results
    "return_dict_in_generate": Handling(
        "engine", "the cache in it is made when you first look into it, by a forward over the whole text"
    ),
    **dict.fromkeys(
        ("output_scores", "output_logits"),
        Handling("engine", "rows that have ended go on until all have, as in plain generate"),
    ),
    "output_attentions": Handling("native"),
    "output_hidden_states": Handling("native"),
    # Plain generate's own machinery
    "use_cache": Handling("engine", _SAME),
    "cache_implementation": Handling("engine", 'no effect; "quantized" and "paged" run natively, for their results differ'),
    "cache_config": Handling("engine", _SAME),
    "max_cache_len": Handling("engine", _SAME),
    "prefill_chunk_size": Handling("engine", _SAME),
    "compile_config": Handling("engine", _SAME),
    "disable_compile": Handling("engine", _SAME),
    "continuous_batching_config": Handling("engine", "belongs to transformers' `generate_batch`: no effect on `generate`"),
    "decoder_start_token_id": Handling("engine", "belongs to encoder-decoder models, which run natively"),
    "transformers_version": Handling("engine", "a record"),
}
"""Every field of GenerationConfig, every parameter of `generate()`, and what it takes beside those, of all versions of
transformers that we know."""


def has_no_form_for_submit(option: str) -> bool:
    """Whether a model's generation config that sets this option asks for what only `generate()` serves."""
    own = HANDLING.get(option, Handling("native"))
    return own.where == "native" or own.note in (_ROWS, _BEAMS) or option == "min_length"  # which counts the prompt


_OFF_AT = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"), 1),
    "encoder_repetition_penalty": 1,
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("min_length", "diversity_penalty", "penalty_alpha"), 0),
}


def does_something(option: str, value: Any) -> bool:
    """Whether a generation config with this value asks for more than one without. Truth is not the measure: a
    `forced_eos_token_id` of 0 is an id, a `max_time` of 0 a limit."""
    if value is None or value is False:
        return False
    return isinstance(value, bool) or option not in _OFF_AT or value != _OFF_AT[option]


def markdown() -> str:
    """The table, options that are handled alike together."""
    groups: dict[Handling, list[str]] = {}
    for option, own in HANDLING.items():
        groups.setdefault(own, []).append(option)
    lines = ["| runs | options | |", "|---|---|---|"]
    for where in ("engine", "native"):
        lines += [
            f"| {where} | {', '.join(f'`{option}`' for option in options)} | {own.note} |"
            for own, options in groups.items()
            if own.where == where
        ]
    return "\n".join(lines)
