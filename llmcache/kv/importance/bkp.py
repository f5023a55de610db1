"""Bidirectional KV cache pools (BKP): after each step, pages that have become important come up, as many others go down.

Source: hillinfer.txt, section 3.2, "Bidirectional KV Cache Pools", and equation 1. Differs from the paper: what moves
are pages, ranked by the hits of all their tokens and heads together, since a page is what the ssd holds; the ssd keeps
every page, so going down writes nothing; hits fade, so that the table tells a rate, as its name says; a page changes
places only with one that has less than half of its hits, since neighbours in rank would change places at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llmcache.arrays import Flags, Int64s
from llmcache.kv.importance.tables import HitTable
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore

HALF_LIFE_STEPS = 16
"""Steps after which a hit counts half. Measured on synthetic streams whose topics drift: without it the pool sticks to what
was hit long ago (3 to 9 points fewer of the chosen tokens are in it); at 8, more pages go up and down in vain."""
CLEARLY = 2
"""How many times the hits of another a page needs to take its place. It matters where the pool is smaller than 2 alpha."""


class Moves(NamedTuple):
    """Pages that are to come up, and those that go down for them, both int64."""

    up: Int64s
    down: Int64s


class BidirectionalPools:
    """Keeps a store's host pool as the hits say.

    `important`: the tokens alpha * N of a context of N. As many stay up because they are recent, and again as many because
    they are hit most. It becomes the store's `victims`, who make room when the window moves on.
    `enabled` False is the ablation without BKP: what this step found important comes up, what it found least so goes down.
    """

    def __init__(self, store: KvStore, important: Callable[[int], int], *, enabled: bool = True) -> None:
        self.store, self.enabled = store, enabled
        self.hits = HitTable(store.shape.layers, store.batch)
        self._important = important
        self._steps = [0] * store.shape.layers
        store.victims = self.victims

    def update(self, layer: int, positions: Int64s) -> None:
        """Counts what one step chose, `positions` [batch, kv_heads, k], and moves pages of `layer` accordingly."""
        self._steps[layer] += 1
        if not self.enabled:
            self.hits.crop(0, layer)
        elif self._steps[layer] % HALF_LIFE_STEPS == 0:
            self.hits.halve(layer)
        self.hits.record(layer, positions)
        if self.store.config.cpu_pages is None:
            return
        middle, important = self.store.middle, self._pages(self.store.length)
        recent, clearly = (important, CLEARLY) if self.enabled else (0, 1)
        for sequence in range(len(positions)):
            in_cpu = self.store.in_cpu(layer, sequence)[middle.start : middle.stop]
            ranks = self.hits.pages(layer, sequence, middle.stop, self.store.shape.page_tokens)[middle.start :]
            found = moves(in_cpu, ranks, important, self._room, recent, clearly)
            self.store.move_down(layer, sequence, found.down + middle.start)
            self.store.move_up(layer, sequence, found.up + middle.start)

    @property
    def _room(self) -> int:
        """Pages that the pool has for the middle."""
        config = self.store.config
        assert config.cpu_pages is not None, "only a bounded pool has anything to move"
        return config.cpu_pages - config.sink_pages - config.window_pages

    def _pages(self, length: int) -> int:
        return self.store.shape.pages_of(self._important(length))

    def victims(self, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        """Returns which `count` of `pages` (ascending) make room for new ones: the least hit, recent ones only if they must.

        Of equally many hits the earlier go. The signature is the store's `Victims`.
        """
        ranks = self.hits.pages(layer, sequence, int(pages[-1]) + 1, self.store.shape.page_tokens)[pages]
        if self.enabled:
            recent = min(self._pages(self.store.layer_length(layer)), self._room // 2)
            last = pages[-1] + 1 - recent
            ranks = np.where(pages >= last, np.iinfo(np.int64).max, ranks)
        return np.sort(pages[np.argsort(ranks, kind="stable")[:count]])


def moves(in_cpu: Flags, ranks: Int64s, important: int, room: int, recent: int, clearly: int = 1) -> Moves:
    """Returns which pages of a middle change places, by their number in it.

    `in_cpu` [pages]: those in the host's pool; `ranks` [pages]: their hits. `important`: how many of the most hit belong
    up; `recent`: how many of the last stay up whatever their hits, at most half of `room`, the pages the pool has for the
    middle. A page takes the place of one only if it has more than `clearly` times its hits. Of equal hits the later page
    ranks higher.
    """
    pages = np.arange(len(in_cpu))
    order = np.lexsort((-pages, -ranks))  # the most hit first
    pinned = np.zeros(len(pages), bool)
    pinned[len(pages) - min(recent, room // 2, len(pages)) :] = True
    best = order[: max(0, min(important, room - int(pinned.sum())))]
    wanted = best[~in_cpu[best] & (ranks[best] > 0)]
    pinned[best] = True
    spare = order[::-1][(in_cpu & ~pinned)[order[::-1]]]  # the least hit first
    # Over the bound: a page that sequences share came up for another of them.
    free, over = max(0, room - int(in_cpu.sum())), max(0, int(in_cpu.sum()) - room)
    pairs = max(0, min(len(wanted) - free, len(spare) - over))  # the best with the worst, and so on
    swapped = np.count_nonzero(ranks[wanted[free : free + pairs]] > clearly * ranks[spare[over : over + pairs]])
    return Moves(np.sort(wanted[: free + swapped]), np.sort(spare[: over + swapped]))


def cpu_pages_for(shape: KvShape, length: int, beta: float | None, memory_bytes: int | None, batch: int = 1) -> int:
    """Returns the host's share of the pages of a context of `length` tokens, per layer and sequence: M_c, below M_0.

    `beta`: M_c / M_s, best f_c / f_s, None for infinite (all in the host's memory); `memory_bytes`: M_0, what the host has
    for the pools of all layers and sequences, None for as much as it takes. ValueError names what is not positive.

    Source: hillinfer.txt, section 3.3, equation 1. Differs from the paper: where M_0 binds, that is the size (the paper
    only says that M_c is below it).
    """
    for name, value in (("length", length), ("beta", beta), ("memory_bytes", memory_bytes), ("batch", batch)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {value}, more than 0 is needed")
    pages = shape.pages_of(length)
    if beta is not None and math.isfinite(beta):
        pages = math.floor(pages * beta / (1 + beta))
    if memory_bytes is not None:
        pages = min(pages, memory_bytes // (shape.token_bytes * shape.page_tokens * shape.layers * batch))
    return pages
