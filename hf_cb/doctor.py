"""`hf-cb doctor`: what is here, which attention it comes to and why, whether it is right on this device, and how fast.

Everything is made on the spot: random blocks for the kernel, a tiny random model for the tokens, a larger one for the speed.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import hf_cb
from hf_cb.attention.backend import attention_backend_names, choose_attention_backend, load_attention_backend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerCall, LayerKV, LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.runtime.input_batch import build_input_batch
from hf_cb.runtime.streams import streams_of

_PACKAGES = ("hf-cb", "torch", "transformers", "accelerate", "numpy", "flash-attn", "flash-attn-4")
_ROWS = ((1, 300), (60, 0), (1, 3), (33, 70), (1, 255))  # (tokens of the step, tokens before it)
_TOLERANCE = {torch.float32: 2e-5}
_NUM_ROWS, _NEW_TOKENS = 16, 24


@dataclass(slots=True)
class Report:
    """What was found. `checks`: name -> what went wrong, or None."""

    environment: dict[str, Any]
    backends: dict[str, dict[str, str]] = field(default_factory=dict)  # dtype -> backend -> "chosen", "would do", or why not
    checks: dict[str, str | None] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether every check passed."""
        return all(problem is None for problem in self.checks.values())


def examine(device: torch.device, say: Callable[[str], None] = lambda _: None) -> Report:
    """Look at everything on `device`. `say` is told what comes next."""
    report = Report(_environment(device))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        say(f"attention in {name}")
        report.backends[name] = _backends(_spec(device, dtype))
        report.checks[f"attention in {name}"] = _noted(lambda dtype=dtype: _check_attention(_spec(device, dtype)))  # type: ignore[misc]
    say("tokens of a tiny model")
    report.checks["same tokens as plain generate()"] = _noted(lambda: _check_tokens(device))
    say("speed")
    report.checks["speed"] = _noted(lambda: report.speed.update(_speed(device)))
    return report


def _noted(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    found["cores"] = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    found["torch threads"] = torch.get_num_threads()
    return found


def _spec(device: torch.device, dtype: torch.dtype) -> LayerSpec:
    return LayerSpec(8, 2, 64, 64, dtype, device, 0.125)


def _backends(spec: LayerSpec) -> dict[str, str]:
    chosen, _ = choose_attention_backend([spec])
    found = {}
    for name in attention_backend_names():
        reason = load_attention_backend(name).why_not(spec)
        found[name] = reason or ("chosen" if name == chosen.name else "would do")
    return found


def _check_attention(spec: LayerSpec) -> None:
    """The chosen backend against the definition, over shuffled blocks, NaN wherever nobody has written."""
    backend, _ = choose_attention_backend([spec])
    size = max(16, backend.block_multiple)
    generator = torch.Generator().manual_seed(0)
    counts = [-(-(new + before) // size) for new, before in _ROWS]
    deck = torch.randperm(sum(counts) + 2, generator=generator, dtype=torch.int64, device="cpu").tolist()
    tables = [tuple(deck.pop() for _ in range(count)) for count in counts]
    rows = tuple(ScheduledRow(i, before, (0,) * new, RowMemory(tables[i]), 1) for i, (new, before) in enumerate(_ROWS))
    total = sum(new for new, _ in _ROWS)
    step = build_input_batch(SchedulerOutput(rows, total), size, streams_of(spec.device)).steps[0]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(spec.device, spec.dtype)

    shape = (sum(counts) + 2, size, spec.num_kv_heads, spec.head_size)
    kv = LayerKV(*(torch.full(shape, torch.nan, dtype=spec.dtype, device=spec.device) for _ in "kv"))
    for (_, before), table in zip(_ROWS, tables, strict=True):
        slots = [table[p // size] * size + p % size for p in range(before)]
        for part in kv:
            part.flatten(0, 1)[slots] = randn(before, *shape[2:])
    q, k, v = (randn(total, heads, spec.head_size) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))

    def attend(by: Any) -> torch.Tensor:
        own = LayerKV(kv.k.clone(), kv.v.clone())
        return by.attend(LayerCall(q, k, v, own, spec, step, by.plan(step, spec))).float()  # type: ignore[no-any-return]

    off = float((attend(backend) - attend(ReferenceBackend())).abs().nan_to_num(torch.inf).max())
    if off > _TOLERANCE.get(spec.dtype, 3e-2):
        raise ArithmeticError(f"{backend.name} is off by {off:.2g}")


def _model(device: torch.device, dtype: torch.dtype, **sizes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(pad_token_id=0, bos_token_id=1, **sizes)  # type: ignore[arg-type]
    config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval()


def _check_tokens(device: torch.device) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = _model(device, torch.float32, vocab_size=128, num_key_value_heads=2, **sizes)
    with torch.no_grad():  # else so small a model hardly looks back
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else None
    prompts = [torch.arange(3, 3 + n, dtype=torch.int64, device="cpu")[None].to(device) for n in (2, 20, 45)]
    want = [model.generate(prompt, max_new_tokens=12)[0].tolist() for prompt in prompts]
    with hf_cb.continuous_batching(model, fallback="error", max_batch_tokens=16) as engine:
        results = engine.generate_batch(prompts, max_new_tokens=12)
    got = [[*prompt[0].tolist(), *result.tokens] for prompt, result in zip(prompts, results, strict=True)]
    if got != want:
        raise ArithmeticError(f"{got}, and plain generate() gives {want}")


def _speed(device: torch.device) -> dict[str, float]:
    """Decoding of a few rows, whose cost is to read the weights, beside what the device can read."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    model = _model(device, torch.bfloat16, vocab_size=32000, num_key_value_heads=8, **sizes)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    prompts = [list(range(3 + i, 19 + i)) for i in range(_NUM_ROWS)]
    with hf_cb.continuous_batching(model, record_steps=1000) as engine:
        for _ in range(2):  # the first finds cold caches
            engine.generate_batch(prompts, max_new_tokens=_NEW_TOKENS, do_sample=False)
        steps = [step.seconds for step in engine.steps()[-_NEW_TOKENS:] if len(step.rows) == len(step.sampled) == _NUM_ROWS]
    seconds = statistics.median(steps)
    read = _bandwidth(device)
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": _NUM_ROWS / seconds,
        "memory_gb_per_second": read / 1e9,
        "share_of_bandwidth": weights / seconds / read,
    }


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that a sum over more than any cache holds reads."""
    many = torch.ones(1 << 27, device=device, dtype=torch.float32)  # 512 MiB
    times = []
    for _ in range(4):
        _wait(device)
        began = time.perf_counter()
        many.sum()
        _wait(device)
        times.append(time.perf_counter() - began)
    return many.nbytes / min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
