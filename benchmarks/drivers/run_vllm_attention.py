"""vLLM's attention operators for CPUs, on the shapes of `benchmarks.attention`. argv: settings; stdin: a shape's index a line;
stdout: the seconds of one run of it, writing the new keys and values included."""

import json
import os
import sys
import time

BLOCK_SIZE = 128  # tokens: vLLM's own default on a CPU


def main():
    settings = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    import torch

    torch.set_num_threads(settings["threads"])
    with torch.inference_mode():
        runs = [prepare(settings, *shape) for shape in settings["shapes"]]
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            runs[int(line)]()
            print(time.perf_counter() - began, file=answers, flush=True)


def prepare(settings, rows, queries, context):
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, kv_heads, size = settings["heads"], settings["kv_heads"], settings["head_size"]
    dtype, keys = getattr(torch, settings["dtype"]), context + queries
    per_row = -(-keys // BLOCK_SIZE)
    table = torch.randperm(rows * per_row).view(rows, per_row).to(torch.int32)
    cache = torch.randn(rows * per_row, kv_heads, 2 * BLOCK_SIZE, size).to(dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    positions = torch.arange(context, keys)
    slots = (table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
    q, k, v = (torch.randn(rows * queries, n, size).to(dtype) for n in (heads, kv_heads, kv_heads))
    out = torch.empty_like(q)
    starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32)
    lengths = torch.full((rows,), keys, dtype=torch.int32)
    isa = _get_attn_isa(dtype, BLOCK_SIZE, size)
    plan = ops.cpu_attn_get_scheduler_metadata(
        rows, heads, kv_heads, size, lengths, dtype, starts, True, -1, isa, enable_kv_split=True
    )

    def run():
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, isa)
        ops.cpu_attention_with_kv_cache(
            q, key_cache, value_cache, out, starts, lengths, size**-0.5, True, None, -1, table, 0.0, plan, None
        )

    return run


if __name__ == "__main__":
    main()
