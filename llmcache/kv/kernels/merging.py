"""RunningTop: the k best of scores that arrive in blocks, in any order, merged while others are still on their way.

Source: hillinfer.txt, Algorithm 1, lines 11 to 15. Differs from the paper: no sorted order is maintained, only a bound
below which nothing can be among the best any more; a sort at the end would cost more than all of the merging.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.top import top


class RunningTop:
    """Keeps the `k` best of all scores given to `add`; at most about three times as many at any time."""

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k: {k}, at least 1 is needed")
        self.k = k
        self._scores: list[NDArray[np.float32]] = []
        self._positions: list[NDArray[np.int64]] = []
        self._held = 0
        self._bound = np.float32(-np.inf)

    def add(self, positions: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Takes a block of scores and the positions of their tokens."""
        if positions.shape != scores.shape:
            raise ValueError(f"positions: shape {positions.shape}, scores have {scores.shape}")
        # What equals the bound may still win by its position; NaN only while nothing else is there.
        keep = ~(scores < self._bound) if self._bound == -np.inf else scores >= self._bound
        self._scores.append(scores[keep])
        self._positions.append(positions[keep])
        self._held += len(self._scores[-1])
        if self._held > 3 * self.k:
            self._compact()

    def result(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the positions of the `k` best so far, ascending, and their scores: what `top` over all would choose."""
        self._compact()
        return self._positions[0], self._scores[0]

    def _compact(self) -> None:
        scores = np.concatenate([*self._scores, np.empty(0, np.float32)])
        positions = np.concatenate([*self._positions, np.empty(0, np.int64)])
        order = np.argsort(positions)  # of equal scores the earlier position wins
        scores, positions = scores[order], positions[order]
        if len(scores) > self.k:
            best = top(scores, self.k, threads=1)
            scores, positions = scores[best], positions[best]
            least = scores.min()
            self._bound = least if least == least else self._bound  # NaN: fewer numbers than k so far
        self._scores, self._positions, self._held = [scores], [positions], len(scores)
