"""Scores of pages where they lie: slots of the cpu pool in runs, without copying keys; streams of the ssd tier in blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.csd import ScoreBlock
from llmcache.kv.kernels import score_pages
from llmcache.kv.tiers.copying import Rows
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.ssd import Ask, SsdTier

Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]
SHORT_RUNS = 4
"""Where runs are shorter in the mean, copying the pages together costs less than scoring so many runs."""


def runs(slots: Numbers) -> Iterator[tuple[int, int, int]]:
    """Yields (first, count, step): `slots[first : first + count]`, ascending, lie `step` slots apart."""
    steps = np.diff(slots)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    first = 0
    while first < len(slots):
        last = max(first, changes[bisect_right(changes, first)] if first < len(steps) else first)
        yield first, last - first + 1, int(steps[first]) if last > first else 1
        first = last + 1


def score_slots(keys: Rows, slots: Numbers, queries: Floats, combine: str, threads: int | None) -> Floats:
    """Returns the scores [kv_heads, n * page_tokens] of the pages in `slots` [n], in their order."""
    heads, tokens = keys.pages.shape[1:3]
    order = np.argsort(slots)
    ordered = slots[order]
    found = list(runs(ordered))
    if len(found) * SHORT_RUNS > len(slots):
        scales = None if keys.scales is None else keys.scales[slots]
        return score_pages(queries, keys.pages[slots], scales, combine=combine, threads=threads)
    out = np.empty((heads, len(slots), tokens), np.float32)
    for first, count, step in found:
        part = slice(int(ordered[first]), int(ordered[first + count - 1]) + 1, step)
        scales = None if keys.scales is None else keys.scales[part]
        scores = score_pages(queries, keys.pages[part], scales, combine=combine, threads=threads)
        out[:, order[first : first + count]] = scores.reshape(heads, count, tokens)
    return out.reshape(heads, -1)


def score_streams(
    core: Core,
    ssd: SsdTier,
    layer: int,
    sequence: int,
    pages: Numbers,
    queries: Floats,
    combine: str,
    block_tokens: int,
) -> Iterator[ScoreBlock]:
    """Yields score blocks of `pages` of a sequence, ascending, stream after stream."""
    numbers = core.table.table[sequence, pages]
    streams, places = core.table.stream[numbers], core.table.place[numbers].astype(np.int64)
    for stream in np.unique(streams).tolist():
        here = streams == stream
        shift = int(pages[here][0] - places[here][0]) * core.shape.page_tokens
        for block in ssd.score(Ask(stream, layer, places[here], queries, combine, block_tokens)):
            yield ScoreBlock(block.head, block.positions + shift, block.scores)
