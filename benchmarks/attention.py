"""The attention kernels against torch's own on the same shapes, and against the memory's bandwidth.

Torch's scaled_dot_product_attention gets what suits it: keys and values of equal length, contiguous, nothing to write.
Ours reads shuffled blocks and writes. Each figure is the best of many short runs, taken in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from hf_cb.attention.backend import attention_backend_names, load_attention_backend
from hf_cb.attention.step import AttentionStep, LayerSpec
from hf_cb.runtime.kv_cache import KVCache

_BLOCK_SIZE = 16
_READ_BYTES = 512 << 20  # far more than any cache holds


@dataclass(frozen=True)
class Shape:
    """Rows of equal length: `queries` new tokens each, after `context` stored ones."""

    name: str
    rows: int
    queries: int
    context: int

    @property
    def keys(self) -> int:
        return self.queries + self.context


SHAPES = [
    Shape("decode 32 x 2048", 32, 1, 2047),
    Shape("decode 48 x 205", 48, 1, 204),
    Shape("decode 1 x 2048", 1, 1, 2047),
    Shape("prefill 512", 1, 512, 0),
    Shape("prefill 2048", 1, 2048, 0),
    Shape("chunk 256 after 1024", 1, 256, 1024),
]


def main() -> None:
    arguments = _arguments()
    dtype = getattr(torch, arguments.dtype)
    spec = LayerSpec(
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_size=arguments.head_size,
        value_head_size=arguments.head_size,
        dtype=dtype,
        device=torch.device("cpu"),
        scale=arguments.head_size**-0.5,
    )
    bandwidth = read_bandwidth(arguments.seconds)
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, memory read at {bandwidth / 1e9:.1f} GB/s (torch.sum)")
    print(f"{'shape':<22}{'backend':<12}{'ms':>9}{'x SDPA':>9}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}")
    with torch.inference_mode():
        for shape in SHAPES:
            _report(shape, spec, arguments, bandwidth)


def _report(shape: Shape, spec: LayerSpec, arguments: argparse.Namespace, bandwidth: float) -> None:
    runs = {"sdpa": sdpa(shape, spec)}
    for name in arguments.backends:
        backend = load_attention_backend(name)
        if backend.why_not(spec) is None:
            runs[name] = paged(shape, spec, name)
    best = best_of(runs, arguments.seconds)
    moved = shape.rows * shape.keys * spec.bytes_per_token
    seen = shape.rows * sum(range(shape.context + 1, shape.keys + 1))
    flops = 2 * seen * spec.num_heads * (spec.head_size + spec.value_head_size)
    for name, seconds in best.items():
        rate = moved / seconds
        print(
            f"{shape.name:<22}{name:<12}{seconds * 1e3:>9.3f}{best['sdpa'] / seconds:>9.2f}{rate / 1e9:>8.1f}"
            f"{rate / bandwidth:>9.0%}{flops / seconds / 1e9:>9.0f}"
        )


def best_of(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the best run of each, in turns, until each has had `seconds` in all (and at least three runs)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # pages and caches
    while any(len(spent) < 3 or sum(spent) < seconds for spent in times.values()):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: min(spent) for name, spent in times.items()}


def read_bandwidth(seconds: float) -> float:
    """Bytes a second at which all threads together read memory."""
    numbers = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / best_of({"sum": numbers.sum}, seconds)["sum"]


def sdpa(shape: Shape, spec: LayerSpec) -> Callable[[], object]:
    """torch's attention over contiguous keys and values."""
    q = torch.randn(shape.rows, spec.num_heads, shape.queries, spec.head_size).to(spec.dtype)
    k, v = (torch.randn(shape.rows, spec.num_kv_heads, shape.keys, spec.head_size).to(spec.dtype) for _ in "kv")
    mask = None
    if shape.queries > 1 and shape.context:
        mask = torch.ones(shape.queries, shape.keys, dtype=torch.bool).tril(shape.context)
    causal = shape.queries > 1 and not shape.context
    return lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def paged(shape: Shape, spec: LayerSpec, name: str) -> Callable[[], object]:
    """One of our backends, over blocks dealt at random; the plan is made once, as it is for all layers of a step."""
    backend = load_attention_backend(name)
    per_row = -(-shape.keys // _BLOCK_SIZE)
    table = torch.randperm(shape.rows * per_row).view(shape.rows, per_row).to(torch.int32)
    (kv,) = KVCache([spec], table.numel(), _BLOCK_SIZE).layers
    for cache in kv:
        cache.copy_(torch.randn(cache.shape))
    tokens = shape.rows * shape.queries
    q, k, v = (
        torch.randn(heads, tokens, spec.head_size).to(spec.dtype).transpose(0, 1)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    step = _step(shape, table)
    plan = backend.plan(step, spec)
    return lambda: backend.attend(q, k, v, kv, spec, step, plan)


def _step(shape: Shape, table: torch.Tensor) -> AttentionStep:
    positions = torch.arange(shape.context, shape.keys)
    slots = table[:, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    query_lens = (shape.queries,) * shape.rows
    return AttentionStep(
        cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens_k=torch.full((shape.rows,), shape.keys, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten(),
        query_lens=query_lens,
        key_lens=(shape.keys,) * shape.rows,
        max_seqlen_q=shape.queries,
        max_seqlen_k=shape.keys,
        block_size=_BLOCK_SIZE,
    )


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--heads", type=int, default=9, help="query heads (the default: SmolLM2-135M)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each backend and shape")
    names = [name for name in attention_backend_names() if name != "reference"]
    parser.add_argument("--backends", nargs="+", default=names, choices=attention_backend_names())
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
