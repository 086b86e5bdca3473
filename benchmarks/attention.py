"""The attention kernels against torch's own on the same shapes, and against the memory's bandwidth.

Torch's scaled_dot_product_attention gets what suits it: keys and values of equal length, contiguous, nothing to write.
Ours reads shuffled blocks and writes; so does vLLM's for CPUs, which --vllm brings in, in a process of its own environment.
Each figure is the best of many short runs, taken in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks import peer_environments
from hf_cb.attention.backend import attention_backend_names, load_attention_backend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec
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
    with torch.inference_mode(), vllm(spec) if arguments.vllm else contextlib.nullcontext() as others:
        for i, shape in enumerate(SHAPES):
            _report(shape, spec, arguments, bandwidth, {"vllm": others[i]} if others else {})


Run = Callable[[], object]
"""One run. It returns its seconds, where its caller can't measure them."""


def _report(shape: Shape, spec: LayerSpec, arguments: argparse.Namespace, bandwidth: float, others: dict[str, Run]) -> None:
    runs = {"sdpa": sdpa(shape, spec), **others}
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


def best_of(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Seconds of the best run of each, in turns, until each has had `seconds` in all (and at least three runs)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # pages and caches
    while any(len(spent) < 3 or sum(spent) < seconds for spent in times.values()):
        for name, run in runs.items():
            began = time.perf_counter()
            told = run()
            times[name].append(told if isinstance(told, float) else time.perf_counter() - began)
    return {name: min(spent) for name, spent in times.items()}


def read_bandwidth(seconds: float) -> float:
    """Bytes a second at which all threads together read memory."""
    numbers = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / best_of({"sum": numbers.sum}, seconds)["sum"]


def sdpa(shape: Shape, spec: LayerSpec) -> Run:
    """torch's attention over contiguous keys and values."""
    q = torch.randn(shape.rows, spec.num_heads, shape.queries, spec.head_size).to(spec.dtype)
    k, v = (torch.randn(shape.rows, spec.num_kv_heads, shape.keys, spec.head_size).to(spec.dtype) for _ in "kv")
    mask = None
    if shape.queries > 1 and shape.context:
        mask = torch.ones(shape.queries, shape.keys, dtype=torch.bool).tril(shape.context)
    causal = shape.queries > 1 and not shape.context
    return lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def paged(shape: Shape, spec: LayerSpec, name: str) -> Run:
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
    return lambda: backend.attend(LayerCall(q, k, v, kv, spec, step, plan))


@contextlib.contextmanager
def vllm(spec: LayerSpec) -> Iterator[list[Run]]:
    """vLLM's operators on each of `SHAPES`."""
    settings = {
        "threads": torch.get_num_threads(),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "shapes": [(shape.rows, shape.queries, shape.context) for shape in SHAPES],
    }
    driver = Path(__file__).parent / "drivers" / "run_vllm_attention.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    preload = peer_environments.folder("vllm") / "lib/libiomp5.so"  # vLLM's manual: "for best performance"
    if preload.is_file():
        environment["LD_PRELOAD"] = str(preload)
    command = [peer_environments.python("vllm"), driver, json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def run(index: int) -> float:
            to.write(f"{index}\n")
            to.flush()
            return float(answers.readline())

        if answers.readline() != "ready\n":
            raise RuntimeError(f"vLLM's attention does not start: {' '.join(map(str, command))}")
        yield [functools.partial(run, i) for i in range(len(SHAPES))]
        to.close()


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
    parser.add_argument("--vllm", action="store_true", help="its environment: python -m benchmarks.peer_environments vllm")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
