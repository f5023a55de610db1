"""Keys and queries that indexes are measured on: clusters, which are what a tree is for, and noise, where it must lose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DIM = 128
CLUSTERS, SPREAD, ASTRAY = 256, 0.35, 1.0


class Keys(NamedTuple):
    """`keys` [n, DIM] float32, `more` keys of the same kind that come later, `queries` [q, DIM]."""

    keys: NDArray[np.float32]
    more: NDArray[np.float32]
    queries: NDArray[np.float32]


def clustered(count: int, more: int, queries: int, seed: int = 0) -> Keys:
    """Return keys around `CLUSTERS` centres of very different popularity, and queries near some, by their popularity."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((CLUSTERS, DIM), dtype=np.float32)
    popularity = random.dirichlet(np.ones(CLUSTERS) / 2)

    def around(size: int, spread: float) -> NDArray[np.float32]:
        noise = random.standard_normal((size, DIM), dtype=np.float32)
        found: NDArray[np.float32] = centres[random.choice(CLUSTERS, size, p=popularity)] + np.float32(spread) * noise
        return found

    return Keys(around(count, SPREAD), around(more, SPREAD), around(queries, ASTRAY))


def gaussian(count: int, more: int, queries: int, seed: int = 0) -> Keys:
    """Return keys and queries without any structure."""
    random = np.random.default_rng(seed)
    sizes = (count, more, queries)
    return Keys(*(random.standard_normal((size, DIM), dtype=np.float32) for size in sizes))


KINDS = {"clustered": clustered, "gaussian": gaussian}
