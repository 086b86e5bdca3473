"""KVLayout: which layers share the memory of a block.

Layers of equal reach (all, a window, a chunk) form groups; a block belongs to one group at a time and holds so many tokens for
each of its layers. All groups are of one size, so that any block can serve any of them, as in the hybrid cache of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cb.attention.step import LayerSpec

_MOST_WASTE = 0.1  # of the memory: what groups that are not full may cost

_Reach = tuple[int | None, int | None]  # window, chunk


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`groups`: the layers of each, by index. `reaches`: (window, chunk) of each."""

    groups: tuple[tuple[int, ...], ...]
    reaches: tuple[_Reach, ...]

    @classmethod
    def of(cls, specs: Sequence[LayerSpec]) -> KVLayout:
        """The fewest groups that waste little. Layers whose keys and values differ in form, or that all look back as far as
        there is, are one group."""
        everything = cls((tuple(range(len(specs))),), ((None, None),))
        forms = {(s.num_kv_heads, s.head_size, s.value_head_size, s.stored_dtype, s.device) for s in specs}
        by_reach: dict[_Reach, list[int]] = {}
        for i, spec in enumerate(specs):
            by_reach.setdefault((spec.window, spec.chunk), []).append(i)
        if len(forms) > 1 or set(by_reach) <= {(None, None)}:
            return everything
        for size in range(max(map(len, by_reach.values())), 0, -1):
            parts = [(reach, part) for reach, own in by_reach.items() for part in _cut(own, size)]
            if len(parts) * size <= len(specs) * (1 + _MOST_WASTE):
                parts.sort(key=lambda item: item[0] != (None, None))  # those that see everything first
                return cls(tuple(part for _, part in parts), tuple(reach for reach, _ in parts))
        return everything

    @property
    def size(self) -> int:
        """Layers that a block has room for."""
        return max(map(len, self.groups))

    def bytes_per_token(self, specs: Sequence[LayerSpec]) -> int:
        """Bytes that a token takes in all layers."""
        if len(self.groups) == 1:
            return sum(spec.bytes_per_token for spec in specs)
        return len(self.groups) * self.size * specs[0].bytes_per_token


def _cut(layers: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]
