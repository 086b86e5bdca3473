"""Roofline: how near hf_cb comes to the machine, whose two limits are measured in the same run.

Decoding reads every weight once a step, so memory bandwidth bounds it; a long prompt's matrix products bound its prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import peers

_READ_BYTES = 1 << 30  # many times any cache
_SQUARE = 2048
_BEST_OF = 8
_DECODE_BATCHES = (1, 8, 48)
_CONTEXT = 64
_NEW_TOKENS = 24
_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps take at least. Dense models: every layer sees every token, the output layer the last."""

    layer_weights: int  # elements of the linear layers below the output layer
    output_weights: int
    kv_elements: int  # of one token, in all layers
    attention_width: int  # query heads x head size, in all layers
    itemsize: int

    @classmethod
    def of(cls, model: Any) -> Work:
        config, output = model.config, model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not output]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layer_weights=sum(m.weight.numel() for m in linears),
            output_weights=output.weight.numel(),
            kv_elements=2 * config.num_hidden_layers * config.num_key_value_heads * head,
            attention_width=config.num_hidden_layers * config.num_attention_heads * head,
            itemsize=model.dtype.itemsize,
        )

    def decode_bytes(self, tokens_stored: int) -> int:
        """Read by a step in which each sequence gets one token: all weights, and the keys and values stored."""
        return (self.layer_weights + self.output_weights + tokens_stored * self.kv_elements) * self.itemsize

    def prefill_flops(self, tokens: int) -> int:
        """Of a step over one whole prompt; a causal layer attends to half of the square, twice: scores and values."""
        return 2 * self.layer_weights * tokens + 2 * self.output_weights + 2 * self.attention_width * tokens**2


def measure(model: Any, source: Sequence[int], scale: float = 1.0, **options: Any) -> dict[str, Any]:
    """The machine's limits, and what part of them the engine's steps reach. Seconds, bytes/s, FLOP/s."""
    work, limits = Work.of(model), {"read": read_bandwidth(model.device), "matmul": matmul_rate(model.dtype, model.device)}
    prompt, context = max(2, round(_PROMPT * scale)), max(2, round(_CONTEXT * scale))
    with peers.installed(
        model, record_steps=peers.ALL_STEPS, **{"max_batch_tokens": _PROMPT, "prefix_cache": False, **options}
    ) as engine:
        decode = {}
        for batch in _DECODE_BATCHES:
            engine.generate_batch([source[i : i + context] for i in range(batch)], max_new_tokens=_NEW_TOKENS)
            steps = [s for s in engine.steps() if len(s.rows) == batch and all(tokens == 1 for _, tokens in s.rows)]
            rates = [work.decode_bytes(s.tokens_stored) / s.seconds for s in steps]
            decode[batch] = {
                "step_seconds": statistics.median(s.seconds for s in steps),
                "share": statistics.median(rates) / limits["read"],
            }
        for start in range(_BEST_OF // 2):
            engine.generate_batch([source[start : start + prompt]], max_new_tokens=1)
        seconds = statistics.median(s.seconds for s in engine.steps() if [t for _, t in s.rows] == [prompt])
    share = work.prefill_flops(prompt) / seconds / limits["matmul"]
    return {"limits": limits, "decode": decode, "prefill": {"tokens": prompt, "step_seconds": seconds, "share": share}}


def render(result: dict[str, Any]) -> str:
    """The roofline as one paragraph."""
    decode = ", ".join(
        f"{batch} rows {part['step_seconds'] * 1e3:.1f} ms = {part['share']:.0%}" for batch, part in result["decode"].items()
    )
    prefill, limits = result["prefill"], result["limits"]
    return (
        f"roofline: this machine reads {limits['read'] / 1e9:.1f} GB/s and multiplies {limits['matmul'] / 1e12:.3f} TFLOP/s; "
        f"hf_cb's decode step over {decode} of the bandwidth; prefill of {prefill['tokens']} "
        f"{prefill['step_seconds'] * 1e3:.0f} ms = {prefill['share']:.0%} of the matrix peak"
    )


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a sum over more memory than any cache holds; the best of some."""
    numbers = torch.ones(_READ_BYTES // 4, device=device)
    return _READ_BYTES / _best_seconds(numbers.sum, device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP per second of a large square product; the best of some."""
    square = torch.ones(_SQUARE, _SQUARE, dtype=dtype, device=device)
    return 2 * _SQUARE**3 / _best_seconds(lambda: square @ square, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _BEST_OF):  # the first finds cold caches
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
