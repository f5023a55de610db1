"""Fetching chosen rows from the ssd tier: pages of a file, each once for all heads; single rows of a device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.csd import KvRows
from llmcache.kv.tiers.copying import Landing
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.pool import NOT_HERE
from llmcache.kv.tiers.ssd import SsdTier

Numbers = NDArray[np.int64]
Outs = list[NDArray[Any]]
ASKED_ROWS = 1 << 20
"""What a device is asked for at a time: the numbers of the rows must fit its desk."""


class Fetcher:
    """Fetches for one store."""

    def __init__(self, core: Core, mover: Mover, ssd: SsdTier) -> None:
        self._core, self._mover, self._ssd = core, mover, ssd

    def fetch(self, layer: int, missing: list[Numbers], positions: Numbers, outs: Outs) -> None:
        """Brings the rows that lie in the pages `missing` of each sequence to `outs`.

        `positions` [batch, kv_heads, k]; `outs`: keys and values [batch, kv_heads, k, dim].
        """
        if self._ssd.near_data:
            most = max(1, ASKED_ROWS // (self._core.shape.kv_heads * self._core.shape.page_tokens))
            for b, pages in enumerate(missing):
                for first in range(0, len(pages), most):
                    self._fetch_rows(layer, b, pages[first : first + most], positions[b], [out[b] for out in outs])
        else:
            numbers = [self._core.table.table[b, pages] for b, pages in enumerate(missing)]
            self._fetch_pages(layer, np.unique(np.concatenate(numbers)), positions, outs)

    def _fetch_pages(self, layer: int, numbers: Numbers, positions: Numbers, outs: Outs) -> None:
        """Reads pages; the threads that read them copy their rows, so that the disk does not wait meanwhile."""
        core = self._core
        # As it is now: while pages are read, another layer may get pages with numbers that are not known here.
        table = core.table.table
        for stream, found in self._mover.by_stream(numbers):
            known = np.full(core.table.numbers, NOT_HERE, np.int64)
            known[found] = np.arange(len(found))
            landing = Landing(known[table], positions, outs, core.shape.page_tokens)
            self._ssd.read_through(stream, layer, core.table.place[found].astype(np.int64), landing.take, "fetch")

    def _fetch_rows(self, layer: int, b: int, pages: Numbers, positions: Numbers, outs: Outs) -> None:
        size, own = self._core.shape.page_tokens, self._core.table.table[b]
        streams = self._core.table.stream[own]
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


def _lay_out(rows: KvRows, here: list[NDArray[np.bool_]], outs: Outs) -> None:
    """Puts rows, head after head, where `here` [k] of each head says; int8 becomes float32, times its scales."""
    done = 0
    for head, mask in enumerate(here):
        part = slice(done, done + int(mask.sum()))
        for out, side, scales in ((outs[0], rows.keys, rows.key_scales), (outs[1], rows.values, rows.value_scales)):
            out[head][mask] = side[part] if scales is None else side[part].astype(np.float32) * scales[part, None]
        done = part.stop
