"""Fetching chosen rows from the ssd tier: pages of a file, each once for all heads; single rows of a device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.csd import KvRows
from llmcache.kv.spill import KvPages
from llmcache.kv.tiers.copying import Rows, copy_rows, mark_missing
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.pool import NOT_HERE
from llmcache.kv.tiers.ssd import SsdTier

Numbers = NDArray[np.int64]
Outs = list[NDArray[Any]]
SHARE_BYTES = 1 << 24
"""What is read at a time: enough for many reads at once, and little enough to copy most of it while more is read."""


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
        """Reads pages a share at a time, and copies the rows of one while a thread reads the next."""
        shape = self._core.shape
        most = max(1, SHARE_BYTES // (shape.key_slot_bytes + shape.value_slot_bytes))
        todo = [
            (stream, found[first : first + most])
            for stream, found in self._mover.by_stream(numbers)
            for first in range(0, len(found), most)
        ]
        if len(todo) == 1:
            with self._read(layer, *todo[0]) as pages:
                self._copy(todo[0][1], pages, positions, outs)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="llmcache-fetch") as reader:
            ahead = reader.submit(_entered, self._read(layer, *todo[0]))
            for index, (_, found) in enumerate(todo):
                with ahead.result() as pages:
                    if index + 1 < len(todo):
                        ahead = reader.submit(_entered, self._read(layer, *todo[index + 1]))
                    self._copy(found, pages, positions, outs)

    def _read(self, layer: int, stream: int, found: Numbers) -> AbstractContextManager[KvPages]:
        return self._ssd.read(stream, layer, self._core.table.place[found].astype(np.int64), "fetch")

    def _copy(self, found: Numbers, pages: KvPages, positions: Numbers, outs: Outs) -> None:
        """Copies the rows that lie in `pages`, which have the numbers `found`."""
        core, size = self._core, self._core.shape.page_tokens
        known = np.full(core.table.numbers, NOT_HERE, np.int64)
        known[found] = np.arange(len(found))
        for b, index in enumerate(known[core.table.table]):
            here = np.flatnonzero(index != NOT_HERE)
            tokens = range(int(here[0]) * size, (int(here[-1]) + 1) * size) if len(here) else range(0)
            sides = (Rows(pages.keys, pages.key_scales), Rows(pages.values, pages.value_scales))
            for rows, out in zip(sides, outs, strict=True):
                copy_rows(rows, index, positions[b], out[b], tokens)

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


def _entered(context: AbstractContextManager[KvPages]) -> AbstractContextManager[KvPages]:
    """Enters `context` here, in the thread that reads; who enters what it returns leaves it."""
    stack = ExitStack()
    pages = stack.enter_context(context)

    @contextmanager
    def rest() -> Iterator[KvPages]:
        with stack:
            yield pages

    return rest()


def _lay_out(rows: KvRows, here: list[NDArray[np.bool_]], outs: Outs) -> None:
    """Puts rows, head after head, where `here` [k] of each head says; int8 becomes float32, times its scales."""
    done = 0
    for head, mask in enumerate(here):
        part = slice(done, done + int(mask.sum()))
        for out, side, scales in ((outs[0], rows.keys, rows.key_scales), (outs[1], rows.values, rows.value_scales)):
            out[head][mask] = side[part] if scales is None else side[part].astype(np.float32) * scales[part, None]
        done = part.stop
