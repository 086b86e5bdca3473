"""A process's model with hf_cb on it: from a line of prompts to the record of its answer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_cb
from demo import packaged_model
from integrations.prompt_lines import PromptLine


@dataclass(frozen=True, slots=True)
class Replica:
    """`options`: of generate(), for every prompt. `encode` and `record` are for one thread, `generate` for many at a time."""

    model: Any
    tokenizer: Any
    options: Mapping[str, Any]
    seed: int
    engine: hf_cb.Engine

    def encode(self, line: PromptLine) -> list[int]:
        """The ids of a line's prompt. Raises what the tokenizer or its chat template has against it."""
        if "prompt" in line.fields:
            ids = self.tokenizer(line.fields["prompt"])["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(line.fields["messages"], add_generation_prompt=True)["input_ids"]
        if not ids:
            raise ValueError("the prompt has no tokens")
        return list(ids)

    def generate(self, ids: Sequence[int], number: int) -> list[int]:
        """The answer's ids. Calls from many threads share the engine's batches."""
        inputs = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), seed=self.seed + number, **self.options
        )
        return out[0, len(ids) :].tolist()

    def record(self, line: PromptLine, tokens: Sequence[int]) -> dict[str, Any]:
        """What goes into the file of answers."""
        ends = self.options.get("eos_token_id", self.model.generation_config.eos_token_id)
        stopped = tokens and ends is not None and tokens[-1] in ([ends] if isinstance(ends, int) else ends)
        return {
            "line": line.number,
            **{name: value for name, value in line.fields.items() if name not in _OURS},
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "token_ids": list(tokens),
            "finish_reason": "stop" if stopped else "length",
        }


_OURS = frozenset({"line", "text", "token_ids", "finish_reason", "error"})


def failure(line: PromptLine, problem: str) -> dict[str, Any]:
    """The record of a line that has no answer."""
    return {"line": line.number, **{name: value for name, value in line.fields.items() if name not in _OURS}, "error": problem}


@contextlib.contextmanager
def replica(
    state: PartialState,
    name: str | None,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    seed: int,
    device_map: str | None = None,
    tensor_parallel: bool = False,
) -> Iterator[Replica]:
    """The model with hf_cb installed: on this process's device, laid over its share of the devices, or a part of its layers."""
    with state.local_main_process_first():
        source = packaged_model.prepare() if name is None else name
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tensor_parallel:
        from transformers.distributed import DistributedConfig  # not in the first releases of transformers 5

        together = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, distributed_config=together)
    elif device_map is None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(state.device)
    else:
        where = json.loads(device_map) if device_map.lstrip().startswith("{") else device_map
        limits = None if isinstance(where, dict) else memory_share(state)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=where, max_memory=limits)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    with hf_cb.continuous_batching(model.eval()) as engine:
        if engine.unsupported_reason and tensor_parallel:
            state.print(f"--tensor-parallel: {engine.unsupported_reason}", file=sys.stderr)
            sys.exit(2)
        if engine.unsupported_reason:
            state.print(f"plain generate() answers, one prompt at a time: {engine.unsupported_reason}")
        yield Replica(model, tokenizer, options, seed, engine)


def memory_share(state: PartialState) -> dict[int | str, int] | None:
    """Bytes free on each GPU that is this process's: the machine's GPUs are dealt out evenly. None without GPUs."""
    if state.device.type != "cuda":
        return None
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    mine = gpus_of(state.local_process_index, torch.cuda.device_count(), processes)
    return {gpu: int(0.9 * torch.cuda.mem_get_info(gpu)[0]) for gpu in mine}


def gpus_of(process: int, num_gpus: int, num_processes: int) -> range:
    """The GPUs of one of `num_processes` on a machine. Raises ValueError when there are fewer GPUs than processes."""
    if num_processes > num_gpus:
        raise ValueError(f"--device-map: {num_processes} processes share {num_gpus} GPUs; it takes at least one each")
    each = num_gpus // num_processes
    return range(process * each, (process + 1) * each)
