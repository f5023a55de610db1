"""How keys become what a tree holds: halves on a scale of their own, the last coordinate of T_K, random levels.

Source: icecache.txt, section 4.2, equations 2 and 3. With s a power of two, rows are k / s and lifts are
sqrt(c^2 - |k|^2) / s; products of such rows are those of the paper times (c / s)^2, so their order is the same, and keys
need not be written anew when c grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.tree import MAX_LEVELS, Floats

HEADROOM = 1.125
"""By how much c exceeds the largest norm when it has to grow: lifts are computed anew, parents stay as they are."""
LARGEST = 2.0**15
"""Numbers of this size and more are not put into halves: the largest is 65504."""
LEAST = 1e-30
"""c of keys that are all zero."""
ROOM = 10
"""c / s is at most 2^ROOM at first: halves stay exact far below the largest, and c may grow by 2^5 before s has to."""


@dataclass
class Scale:
    """`unit` is s, `bound` is c; both 0 until there are keys."""

    unit: float = 0.0
    bound: float = 0.0

    def fits(self, largest: float) -> bool:
        """True if keys of norm up to `largest` need no new bound."""
        return bool(self.bound) and largest <= self.bound

    def grow(self, largest: float) -> None:
        """Makes keys of norm up to `largest` fit: exactly at first (the paper's c), with some headroom later."""
        first = not self.bound
        self.bound = max(largest, LEAST) * (1 if first else HEADROOM)
        if first or self.bound / self.unit >= LARGEST:
            self.unit = float(2.0 ** (np.ceil(np.log2(self.bound)) - ROOM))

    def rows(self, keys: Floats) -> NDArray[np.uint16]:
        """Returns the bits of keys [..., dim] as halves."""
        bits: NDArray[np.uint16] = (keys * np.float32(1 / self.unit)).astype(np.float16).view(np.uint16)
        return bits

    def stretch(self, norms: Floats) -> Floats:
        """Returns what makes queries of these norms as long as all transformed keys are; 1 for zeros."""
        by: Floats = np.where(norms > 0, self.bound / self.unit / np.where(norms > 0, norms, 1), 1).astype(np.float32)
        return by

    def lifts(self, norms: NDArray[np.float64]) -> Floats:
        """Returns the last coordinates of keys with these norms."""
        lifts: Floats = (np.sqrt(np.maximum(self.bound**2 - norms**2, 0)) / self.unit).astype(np.float32)
        return lifts


def norms_of(keys: Floats) -> NDArray[np.float64]:
    """Returns the norms of keys [n, dim]; ValueError if one is not finite."""
    norms: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", keys, keys, dtype=np.float64))
    if not np.isfinite(norms).all():
        raise ValueError(f"keys: key {int(np.argmin(np.isfinite(norms)))} is not finite")
    return norms


def single(keys: NDArray[Any], scales: Floats | None = None) -> Floats:
    """Returns keys [..., dim] of a type of the spill file (uint16: bits of bfloat16; int8 with `scales`) as float32."""
    if keys.dtype == np.uint16:
        wide: Floats = (keys.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    plain: Floats = keys.astype(np.float32)
    return plain if scales is None else plain * scales[..., None]


def random_levels(tokens: NDArray[np.int64], seed: int, first: float, later: float) -> NDArray[np.int32]:
    """Returns the level of each token by random promotion; it depends on the seed and the token, not on what came before."""
    chance = _uniform(tokens, seed)
    levels = np.ones(len(tokens), np.int32)
    bar = first
    for level in range(2, MAX_LEVELS):
        promoted = chance < bar
        if not promoted.any():
            break
        levels[promoted] = level
        bar *= later
    return levels


def random_directions(count: int, dim: int, seed: int) -> Floats:
    """Returns `count` random unit vectors of `dim` numbers and the lift."""
    drawn = np.random.default_rng(seed).standard_normal((count, dim + 1), dtype=np.float32)
    unit: Floats = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _uniform(tokens: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) by SplitMix64 (Steele, Lea and Flood, 2014): one draw of Random(0, 1) stands for the whole loop."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    z = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    drawn: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn
