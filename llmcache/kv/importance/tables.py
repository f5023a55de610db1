"""Numbers that a policy keeps for each token, by layer and sequence, in arrays that grow with the context; its hits."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.arrays import Int64s

Kind = TypeVar("Kind", bound=np.generic)
MOST = np.iinfo(np.uint16).max
"""Hits of a token: what two bytes hold."""
_SLACK = 1024
"""Tokens that a table grows by at least: growing is a copy."""


class TokenTable(Generic[Kind]):
    """Rows of `shape` for each token (or page: whatever is counted); zero until they are written.

    One thread at a time uses the tables of one layer.
    """

    def __init__(self, layers: int, batch: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        empty: NDArray[Any] = np.zeros((0, *shape), dtype)
        self._tables = [[empty] * batch for _ in range(layers)]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tables, room for growth included."""
        return sum(table.nbytes for tables in self._tables for table in tables)

    def rows(self, layer: int, sequence: int, count: int) -> NDArray[Kind]:
        """Returns the first `count` rows [count, *shape]; a view to read and to write."""
        table = self._tables[layer][sequence]
        if len(table) < count:
            grown = np.zeros((count + max(_SLACK, count // 8), *table.shape[1:]), table.dtype)
            grown[: len(table)] = table
            self._tables[layer][sequence] = table = grown
        found: NDArray[Kind] = table[:count]
        return found

    def crop(self, count: int, layer: int | None = None) -> None:
        """Sets all rows from number `count` on to zero, in `layer` or (None) in all."""
        for tables in self._tables if layer is None else [self._tables[layer]]:
            for table in tables:
                table[count:] = 0

    def reorder(self, index: Int64s) -> None:
        """Gives sequence i the rows of what was sequence `index[i]`."""
        self._tables = [[tables[old].copy() for old in index] for tables in self._tables]


class HitTable(TokenTable[np.uint16]):
    """Hits of all tokens of `layers` layers and `batch` sequences; a token is hit once for each key head that chose it.

    Source: hillinfer.txt, section 3.2, "Bidirectional KV Cache Pools" (a table of the cache hit rate) and 4.4 ("2N bytes").
    Differs from the paper, which does not say what two bytes do when they are full: all counts of a layer and sequence are
    halved before the largest could overflow, so that their order is kept and old hits fade.
    """

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__(layers, batch, (), np.uint16)

    def record(self, layer: int, positions: Int64s) -> None:
        """Counts the tokens that one step chose: `positions` [batch, kv_heads, k] int64, or [batch, k]."""
        if not positions.size:
            return
        tokens = int(positions.max()) + 1
        for sequence, chosen in enumerate(positions):
            counts = self.rows(layer, sequence, tokens)
            while not _add(counts, np.ascontiguousarray(chosen).reshape(-1), MOST):
                self._tables[layer][sequence] >>= 1

    def halve(self, layer: int) -> None:
        """Halves all counts of a layer: hits so far count half as much as those to come."""
        for counts in self._tables[layer]:
            counts >>= 1

    def pages(self, layer: int, sequence: int, pages: int, page_tokens: int) -> Int64s:
        """Returns the hits [pages] int64 of whole pages: the sum over their tokens."""
        counts = self.rows(layer, sequence, pages * page_tokens)
        found: Int64s = counts.reshape(pages, page_tokens).sum(axis=1, dtype=np.int64)
        return found


@njit(nogil=True, cache=True)
def _add(counts, chosen, most):  # type: ignore[no-untyped-def]
    """Adds 1 for each of `chosen`, a token as often as it is in it; False, and nothing added, if one would overflow."""
    for i in range(chosen.size):
        if counts[chosen[i]] >= most:
            for j in range(i):
                counts[chosen[j]] -= np.uint16(1)
            return False
        counts[chosen[i]] += np.uint16(1)
    return True
