"""A program: models on devices of a kind of their own, with an engine. Prints what it found, as JSON.

`python on_fake_devices.py`: in a process by itself, since torch can't forget a kind of device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import crowd
import fake_devices
import inside
import models
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

import hf_cb
from hf_cb.core.swap_cost import SwapCost

NEW = 5
NEAR, FAR = "far:0", "far:1"
LAYERS = {"gpt2": "transformer.h"}
REST = {  # near, far
    "gpt2": (("transformer.wte", "transformer.wpe", "lm_head"), ("transformer.ln_f",)),  # the head is the embedding
}
_REST = (("model.embed_tokens", "model.rotary_emb"), ("model.norm", "lm_head"))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in (3, 11, 6)]


def plain(model: PreTrainedModel) -> list[list[int]]:
    return [type(model).generate(model, p, max_new_tokens=NEW)[0].tolist() for p in prompts()]


def split(model: PreTrainedModel, name: str, layers: Sequence[str] = (NEAR, NEAR, FAR)) -> PreTrainedModel:
    """The model with a device for each layer, by accelerate's hooks."""
    near, far = REST.get(name, _REST)
    where = {f"{LAYERS.get(name, 'model.layers')}.{i}": device for i, device in enumerate(layers)}
    where |= dict.fromkeys(near, NEAR) | dict.fromkeys(far, layers[-1])
    dispatched: PreTrainedModel = dispatch_model(model, where, main_device=NEAR, force_hooks=True)
    return dispatched


def ask(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    with fake_devices.Devices():  # on this thread too
        tokens: list[int] = model.generate(prompt.to(NEAR), max_new_tokens=NEW)[0].tolist()
    return tokens


def served(model: PreTrainedModel, want: list[list[int]], **options: Any) -> dict[str, Any]:
    """Whether rows get their tokens alone, and in company; and how they were served."""
    with hf_cb.continuous_batching(model, **options) as engine:
        reason = engine.unsupported_reason
        alone = [ask(model, prompt) for prompt in prompts()] == want
        calls = [lambda prompt=prompt: ask(model, prompt) for prompt in prompts()]
        company = reason is None and crowd.answers(engine, calls) == want
        stats = engine.stats()
        devices = [] if reason else [str(kv.k.device) for kv in inside.cache(engine).layers]  # type: ignore[union-attr]
    return {
        "reason": reason,
        "alone": alone,
        "company": company,
        "native": stats.native_calls,
        "attention": stats.attention_backend,
        "swaps": stats.swaps,
        "devices": devices,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # model, options of the engine
    "llama": ("llama", {"max_batch_tokens": 8}),
    "windows": ("gemma3_text", {"max_batch_tokens": 16, "block_size": 4, "num_blocks": 60}),
    "a tied head": ("gpt2", {}),
    "swapped": ("llama", {"block_size": 4, "num_blocks": 7, "swap_space": "1MiB", "prefix_cache": False}),
}


def main() -> None:
    truths = {case: plain(models.tiny(name)) for case, (name, _) in CASES.items()}
    found: dict[str, Any] = {}
    with fake_devices.devices(), mock.patch.object(SwapCost, "is_cheaper", return_value=True):  # whatever was measured
        try:
            torch.ones(2, device=NEAR) + torch.ones(2, device=FAR)
        except RuntimeError as error:
            found["across"] = str(error)
        for case, (name, options) in CASES.items():
            model = split(models.tiny(name, attn_implementation="eager"), name)
            found[case] = served(model, truths[case], **options)
        offloaded = split(models.tiny("llama", attn_implementation="eager"), "llama", (NEAR, "cpu", FAR))
        found["a layer on the host"] = served(offloaded, truths["llama"], max_batch_tokens=8)
        one = models.tiny("llama", attn_implementation="eager").to(NEAR)
        found["one device"] = served(one, truths["llama"], max_batch_tokens=16)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
