"""One rank of a tensor-parallel model, as a program: python ranks.py WHAT FOLDER. Prints a JSON object at its end."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_cb

PROMPTS = [[1 + (7 * n + 3 * i) % 100 for i in range(1 + (5 * n) % 40)] for n in range(16)]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
BEAMS = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
SAMPLED = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "top_k": 20}


def generate(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def all_at_once(model: Any) -> dict[str, list[list[int]]]:
    """The answers to all prompts, greedy and sampled, asked from a thread each."""
    with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
        greedy = [threads.submit(generate, model, prompt, **GREEDY) for prompt in PROMPTS]
        sampled = [threads.submit(generate, model, prompt, seed=n, **SAMPLED) for n, prompt in enumerate(PROMPTS)]
        return {"greedy": [call.result() for call in greedy], "sampled": [call.result() for call in sampled]}


def name_of_error(call: Any) -> str:
    try:
        call()
    except hf_cb.HFCBError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def answers(model: Any, engine: hf_cb.Engine) -> dict[str, Any]:
    """Rank 0 of a sound run."""
    done: dict[str, Any] = all_at_once(model)
    with engine.pause(release_kv=True):
        pass
    done["after_release"] = [generate(model, prompt, **GREEDY) for prompt in PROMPTS[:3]]
    scored = engine.submit(PROMPTS[3], max_new_tokens=2, prompt_logprobs=0).result()
    done["prompt_logprobs"] = [entry and entry.logprob for entry in scored.prompt_logprobs]
    with ThreadPoolExecutor(4) as threads:
        done["beams"] = list(threads.map(lambda prompt: generate(model, prompt, **BEAMS), PROMPTS[4:8]))
    done["plainly"] = name_of_error(lambda: generate(model, PROMPTS[0], guidance_scale=1.5, max_new_tokens=2))
    done["lead"] = name_of_error(engine.follow)
    stats = engine.stats()
    done["preemptions"], done["native"], done["batch"] = stats.preemptions, dict(stats.native_calls), stats.mean_batch_size
    return done


def for_ever(model: Any, engine: hf_cb.Engine, marker: Path) -> dict[str, Any]:
    """Rank 0 of a run in which somebody dies: tells when it is at work, and how its callers fare."""

    def ask_on() -> None:
        while True:
            engine.submit(PROMPTS[0], max_new_tokens=100).result()
            marker.touch()

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(name_of_error, ask_on) for _ in range(2)]
    return {"waiting": [call.result() for call in waiting], "later": name_of_error(lambda: engine.submit(PROMPTS[1]))}


def idle(engine: hf_cb.Engine, marker: Path) -> dict[str, Any]:
    """Rank 0 of a run in which it dies while there is nothing to do."""
    engine.submit(PROMPTS[0], max_new_tokens=3).result()
    marker.touch()
    time.sleep(60)
    return {}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    config = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()
    out: dict[str, Any] = {}
    # The ranks have room for unlike numbers of blocks, too few for all: what counts is the least.
    engine = hf_cb.install(model, block_size=4, num_blocks=60 + 40 * rank, max_batch_tokens=64)
    assert engine is not None
    out["num_blocks"] = engine.config.num_blocks
    if what == "answers" and rank == 0:
        out |= answers(model, engine)
    elif what == "idle" and rank == 0:
        out |= idle(engine, folder / "at-work")
    elif rank == 0:
        out |= for_ever(model, engine, folder / "at-work")
    else:
        out["submit"] = name_of_error(lambda: engine.submit([1]))
        out["generate"] = name_of_error(lambda: generate(model, [1]))
        out["follow"] = name_of_error(engine.follow)
    hf_cb.uninstall(model)
    print(json.dumps(out), flush=True)
    os._exit(0)  # with a rank gone, the groups can't be ended in order


if __name__ == "__main__":
    main()
