"""Probe: a few random rows run through a twin, packed and in chunks, beside what they are alone.

The rows first run alone, by the model's own attention. What the engine will do to them then is tried and compared: packing,
chunks, shuffled blocks, neighbours, few logits, another dtype of the cache.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.hf.mixer_trials import try_mixers
from hf_cb.hf.twins.attention import IMPLEMENTATION, Observer, register, set_port
from hf_cb.hf.twins.fingerprint import Books, Fingerprint
from hf_cb.hf.twins.mixers import FLAWS, Mixer, find_mixers
from hf_cb.hf.twins.mixing import Mixing
from hf_cb.hf.twins.positions import max_positions
from hf_cb.hf.twins.twin import set_attention
from hf_cb.runtime.input_batch import InputBatch, build_input_batch
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.model_runner import Forward
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.state_pool import StatePool
from hf_cb.runtime.streams import streams_of

logger = logging.getLogger("hf_cb")

_BLOCK_SIZE = 4
_CHUNKS = (13, 22, 59, 1, 1)  # tokens of each row in the probe's steps
_LONGEST = 96  # tokens of the longer row; windows beyond it are taken on trust in the layer's own argument


class UnservableError(Exception):
    """The model cannot be served. The message is the reason, in words for the user."""


class Probe:
    """A twin with rows to try it with. Each check raises UnservableError with what is wrong."""

    def __init__(self, twin: nn.Module, forward: Forward, vocab_size: int, device: torch.device) -> None:
        """Runs the rows alone, with the attention that the twin still has."""
        self.twin, self.forward, self.device = twin, forward, device
        longest = min(_LONGEST, max_positions(twin) or _LONGEST)
        self._rows = _random_rows(vocab_size, longest, device)
        self._alone = [self._plain_logits(self._rows[0])]  # what modules make of themselves at first is not their books
        before = Fingerprint.of(twin)
        self._alone += [self._plain_logits(row) for row in self._rows[1:]]
        self.zeros_are_none = self._which_zeros_are_none()
        self.written: Books = before.written(Fingerprint.of(twin))
        """What its modules wrote as they ran."""
        self._observer = Observer()
        self.mixers: list[Mixer] = []
        """Its layers that keep a state, in the order of their calls; after `observe_states`."""
        self.mixing: Mixing | None = None
        """What serves them."""

    @property
    def modules(self) -> list[nn.Module]:
        """Its attention layers, in the order of their calls; after `observe`."""
        return self._observer.modules

    @property
    def specs(self) -> list[LayerSpec]:
        """What each of these layers asks of attention."""
        return self._observer.specs

    def observe(self) -> None:
        """Put our attention into the twin, and learn what each layer asks of it."""
        register()
        set_attention(self.twin, IMPLEMENTATION)
        set_port(self.twin, self._observer)
        row = self._rows[1]
        positions = torch.arange(len(row), device=row.device, dtype=torch.int64)
        try:
            self.forward(row[None], positions[None], positions[-1:])
        except FLAWS as error:
            if "position_ids" in inspect.signature(self.twin.forward).parameters:
                raise
            raise UnservableError("its forward takes no position_ids, and its layers do not run without a mask") from error
        _check_windows(self._observer)

    def observe_states(self) -> None:
        """Learn which layers keep a state, and serve those from slots; after `observe`."""
        try:
            self.mixers = find_mixers(
                self.twin, self.modules, [partial(self._run_with_cache, row) for row in (self._rows[1], self._rows[1][:-5])]
            )
        except FLAWS as error:  # with a cache: in plain use it may be told to have none
            logger.debug("what its layers keep could not be observed", exc_info=error)
        if not self.specs and not self.mixers:
            raise UnservableError("its layers never call the registered attention function")
        if self.mixers:
            try_mixers(self.mixers)
            self.mixing = Mixing(self.mixers, self._states())

    def _run_with_cache(self, row: torch.Tensor) -> None:
        set_port(self.twin, Observer())
        self.twin(input_ids=row[None], use_cache=True, return_dict=True)

    def _states(self) -> StatePool:
        """Slots for the rows, two each, which hold no numbers yet."""
        pool = StatePool([mixer.specs for mixer in self.mixers], 2 * len(self._rows))
        for states in (states for own in pool.states for states in own):
            if states.is_floating_point():
                states.fill_(float("nan"))
        return pool

    def check(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """Run the rows packed and in chunks, once more beside other neighbours, and compare. The logits of each row, packed."""
        first, second, third = (row.tolist() for row in self._rows)
        packed = self._run([first, second, third], backend)
        beside_other = self._run([[*first[1:], first[0]], second, third], backend)
        half = self._alone[0].dtype != torch.float32 or any(spec.dtype.itemsize < 4 for spec in self.specs)
        for got, want in zip(packed, self._alone, strict=True):
            if not _close(got, want, half):
                raise UnservableError("packed rows give other logits than the same rows alone")
        # The same shapes in both runs: what differs can only have come from the neighbour.
        if not _close(beside_other[1], packed[1], half=False, rtol=1e-2 if half else 1e-4):
            raise UnservableError("packed rows see their neighbours")
        return packed

    def check_sparing(self, backend: AttentionBackend) -> None:
        """`check`; then ask for few logits, as a step does, and compare with what they are among all."""
        whole = self.check(backend)
        few = self._run([row.tolist() for row in self._rows], backend, sparing=True)
        for own, all_of_row in zip(few, whole, strict=True):
            ends = dict.fromkeys(min(end, len(all_of_row)) - 1 for end in accumulate(_CHUNKS))
            if not _close(own, all_of_row[[*ends]], half=False, rtol=5e-2):
                raise UnservableError("logits depend on which are asked for")

    def check_stored(self, specs: Sequence[LayerSpec], backend: AttentionBackend) -> None:
        """Run the rows over a cache in the dtype that the user wants: that it runs is asked, its rounding is the user's."""
        for logits in self._run([row.tolist() for row in self._rows], backend, specs):
            if not bool(torch.isfinite(logits).all()):
                raise UnservableError("a KV cache of another dtype gives logits that are not numbers")

    def _plain_logits(self, row: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of a row alone, by the model's own attention. Positions are left to the model, as in plain use."""
        out = self.twin(input_ids=row[None], use_cache=False, return_dict=True, **arguments)
        return out.logits[0].float()  # type: ignore[no-any-return]

    def _which_zeros_are_none(self) -> frozenset[str]:
        """Tokenizers give types of tokens for a single text, too: all zeros. Some models add something for those."""
        if "token_type_ids" not in inspect.signature(self.twin.forward).parameters:
            return frozenset()
        row = self._rows[1]
        with_zeros = self._plain_logits(row, token_type_ids=torch.zeros_like(row)[None])
        return frozenset({"token_type_ids"} if torch.equal(with_zeros, self._alone[1]) else ())

    def _run(
        self,
        rows: list[list[int]],
        backend: AttentionBackend,
        specs: Sequence[LayerSpec] | None = None,
        sparing: bool = False,
    ) -> list[torch.Tensor]:
        """Logits of every position of each row, computed together in uneven chunks over shuffled blocks, a last token by
        itself. `sparing`: of each chunk's last position, and only they are asked for, as in service."""
        specs = self.specs if specs is None else specs
        block_size = max(_BLOCK_SIZE, backend.block_multiple)
        cache = KVCache(specs, len(rows) * -(-_LONGEST // block_size) + 1, block_size)
        port = AttentionPort(self.modules, specs, backend, cache)
        set_port(self.twin, port)
        if self.mixing is not None:
            self.mixing.use(self._states())
        tables = _shuffled_tables(len(rows), block_size)
        done = [0] * len(rows)
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for number, chunk in enumerate(_CHUNKS):
            parts = [(i, tuple(row[done[i] : done[i] + chunk])) for i, row in enumerate(rows)]
            scheduled = tuple(
                ScheduledRow(i, done[i], part, self._memory(number, i, done[i], len(part), tables[i], block_size), 1)
                for i, part in parts
                if part
            )
            if not scheduled:
                break
            out = self._step(
                build_input_batch(SchedulerOutput.of_rows(scheduled), block_size, streams_of(self.device)), port, sparing
            )
            lengths = [1 if sparing else len(row.token_ids) for row in scheduled]
            for row, part_logits in zip(scheduled, torch.split(out, lengths), strict=True):
                logits[row.request_id].append(part_logits)
                done[row.request_id] += len(row.token_ids)
        return [torch.cat(parts_of_row) for parts_of_row in logits]

    def _memory(self, step: int, row: int, start: int, length: int, table: tuple[int, ...], block_size: int) -> RowMemory:
        """A row's part of a cache and, in turn, its two slots."""
        blocks, end = table[: -(-(start + length) // block_size)], start + length
        if not self.mixers:
            return RowMemory(blocks)
        slots = (row, len(self._rows) + row)
        return RowMemory(blocks, slots[(step - 1) % 2] if start else None, ((end, slots[step % 2]),))

    def _step(self, batch: InputBatch, port: AttentionPort, sparing: bool) -> torch.Tensor:
        everywhere = torch.arange(batch.input_ids.shape[1], device=self.device, dtype=torch.int64)
        asked = batch.logits_indices if sparing else everywhere
        port.begin(batch.steps, asked if sparing else None)
        if self.mixing is not None:
            self.mixing.begin(batch.states, batch.input_ids.shape[1])
        out = self.forward(batch.input_ids, batch.position_ids, asked).float()
        if any(calls != 1 for calls in port.calls):
            raise UnservableError("an attention layer was not called exactly once a step")
        port.end()
        if self.mixing is not None:
            self.mixing.end()
        return out


def _random_rows(vocab_size: int, longest: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, min(longest, 36), 1)
    return [
        torch.randint(0, vocab_size, (n,), generator=generator, dtype=torch.int64, device="cpu").to(device) for n in lengths
    ]


def _shuffled_tables(num_rows: int, block_size: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    per_row = -(-_LONGEST // block_size)
    blocks = (torch.randperm(num_rows * per_row, generator=generator, dtype=torch.int64, device="cpu") + 1).tolist()
    return [tuple(blocks[row * per_row : (row + 1) * per_row]) for row in range(num_rows)]


def _check_windows(observer: Observer) -> None:
    """A window that the config declares must have reached the attention function: the probe is too short to see a long one."""
    for module, spec in zip(observer.modules, observer.specs, strict=True):
        config: Any = getattr(module, "config", None)
        types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        kind = types[index] if types and index is not None else None
        if kind == "sliding_attention" and spec.window is None:
            raise UnservableError("a sliding-window layer does not pass its window to the attention function")


def _close(got: torch.Tensor, want: torch.Tensor, half: bool, rtol: float = 5e-3) -> bool:
    """Whether two sets of logits [n, vocab] agree, relative to the spread of each position's logits.

    In float32 at every position. In half precision at most of them: one expert chosen otherwise moves a position honestly.
    """
    want = want.to(got.device)
    spread = (want.amax(-1) - want.amin(-1)).clamp_min(1e-6)
    error = (got - want).abs().amax(-1) / spread
    if not bool(torch.isfinite(error).all()):
        return False
    return bool(error.median() < 0.05) if half else bool(error.max() < rtol)
