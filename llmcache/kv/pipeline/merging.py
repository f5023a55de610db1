"""Rows of several gatherings, put together as one selection wants them: what was looked ahead for is not read twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmcache.kv.tiers import Gathered

Positions = NDArray[np.int64]


def missing(wanted: Positions, have: Positions) -> Positions:
    """Returns what of `wanted` [batch, kv_heads, k] is not in `have` [.., m], int64 [batch, kv_heads, n], ascending.

    n is the most that one head misses; a head that misses fewer gets others of `wanted`, none of them twice.
    """
    batch, heads, _ = wanted.shape
    found = [[np.setdiff1d(wanted[b, h], have[b, h], assume_unique=True) for h in range(heads)] for b in range(batch)]
    most = max((len(head) for row in found for head in row), default=0)
    out = np.empty((batch, heads, most), np.int64)
    for b in range(batch):
        for h in range(heads):
            others = np.setdiff1d(wanted[b, h], found[b][h], assume_unique=True)
            out[b, h] = np.sort(np.concatenate([found[b][h], others[: most - len(found[b][h])]]))
    return out


def merged(wanted: Positions, parts: Sequence[Gathered]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns keys and values [batch, kv_heads, k, dim] of the positions `wanted` [batch, kv_heads, k] from `parts`.

    Each position must be in one of the parts at least; ValueError if one is not.
    """
    positions = np.concatenate([part.positions for part in parts], axis=2)
    order = np.argsort(positions, axis=2, kind="stable")
    ordered = np.take_along_axis(positions, order, axis=2)
    places = np.empty(wanted.shape, np.int64)
    for index in np.ndindex(wanted.shape[:2]):
        places[index] = np.minimum(np.searchsorted(ordered[index], wanted[index]), ordered.shape[2] - 1)
    if not np.array_equal(np.take_along_axis(ordered, places, axis=2), wanted):
        raise ValueError("wanted: a position is in none of the parts")
    rows = np.take_along_axis(order, places, axis=2)[..., None]
    keys, values = (
        np.take_along_axis(np.concatenate(sides, axis=2), rows, axis=2)
        for sides in ([part.keys for part in parts], [part.values for part in parts])
    )
    return keys, values
