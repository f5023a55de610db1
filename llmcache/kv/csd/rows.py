"""Near-data gather: single rows cross the link of the *emulated* device, not the pages that they lie in.

Both ends divide a request in the same way, so that neither has to tell the other what comes when: in shares of pages that
fit the ring, and within a share head after head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.csd.wire import RING_BYTES
from llmcache.kv.spill.shape import KvShape

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class KvRows:
    """Rows of the heads, one head after the other: keys [n, head_dim], values [n, value_dim]; scales [n] only for int8."""

    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: NDArray[np.float32] | None = None
    value_scales: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Share:
    """`pages`, ascending, and which of the rows that were asked for lie in them: a part of `flat` rows for each head."""

    pages: Numbers
    parts: list[slice]


def checked_positions(shape: KvShape, positions: list[Numbers]) -> list[Numbers]:
    """Returns `positions` if they are ascending token numbers for each head; ValueError if not."""
    if len(positions) != shape.kv_heads:
        raise ValueError(f"positions: for {len(positions)} heads, the model has {shape.kv_heads}")
    for head, of_head in enumerate(positions):
        if of_head.ndim != 1 or (len(of_head) and of_head[0] < 0) or (np.diff(of_head) <= 0).any():
            raise ValueError(f"positions: those of head {head} are not ascending token numbers")
    return positions


def shares(shape: KvShape, positions: list[Numbers]) -> Iterator[Share]:
    """Yields a request for the rows at `positions` (one ascending array a head) in shares."""
    size = shape.page_tokens
    pages = np.unique(np.concatenate(positions) // size)
    starts = np.cumsum([0, *map(len, positions)])
    most = max(1, RING_BYTES // 8 // max(shape.key_slot_bytes, shape.value_slot_bytes))
    for first in range(0, len(pages), most):
        part = pages[first : first + most]
        ends = (part[0] * size, (part[-1] + 1) * size)
        bounds = [np.searchsorted(of_head, ends) + start for of_head, start in zip(positions, starts, strict=False)]
        yield Share(part, [slice(int(low), int(high)) for low, high in bounds])


def pick(shape: KvShape, share: Share, flat: Numbers, pages: NDArray[Any]) -> NDArray[Any]:
    """Returns the rows of a share in its `pages` [pages, kv_heads, page_tokens, ..]; `flat`: all positions asked for."""
    found = []
    for head, part in enumerate(share.parts):
        page, token = np.divmod(flat[part], shape.page_tokens)
        found.append(pages[np.searchsorted(share.pages, page), head, token])
    return np.concatenate(found)


def sides(rows: KvRows) -> list[NDArray[Any]]:
    """Returns the arrays in the order in which they cross the link, in every share anew."""
    return [side for side in (rows.keys, rows.key_scales, rows.values, rows.value_scales) if side is not None]


def room_for(shape: KvShape, count: int) -> KvRows:
    """Returns room for `count` rows."""
    keys, values = (np.empty((count, dim), shape.numpy_dtype) for dim in (shape.head_dim, shape.value_dim))
    if shape.dtype != "int8":
        return KvRows(keys, values)
    return KvRows(keys, values, np.empty(count, np.float32), np.empty(count, np.float32))
