"""Adding tokens: into the page that is being filled, into the pool what stays there, and to the ssd tier what is full."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import LlmcacheError
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.pool import Pool
from llmcache.kv.tiers.spilling import Fresh, Spiller, keep_all

Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]
Arrays = list[NDArray[Any]]


class Appender:
    """Appends for one store; without an ssd tier everything stays in the pool."""

    def __init__(self, core: Core, spiller: Spiller | None, mover: Mover | None) -> None:
        self._core, self._spiller, self._mover = core, spiller, mover

    def append(self, layer: int, rows: Arrays) -> None:
        """Adds keys, values and for int8 their scales, [batch, kv_heads, tokens, ..]."""
        core, size = self._core, self._core.shape.page_tokens
        first = int(core.lengths[layer])
        end = first + rows[0].shape[2]
        full = range(first // size, end // size)
        core.table.extend(core.shape.pages_of(end))
        pool = core.checked(layer)
        fresh = self._fresh(pool, rows, first, full) if full and self._spiller else None
        kept = self._kept(first, end)
        if len(full) > 1 and self._mover is not None:
            # Many at once: what must go goes before they come, so that the pool need not be larger than its bound.
            more = sum(len(part) for part in kept) - bool(first % size) - bool(end % size)
            self._mover.trim(layer, end, more, placing=True)
        with pool.lock:
            for part in kept:
                self._fill(pool, part, rows, first, end)
            if fresh is not None:
                self._let_go(pool, full, first, end)
        core.lengths[layer] = end
        if self._spiller is not None and (fresh is not None or self._spiller.is_saved):
            self._write(self._spiller, layer, fresh)
        if len(full) > 1 and self._mover is not None:
            self._mover.trim(layer, end, placing=True)

    def _kept(self, first: int, end: int) -> list[range]:
        """Pages of those an append touches that are to be in the pool: all, or sink, the latest, and the tail."""
        core, size = self._core, self._core.shape.page_tokens
        touched = range(first // size, core.shape.pages_of(end))
        bound = core.config.cpu_pages
        if bound is None or self._spiller is None:
            return [touched]
        sink = core.config.sink_pages
        # Whatever the sink leaves of the pool belongs to the latest: what falls out of it would only come in to go again.
        last = max(sink, end // size - (bound - sink))
        parts = [range(touched.start, min(sink, touched.stop)), range(max(touched.start, last), touched.stop)]
        return [part for part in parts if part]

    def _fill(self, pool: Pool, part: range, rows: Arrays, first: int, end: int) -> None:
        size = self._core.shape.page_tokens
        start, stop = max(first, part.start * size), min(end, part.stop * size)
        for b in range(self._core.table.batch):
            numbers = self._core.table.table[b, part.start : part.stop]
            pool.fill(numbers, [array[b][:, start - first : stop - first] for array in rows], start - part.start * size)

    def _let_go(self, pool: Pool, full: range, first: int, end: int) -> None:
        """Takes the page that was being filled out of the pool if it is full now and does not stay."""
        if not any(full.start in part for part in self._kept(first, end)):
            pool.drop(self._core.table.table[:, full.start])

    def _fresh(self, pool: Pool, rows: Arrays, first: int, full: range) -> Fresh:
        """Rows of the full pages, with those that the first of them has already."""
        core, size = self._core, self._core.shape.page_tokens
        offset = first % size
        count = full.stop * size - first
        found: list[Arrays] = []
        with pool.lock:
            for b in range(core.table.batch):
                arrays = [array[b][:, :count] for array in rows]
                if offset:
                    before = pool.rows(int(core.table.table[b, full.start]))
                    pairs = zip(before, arrays, strict=True)
                    arrays = [np.concatenate([old[:, :offset], new], axis=1) for old, new in pairs]
                found.append(arrays)
        return full.start, found

    def _write(self, spiller: Spiller, layer: int, fresh: Fresh | None) -> None:
        try:
            spiller.uncut()
            if fresh is not None:
                spiller.write(layer, fresh)
        except LlmcacheError:
            if fresh is not None:
                keep_all(self._core, layer, fresh)
            raise

    def commit(self, ids: Numbers, positions: Numbers) -> None:
        """Ends a step."""
        core, size = self._core, self._core.shape.page_tokens
        if ids.ndim != 2 or ids.shape != positions.shape or len(ids) != core.table.batch:
            raise ValueError(f"ids: {ids.shape}, positions: {positions.shape}; both [{core.table.batch}, tokens] is needed")
        if (core.lengths != core.tokens.length + ids.shape[1]).any():
            found = core.lengths.tolist()
            raise ValueError(f"ids: {ids.shape[1]} tokens after {core.tokens.length}, but the layers have {found}")
        before = core.tokens.length // size
        core.tokens.add(ids, positions)
        core.step += 1
        if core.tokens.length // size == before or self._spiller is None or self._mover is None:
            return
        try:
            self._spiller.write_tokens()
        finally:
            for layer in range(core.shape.layers):
                self._mover.trim(layer, core.tokens.length)


def checked_rows(
    core: Core, keys: NDArray[Any], values: NDArray[Any], scales: tuple[Floats | None, Floats | None]
) -> Arrays:
    """Returns keys, values and for int8 their scales if they fit; ValueError naming the argument if not."""
    shape = core.shape
    tokens = keys.shape[2] if keys.ndim == 4 else 0
    for name, rows, dim in (("keys", keys, shape.head_dim), ("values", values, shape.value_dim)):
        wanted = (core.table.batch, shape.kv_heads, tokens, dim)
        if rows.shape != wanted or not tokens or rows.dtype != shape.numpy_dtype:
            raise ValueError(f"{name}: {rows.dtype} {rows.shape}, {shape.numpy_dtype} {wanted} is needed")
    found: Arrays = [keys, values]
    for name, of_side in zip(("key_scales", "value_scales"), scales, strict=True):
        if (of_side is not None) != (shape.dtype == "int8"):
            raise ValueError(f"{name}: they belong to int8 and only to int8, the type is {shape.dtype}")
        if of_side is not None:
            if of_side.shape != keys.shape[:3] or of_side.dtype != np.float32:
                raise ValueError(f"{name}: {of_side.dtype} {of_side.shape}, float32 {keys.shape[:3]} is needed")
            found.append(of_side)
    return found
