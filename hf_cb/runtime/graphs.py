"""DecodeGraphs: steps in which every row has one query, captured as CUDA graphs and replayed.

A decode step of a small batch is hundreds of short kernels, and the device waits for Python between them. A graph launches them
all at once, but what was a Python value or an address when it was captured stays what it was. So a graph is kept under all of
that: the number of rows and the largest number of keys, both rounded up (kernels bake `max_seqlen_k`), and the addresses of
weights and cache, at every replay. Rows that fill up the batch have one key, in a block of the cache that is there for them.

Captured when the same sizes come again, within a memory limit, in one memory pool: replays are all on one stream, and each
one's logits are copied out before the next. What can't be captured runs as before, and `reason` says why.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cb.attention.step import AttentionStep
from hf_cb.errors import brief
from hf_cb.runtime.input_batch import InputBatch
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.port import AttentionPort

logger = logging.getLogger("hf_cb")

DEVICES: tuple[str, ...] = ("cuda",)
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a graph; beyond, multiples of the last
_FEWEST_KEYS = 256
_MEETINGS = 3  # of the same sizes until they are captured: a batch that grows passes through most sizes once

_capturing = threading.Lock()  # torch allows one capture at a time in a process


class Sizes(NamedTuple):
    """What of a step a graph bakes in."""

    rows: int
    keys: int  # of the longest row, at most

    @classmethod
    def of(cls, step: AttentionStep) -> Sizes:
        """The sizes of a step, rounded up."""
        rows, width = step.block_table.shape
        keys = max(step.max_seqlen_k, width * step.block_size, _FEWEST_KEYS)
        return cls(_rounded(rows), 1 << (keys - 1).bit_length())


def _rounded(rows: int) -> int:
    return next((size for size in _SIZES if size >= rows), -(-rows // _SIZES[-1]) * _SIZES[-1])


class _WaitsError(Exception):
    """The forward needs a number from the device, or from the host. The message is the op."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The tensors that a graph reads, of `Sizes.rows` rows. `steps`: of each group of layers."""

    input_ids: torch.Tensor  # [1, rows]
    position_ids: torch.Tensor  # [1, rows]
    logits_indices: torch.Tensor  # [rows]: all of them, in order
    steps: tuple[AttentionStep, ...]
    scratch_block: int

    @classmethod
    def make(cls, sizes: Sizes, num_groups: int, block_size: int, scratch_block: int, device: torch.device) -> _Inputs:
        """Nothing but rows that fill up."""

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        rows, width = sizes.rows, -(-sizes.keys // block_size)
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        seq_lens_k = full(rows, value=1, dtype=torch.int32)
        steps = tuple(
            AttentionStep(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens_k=seq_lens_k,
                block_table=full(rows, width, value=scratch_block, dtype=torch.int32),
                slot_mapping=full(rows, value=scratch_block * block_size),
                query_lens=(1,) * rows,
                key_lens=(),  # another one at each replay: a backend that reads it can't be captured
                max_seqlen_q=1,
                max_seqlen_k=sizes.keys,
                block_size=block_size,
            )
            for _ in range(num_groups)
        )
        return cls(full(1, rows), full(1, rows), torch.arange(rows, device=device, dtype=torch.int64), steps, scratch_block)

    def fill(self, batch: InputBatch) -> None:
        """Put a step's n rows in. The others keep ids and positions of earlier ones, which are as valid as any, and write to
        the block that nobody reads; so are entries of the block table past a row's blocks."""
        n = batch.input_ids.shape[1]
        self.input_ids[:, :n].copy_(batch.input_ids)
        self.position_ids[:, :n].copy_(batch.position_ids)
        self.steps[0].seq_lens_k[:n].copy_(batch.steps[0].seq_lens_k)
        self.steps[0].seq_lens_k[n:].fill_(1)
        for own, step in zip(self.steps, batch.steps, strict=True):
            own.block_table[:n, : step.block_table.shape[1]].copy_(step.block_table)
            own.block_table[n:, 0].fill_(self.scratch_block)
            own.slot_mapping[:n].copy_(step.slot_mapping)
            own.slot_mapping[n:].fill_(self.scratch_block * own.block_size)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs


class DecodeGraphs:
    """The graphs of one twin. Used by the engine's thread alone; `reason` and `count` may be read from any."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        port: AttentionPort,
        cache: KVCache,
        *,
        limit: int,
        max_rows: int,
        baked: Callable[[], object],
        off: str | None = None,
    ) -> None:
        """`limit`: bytes of device memory for graphs; the one that reaches it is the last. `max_rows`: of any step. `baked`:
        what graphs hold on to beside `Sizes`, the addresses of the weights first of all; those made under another value are
        dropped. `off`: why there will be none."""
        self._forward = forward
        self._port = port
        self._cache = cache
        self._limit = limit
        self._max_rows = max_rows
        self._baked = baked
        self._off = off
        self._graphs: dict[Sizes, _Captured] = {}
        self._made_under: object = None
        self._meetings: Counter[Sizes] = Counter()
        self._failures: dict[Sizes, str] = {}
        self._used = 0
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._logits: torch.Tensor | None = None  # [rows, vocab], outside of the pool: what graphs write theirs to

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @property
    def reason(self) -> str:
        """Why there are none, or no more, or that there may be more."""
        if self._off is not None:
            return self._off
        if self._failures:
            return f"{len(self._failures)} batch sizes could not be captured ({next(iter(self._failures.values()))})"
        if self._is_full:
            return f"graphs take {self._used} bytes, and graph_memory is {self._limit}"
        return "decode steps are captured when their sizes come again"

    @property
    def _is_full(self) -> bool:
        return self._used >= self._limit

    def run(self, batch: InputBatch) -> torch.Tensor | None:
        """Logits [n, vocab] of `batch.logits_indices`, a tensor of the caller's own; None: not by a graph, compute it."""
        if self._off is not None or batch.steps[0].max_seqlen_q != 1:
            return None
        baked = (self._baked(), [part.data_ptr() for pair in self._cache.tensors for part in pair])
        if baked != self._made_under:
            self.drop()
            self._made_under = baked
        sizes = Sizes.of(batch.steps[0])
        captured = self._graphs.get(sizes) or self._capture(sizes, batch)
        if captured is None:
            return None
        captured.inputs.fill(batch)
        captured.graph.replay()
        assert self._logits is not None
        return self._logits.index_select(0, batch.logits_indices)

    def drop(self) -> None:
        """Give up all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize(self._device)  # a replay may be running
        self._graphs.clear()
        self._meetings.clear()
        self._pool = self._logits = None
        self._used = 0

    @property
    def _device(self) -> torch.device:
        return self._cache.specs[0].device

    def _capture(self, sizes: Sizes, batch: InputBatch) -> _Captured | None:
        """A graph for steps such as `batch`, if there can be one now. The step itself is still to be computed."""
        if sizes in self._failures or self._is_full or sizes.rows > _rounded(self._max_rows):
            return None
        self._meetings[sizes] += 1
        if self._meetings[sizes] < _MEETINGS:
            return None
        step = batch.steps[0]
        inputs = _Inputs.make(sizes, len(batch.steps), step.block_size, self._cache.scratch_block, self._device)
        inputs.fill(batch)
        try:
            with _capturing:
                captured = _Captured(self._record(inputs), inputs)
        except Exception as error:  # a lost device too: the step that follows meets it again
            self._note_failure(sizes, error)
            return None
        self._graphs[sizes] = captured
        return captured

    def _note_failure(self, sizes: Sizes, error: Exception) -> None:
        reason = brief(error)
        if not self._failures:
            logger.warning("a decode step can't be captured as a CUDA graph and runs as before (%s)", reason)
        self._failures[sizes] = reason
        if not self._graphs:  # it is the model, not the size
            self._off = f"a step could not be captured ({reason})"

    def _record(self, inputs: _Inputs) -> torch.cuda.CUDAGraph:
        """Warm up, then capture, on a side stream, as torch's notes on CUDA graphs say. Raises what goes wrong."""
        current = torch.cuda.current_stream(self._device)
        side = self._side = self._side or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        try:
            # torch.cuda.graph doesn't leave its stream when the capture fails: this context does.
            with torch.cuda.stream(side):
                self._warm_up(inputs)
                return self._capture_on(side, inputs)
        finally:  # also when it fails: the warm-up may still read the inputs and write keys and values
            current.wait_stream(side)

    def _warm_up(self, inputs: _Inputs) -> None:
        # A capture that fails can leave torch's random generator in its capturing mode: see it coming.
        with _NoWaiting():  # type: ignore[no-untyped-call]
            logits = self._compute(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(_rounded(self._max_rows), logits.shape[1])
            self._used += self._logits.nbytes
        del logits
        self._compute(inputs)

    def _capture_on(self, side: torch.cuda.Stream, inputs: _Inputs) -> torch.cuda.CUDAGraph:
        assert self._logits is not None
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as the capture's beginning does: not to be counted
        free = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        # Other threads may take memory meanwhile, which the mode "global" would make an error of theirs.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            self._logits[: inputs.input_ids.shape[1]].copy_(self._compute(inputs))
        self._used += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return graph

    def _compute(self, inputs: _Inputs) -> torch.Tensor:
        self._port.begin(inputs.steps)
        try:
            return self._forward(inputs.input_ids, inputs.position_ids, inputs.logits_indices)
        finally:
            self._port.end()


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops on whose result the host would wait, or that bring numbers from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _makes_wait(func, args):
            raise _WaitsError(f"its forward waits for the device in {func}")
        with self:  # in inference mode, what is made of other ops comes as a whole
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES and len({t.device.type for t in (out, *args) if isinstance(t, torch.Tensor)}) > 1:
            raise _WaitsError(f"its forward copies between host and device in {func}")
        return out


_aten = torch.ops.aten
_COPIES = (_aten._to_copy, _aten.to, _aten.copy_)


def _makes_wait(func: Any, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket is _aten.index:  # by a mask: as many as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
