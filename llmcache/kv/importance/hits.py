"""The table of hits: how often each token was chosen, by layer and sequence, in two bytes a token.

Source: hillinfer.txt, section 3.2, "Bidirectional KV Cache Pools" (a table of the cache hit rate) and 4.4 ("2N bytes").
Differs from the paper, which does not say what two bytes do when they are full: all counts of a layer and sequence are
halved before the largest could overflow, so that their order is kept and old hits fade.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.kv.importance.tables import TokenTable

Positions = NDArray[np.int64]
MOST = np.iinfo(np.uint16).max


class HitTable:
    """Hits of all tokens of `layers` layers and `batch` sequences; a token is hit once for each key head that chose it."""

    def __init__(self, layers: int, batch: int) -> None:
        self._counts: TokenTable[np.uint16] = TokenTable(layers, batch, (), np.uint16)

    @property
    def size_bytes(self) -> int:
        """Bytes of all counts: two for each token of a layer and sequence (room for growth included)."""
        return self._counts.size_bytes

    def record(self, layer: int, positions: Positions) -> None:
        """Counts the tokens that one step chose: `positions` [batch, kv_heads, k] int64, or [batch, k]."""
        if not positions.size:
            return
        tokens = int(positions.max()) + 1
        for sequence, chosen in enumerate(positions):
            counts = self._counts.rows(layer, sequence, tokens)
            while not _add(counts, np.ascontiguousarray(chosen).reshape(-1), MOST):
                self._counts.whole(layer, sequence)[:] >>= 1

    def halve(self, layer: int) -> None:
        """Halves all counts of a layer: hits so far count half as much as those to come."""
        for sequence in range(self._counts.batch):
            self._counts.whole(layer, sequence)[:] >>= 1

    def tokens(self, layer: int, sequence: int, tokens: int) -> NDArray[np.uint16]:
        """Returns the hits [tokens] uint16 of the first `tokens` tokens; a view, zero where nothing was recorded."""
        return self._counts.rows(layer, sequence, tokens)

    def pages(self, layer: int, sequence: int, pages: int, page_tokens: int) -> NDArray[np.int64]:
        """Returns the hits [pages] int64 of whole pages: the sum over their tokens."""
        counts = self.tokens(layer, sequence, pages * page_tokens)
        found: NDArray[np.int64] = counts.reshape(pages, page_tokens).sum(axis=1, dtype=np.int64)
        return found

    def crop(self, tokens: int, layer: int | None = None) -> None:
        """Forgets all tokens from number `tokens` on, in every sequence of `layer` (None: of all layers)."""
        self._counts.crop(tokens, layer)

    def reorder(self, index: Positions) -> None:
        """Gives sequence i the table of what was sequence `index[i]`; the batch may become larger or smaller."""
        self._counts.reorder(index)


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
