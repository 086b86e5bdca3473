"""BlockName: what is in a block, and before it, as a hash; sequences that begin alike find each other's blocks by it."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Sequence as Tokens
from typing import NamedTuple

_DIGEST_BYTES = 16


class BlockName(NamedTuple):
    """What one full block holds: its own tokens, after all that `parent` stands for.

    `key` is a 128-bit hash (BLAKE2b) of both, so it names the whole prefix up to the end of this block. Keys alone decide
    nothing: a hit counts only where parent and tokens are equal too.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PrefixNames:
    """The names of one sequence's full blocks, made when they are first asked for. The tokens may grow, not change."""

    __slots__ = ("_block_size", "_names", "_root")

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._root = _hash(b"" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass"))
        self._names: list[BlockName] = []

    def copy(self) -> PrefixNames:
        """The same names, for a sequence that begins with the same tokens."""
        other = copy.copy(self)
        other._names = list(self._names)
        return other

    def upto(self, num_blocks: int, tokens: Tokens[int]) -> list[BlockName]:
        """The names of at least the first `num_blocks` blocks, which `tokens` fill."""
        while len(self._names) < num_blocks:
            start = len(self._names) * self._block_size
            parent = self._names[-1].key if self._names else self._root
            own = tuple(tokens[start : start + self._block_size])
            self._names.append(BlockName(_hash(parent, array("q", own).tobytes()), parent, own))
        return self._names


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
