"""Tiny random models of many architectures, for tests that compare tokens.

They are *sensitive*: with the usual initialiser (0.02) a tiny model hardly uses its attention, and a wrong mask leaves its
greedy tokens as they were. Here every parameter has noise on top, so that attention decides the tokens.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

T = TypeVar("T")

VOCAB = 112
WINDOW = 8
"""Sliding window, or chunk, in tokens, of those models that have one."""

_NOISE = 0.35  # standard deviation added to every matrix
_VECTOR_NOISE = 0.2  # the same for biases, norms and other vectors

# Given to every config that knows the name (or an alias of it).
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # rows reach their length; a test that wants an end says so
    "router_jitter_noise": 0.0,
}

_UNTIED = {"tie_word_embeddings": False}  # for those that would only repeat the last token
_SLIDING = {"sliding_window": WINDOW}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MULTIPLIERS = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_chunk_size": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
_DELTA = {
    **_LINEAR,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_LATENT = {
    **_LINEAR,
    **_LOCAL_EXPERTS,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_MAMBA1 = {"state_size": 8, "time_step_rank": 4}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
_LLAMA4 = {
    **_LOCAL_EXPERTS,
    "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 64,
    "no_rope_layers": [1, 0, 1],
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
}

STATEFUL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LATENT,
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 96},
    "falcon_mamba": _MAMBA1,
    "granitemoehybrid": {**_MAMBA2, **_LINEAR, **_LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "jamba": {**_JAMBA, "num_experts": 2, "num_experts_per_tok": 1},
    "kimi_linear": {**_LATENT, "linear_head_dim": 12, "linear_num_heads": 4},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "mamba": _MAMBA1,
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 24, "n_groups": 2, "chunk_size": 8},
    "minimax": {**_LOCAL_EXPERTS, **_LINEAR, "block_size": 8},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp", "linear_attention", "moe"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-6,  # as in zamba2
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**_DELTA, **_SHARED_EXPERT},
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_SHARED_EXPERT},
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "w_init_variance_scale": 1.0,
    },
    "rwkv": {"attention_hidden_size": 48},
    "zamba": {**_JAMBA, "num_key_value_heads": 4, "num_hidden_layers": 6, "attn_layer_period": 3},
    "zamba2": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "use_mem_rope": True,
        "time_step_min": 1e-6,  # else transformers' own decode differs from its prefill, which alone has that limit
    },
}
"""Architectures of which some layers keep a state."""

SERVED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": _UNTIED,
    "codegen": {"rotary_dim": 8, "hidden_size": 64},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {**_SLIDING, "layer_types": _MIXED, "logit_scale": 0.25},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": {},
    "exaone4": {**_SLIDING, "layer_types": _MIXED},
    "gemma": {**_UNTIED, "num_key_value_heads": 1},
    "gemma2": {**_SLIDING, "layer_types": _MIXED, **_UNTIED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**_SLIDING, "layer_types": _MIXED, **_UNTIED, "query_pre_attn_scalar": 8},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {**_SLIDING, **_LOCAL_EXPERTS, "layer_types": _MIXED},
    "gptj": {"rotary_dim": 8},
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, **_LOCAL_EXPERTS},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jetmoe": {**_LOCAL_EXPERTS, "kv_channels": 12},
    "llama": {},
    "llama+dynamic_rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "llama4_text": _LLAMA4,
    "ministral": {**_SLIDING, "layer_types": _MIXED},
    "mistral": _SLIDING,
    "mixtral": _LOCAL_EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmoe": _EXPERTS,
    "opt": {**_UNTIED, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "persimmon": {},
    "phi": {},
    "phi3": _SLIDING,
    "phimoe": _LOCAL_EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {**_SLIDING, "use_sliding_window": True, "layer_types": _MIXED},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {"hidden_size": 64},
    "starcoder2": _SLIDING,
    **STATEFUL,
}
"""Architectures that the engine serves, with what their configs need beyond the common values; a variant comes after a plus."""

FAR = 100  # tokens: farther than the engine's probe looks
PARTLY_SERVED: dict[str, dict[str, Any]] = {
    "phi3+longrope": {
        "original_max_position_embeddings": FAR,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": FAR,
            "short_factor": [1.0] * 6,
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "llama4_text+temperature": {**_LLAMA4, "floor_scale": FAR, "attn_scale": 2.0},
}
"""Architectures whose layers behave otherwise from FAR tokens on, and look at the whole batch to tell."""

NATIVE: dict[str, dict[str, Any]] = {
    "bloom": _UNTIED,
    "diffllama": {},
    "falcon": {**_UNTIED, "alibi": True},
    "mpt": {"max_seq_len": 512},
    "t5": {"d_kv": 12, "d_ff": 64, "decoder_start_token_id": 1},
    "xglm": {**_UNTIED, "ffn_dim": 64},
}
"""Architectures whose calls run natively, by plain generate."""


def once(make: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache` for threads: the first caller computes a value, the others wait for it."""
    lock = threading.RLock()
    cached = functools.cache(make)

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> T:
        with lock:
            return cached(*args, **kwargs)

    return call


_making = threading.Lock()  # torch has one seed for all threads


def tiny(name: str, **overrides: Any) -> PreTrainedModel:
    """The tiny float32 model of architecture `name`: the same weights at every call, in eval mode, on the CPU.

    `overrides` are config values. Those that change no parameter's shape (a window, an end-of-sequence id) keep the weights.
    """
    config = _config(name, overrides)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with _making, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        _add_noise(model)
    return model.eval()


def _config(name: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    architecture = name.partition("+")[0]
    known = type(AutoConfig.for_model(architecture))
    parameters = inspect.signature(known).parameters
    values: dict[str, Any] = {}
    for key, value in (_COMMON | (SERVED | PARTLY_SERVED | NATIVE)[name] | overrides).items():
        if key == "num_hidden_layers" and value is None:  # other values say
            continue
        real = known.attribute_map.get(key, key)
        if real in parameters or key not in _COMMON:
            values[real] = value
    config = AutoConfig.for_model(architecture, **values)
    config.eos_token_id = values["eos_token_id"]  # some configs put their own in the place of None
    return config


@torch.no_grad()
def _add_noise(model: PreTrainedModel) -> None:
    # On top of the model's own values, not in their place: state matrices and gates keep their scale.
    for parameter in model.parameters():
        std = _NOISE if parameter.ndim >= 2 else _VECTOR_NOISE
        parameter.add_(torch.randn_like(parameter), alpha=std)
