"""Gathering through a FastTier: pages that attention used lately are not sent to it again."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.tiers.config import Gathered, Selection
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.fast import FastTier
from llmcache.kv.tiers.gathering import Gatherer
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.pool import NOT_HERE

Numbers = NDArray[np.int64]


class FastGatherer:
    """Gathers for one store, and tells the tiers it has served of pages that are no more."""

    def __init__(self, core: Core, gatherer: Gatherer, mover: Mover | None) -> None:
        self._core, self._gatherer, self._mover = core, gatherer, mover
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()

    def drop(self, numbers: Numbers) -> None:
        """Has all tiers forget pages."""
        if len(numbers):
            for fast in list(self._served):
                fast.drop(numbers)

    def gather(self, layer: int, selection: Selection, fast: FastTier) -> Gathered:
        """Returns all that a layer attends to now, from `fast`."""
        core, size = self._core, self._core.shape.page_tokens
        self._served.add(fast)
        core.checked(layer)
        positions = self._gatherer.positions(layer, selection)
        pages = positions // size
        numbers = np.stack([row[of_row] for row, of_row in zip(core.table.table, pages, strict=True)])
        used = np.unique(numbers)
        # A page that is being filled is another at every step.
        full = int(core.lengths[layer]) // size
        filling = np.isin(used, core.table.table[:, full:])
        there = np.zeros(len(used), np.bool_)
        there[~filling] = fast.have(layer, used[~filling])
        self._count_hits(layer, selection, used[there])
        self._send(layer, used[~there], fast)
        keys, values = fast.rows(layer, numbers, positions % size)
        fast.drop(used[filling])
        return Gathered(keys, values, positions)

    def _count_hits(self, layer: int, selection: Selection, there: Numbers) -> None:
        core = self._core
        pages = selection.positions // core.shape.page_tokens
        numbers = np.stack([row[of_row] for row, of_row in zip(core.table.table, pages, strict=True)])
        on_gpu = np.isin(numbers, there)
        in_cpu = core.pools[layer].slot_of[numbers] != NOT_HERE
        cpu = int((in_cpu & ~on_gpu).sum())
        core.traffic.add_hits(gpu=int(on_gpu.sum()), cpu=cpu, ssd=numbers.size - cpu - int(on_gpu.sum()))

    def _send(self, layer: int, numbers: Numbers, fast: FastTier) -> None:
        pool = self._core.pools[layer]
        with pool.lock:
            here = pool.slot_of[numbers] != NOT_HERE
            slots = pool.slot_of[numbers[here]]
            held = pool.take(slots)
        self._put(layer, numbers[here], held, fast)
        if self._mover is not None:
            for found, arrays in self._mover.read(layer, numbers[~here], "fetch"):
                self._put(layer, found, arrays, fast)

    def _put(self, layer: int, numbers: Numbers, arrays: list[NDArray[Any]], fast: FastTier) -> None:
        if not len(numbers):
            return
        keys, values = arrays[:2]
        if len(arrays) > 2:
            with np.errstate(all="ignore"):  # behind the last token of a page that is being filled there is anything
                keys, values = (arrays[side].astype(np.float32) * arrays[side + 2][..., None] for side in (0, 1))
        fast.put(layer, numbers, keys, values)
        self._core.traffic.add("cpu", "gpu", "attend", keys.nbytes + values.nbytes)
