"""Fetching chosen rows from the ssd tier: pages of a file, each once for all heads; single rows of a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.csd import KvRows
from llmcache.kv.spill import KvPages
from llmcache.kv.spill.reading import Then
from llmcache.kv.spill.shape import Bytes, view_slots
from llmcache.kv.tiers.copying import Rows, copy_rows, mark_missing
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.pool import NOT_HERE
from llmcache.kv.tiers.ssd import SsdTier

Numbers = NDArray[np.int64]
Outs = list[NDArray[Any]]
FEW_BYTES = 1 << 22
"""Below it a thread of its own for copying takes longer than copying."""


class Fetcher:
    """Fetches for one store."""

    def __init__(self, core: Core, mover: Mover, ssd: SsdTier) -> None:
        self._core, self._mover, self._ssd = core, mover, ssd

    def fetch(self, layer: int, index: Numbers, positions: Numbers, outs: Outs) -> int:
        """Brings the rows of pages whose `index` [batch, pages] is NOT_HERE to `outs`; returns how many tokens these were.

        `positions` [batch, kv_heads, k]; `outs`: keys and values [batch, kv_heads, k, dim].
        """
        size = self._core.shape.page_tokens
        marked = [mark_missing(index[b], positions[b], size) for b in range(len(index))]
        missing = sum(count for count, _ in marked)
        if missing and self._ssd.near_data:
            for b, (_, pages) in enumerate(marked):
                self._fetch_rows(layer, b, pages, positions[b], [out[b] for out in outs])
        elif missing:
            numbers = [self._core.table.table[b, pages] for b, (_, pages) in enumerate(marked)]
            self._fetch_pages(layer, np.unique(np.concatenate(numbers)), positions, outs)
        return missing

    def _fetch_pages(self, layer: int, numbers: Numbers, positions: Numbers, outs: Outs) -> None:
        """Reads pages and copies their rows as they come."""
        core = self._core
        for stream, found in self._mover.by_stream(numbers):
            places = core.table.place[found].astype(np.int64)
            known = np.full(core.table.numbers, NOT_HERE, np.int64)
            known[found] = np.arange(len(found))
            index = [(row, np.flatnonzero(row != NOT_HERE)) for row in known[core.table.table]]
            copy = partial(self._copy, index, positions, outs)
            read = partial(self._ssd.read, stream, layer, places, "fetch")
            if len(found) * core.shape.token_bytes * core.shape.page_tokens < FEW_BYTES:
                with read(copy):
                    pass
            else:
                _copy_while_reading(read, copy)

    def _copy(
        self, index: list[tuple[Numbers, Numbers]], positions: Numbers, outs: Outs, side: int, first: int, slots: Bytes
    ) -> None:
        """Copies the rows that lie in some of the pages that are read, from the one with index `first` on."""
        shape = self._core.shape
        size = shape.page_tokens
        rows = Rows(*view_slots(shape, slots, (shape.head_dim, shape.value_dim)[side]))
        for b, (of_sequence, pages) in enumerate(index):
            # Within a stream the pages of a sequence ascend as their places do.
            here = pages[slice(*np.searchsorted(of_sequence[pages], (first, first + len(slots))).tolist())]
            if len(here):
                tokens = range(int(here[0]) * size, (int(here[-1]) + 1) * size)
                copy_rows(rows, of_sequence, positions[b], outs[side][b], first, tokens)

    def _fetch_rows(self, layer: int, b: int, pages: Numbers, positions: Numbers, outs: Outs) -> None:
        table, size = self._core.table, self._core.shape.page_tokens
        streams = table.stream[table.table[b]]
        wanted = np.zeros(len(streams), np.bool_)
        wanted[pages] = True
        for stream in np.unique(streams[pages]).tolist():
            # Pages of one stream that a sequence has follow each other, from the beginning of the stream on.
            first = int(np.flatnonzero(streams == stream)[0]) * size
            of_pages = wanted & (streams == stream)
            here = [of_pages[of_head // size] for of_head in positions]
            local = [of_head[mask] - first for of_head, mask in zip(positions, here, strict=True)]
            rows = self._ssd.gather(stream, layer, local, "fetch")
            _lay_out(rows, here, outs)


def _copy_while_reading(read: Callable[[Then], AbstractContextManager[KvPages]], copy: Then) -> None:
    """Gives everything that is read to `copy` in this thread; threads that read do nothing but read."""
    arrived: SimpleQueue[tuple[int, int, Bytes] | None] = SimpleQueue()
    copied = Event()

    def run() -> None:
        try:
            with read(lambda *part: arrived.put(part)):
                arrived.put(None)
                copied.wait()  # the memory is used again once this is left
        except BaseException:
            arrived.put(None)
            raise

    with ThreadPoolExecutor(1, thread_name_prefix="llmcache-fetch") as reader:
        done = reader.submit(run)
        try:
            while (part := arrived.get()) is not None:
                copy(*part)
        finally:
            copied.set()
        done.result()


def _lay_out(rows: KvRows, here: list[NDArray[np.bool_]], outs: Outs) -> None:
    """Puts rows, head after head, where `here` [k] of each head says; int8 becomes float32, times its scales."""
    done = 0
    for head, mask in enumerate(here):
        part = slice(done, done + int(mask.sum()))
        for out, side, scales in ((outs[0], rows.keys, rows.key_scales), (outs[1], rows.values, rows.value_scales)):
            out[head][mask] = side[part] if scales is None else side[part].astype(np.float32) * scales[part, None]
        done = part.stop
