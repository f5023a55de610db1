"""HillInfer: importance is evaluated where the keys are, and pages come up that are hit again and again.

Bidirectional KV cache pools (BKP): after each step, pages that have become important come up, as many others go down.
Source: hillinfer.txt, section 3.2, "Bidirectional KV Cache Pools", and equation 1. Differs from the paper: what moves
are pages, ranked by the hits of all their tokens and heads together, since a page is what the ssd holds; the ssd keeps
every page, so going down writes nothing; hits fade, so that the table tells a rate, as its name says; a page changes
places only with one that has less than half of its hits, since neighbours in rank would change places at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.policies.base import KvPolicy, PolicySettings, TokenTable
from llmcache.kv.policies.evaluation import HierarchicalEvaluation
from llmcache.kv.tiers import Selection

MOST = np.iinfo(np.uint16).max
"""Hits of a token: what two bytes hold."""
HALF_LIFE_STEPS = 16
"""Steps after which a hit counts half. Measured on synthetic streams whose topics drift: without it the pool sticks to what
was hit long ago (3 to 9 points fewer of the chosen tokens are in it); at 8, more pages go up and down in vain."""
CLEARLY = 2
"""How many times the hits of another a page needs to take its place. It matters where the pool is smaller than 2 alpha."""


@dataclass(frozen=True)
class HillInferSettings(PolicySettings):
    """Settings of HillInfer; n is `score_block_tokens`. How large the host's pool is says the store (`cpu_pages`).

    `hie`, `bkp`: each design can be left out, for ablation; the third, APP, is the engine's. Without BKP what this step
    found important comes up, what it found least so goes down.
    """

    hie: bool = True
    bkp: bool = True


class HillInfer(KvPolicy):
    """Hierarchical importance evaluation (HIE) and bidirectional pools (BKP), over a computational SSD, *emulated* here.

        select:    device and host score their tokens at the same time; score blocks are merged as they come
                   the alpha * N best of each key head are attended to
        attended:  hits are counted; the most hit pages come up, the least hit go down for them
                   alpha * N tokens stay up because they are recent, and as many because they are hit most

    The third design, the adaptive prefetch-based pipeline (APP), is the engine's: see `llmcache.kv.pipeline`.

    Source: hillinfer.txt, sections 3.2 and 3.3, Algorithm 1. Differs from the paper: see above, and `evaluation`.
    What is chosen depends on none of the switches, nor on which pool a token is in.
    """

    name = "hillinfer"
    title = "HillInfer"
    ssd = "csd"
    ahead = True
    settings_class = HillInferSettings
    settings: HillInferSettings

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        self._evaluation = HierarchicalEvaluation(self, parallel=self.settings.hie)
        self.hits = HitTable(self.store.shape.layers, self.store.batch)
        self.remembered.append(self.hits)
        self._steps = [0] * self.store.shape.layers
        self.store.victims = self.victims

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens with the largest products of key and query, as Algorithm 1 finds them."""
        return Selection(self._evaluation.important(layer, queries, tokens))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Counts what was chosen, and moves pages between the pools; `weights` are not looked at."""
        self._steps[layer] += 1
        if not self.settings.bkp:
            self.hits.fade(layer, 16)
        elif self._steps[layer] % HALF_LIFE_STEPS == 0:
            self.hits.fade(layer)
        self.hits.record(layer, selection.positions)
        if self.store.config.cpu_pages is None:
            return
        middle, important = self.store.middle, self._important_pages(self.store.length)
        recent, clearly = (important, CLEARLY) if self.settings.bkp else (0, 1)
        for sequence in range(len(selection.positions)):
            in_cpu = self.store.in_cpu(layer, sequence)[middle.start : middle.stop]
            ranks = self.hits.pages(layer, sequence, middle.stop, self.page_tokens)[middle.start :]
            up, down = moves(in_cpu, ranks, important, self._room, recent, clearly)
            self.store.move_down(layer, sequence, down + middle.start)
            self.store.move_up(layer, sequence, up + middle.start)

    @property
    def _room(self) -> int:
        """Pages that the pool has for the middle."""
        config = self.store.config
        assert config.cpu_pages is not None, "only a bounded pool moves pages"
        return config.cpu_pages - config.sink_pages - config.window_pages

    def _important_pages(self, length: int) -> int:
        return self.store.shape.pages_of(self.settings.attended(length))

    def victims(self, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        """Returns which `count` of `pages` (ascending) make room for new ones: the least hit, recent ones only if they must.

        Of equally many hits the earlier go. The signature is the store's `Victims`.
        """
        ranks = self.hits.pages(layer, sequence, int(pages[-1]) + 1, self.page_tokens)[pages]
        if self.settings.bkp:
            recent = min(self._important_pages(self.store.layer_length(layer)), self._room // 2)
            ranks = np.where(pages > pages[-1] - recent, np.iinfo(np.int64).max, ranks)
        return np.sort(pages[np.argsort(ranks, kind="stable")[:count]])


def moves(in_cpu: Flags, ranks: Int64s, important: int, room: int, recent: int, clearly: int = 1) -> tuple[Int64s, Int64s]:
    """Returns which pages of a middle come up, and which go down for them, by their number in it.

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
    return np.sort(wanted[: free + swapped]), np.sort(spare[: over + swapped])


class HitTable(TokenTable[np.uint16]):
    """Hits of all tokens of `layers` layers and `batch` sequences; a token is hit once for each key head that chose it.

    Source: hillinfer.txt, section 3.2, "Bidirectional KV Cache Pools" (a table of the cache hit rate) and 4.4 ("2N bytes").
    Differs from the paper, which does not say what two bytes do when they are full: all counts of a layer and sequence are
    halved before the largest could overflow, so that their order is kept and old hits fade.
    """

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__(layers, batch, (), np.uint16)

    def record(self, layer: int, positions: Int64s) -> None:
        """Counts the tokens that one step chose: `positions` [batch, kv_heads, k] int64."""
        if not positions.size:
            return
        tokens = int(positions.max()) + 1
        for sequence, chosen in enumerate(positions):
            counts = self.rows(layer, sequence, tokens)
            while not _add(counts, np.ascontiguousarray(chosen).reshape(-1), MOST):
                self._tables[layer][sequence] >>= 1

    def fade(self, layer: int, bits: int = 1) -> None:
        """Halves all counts of a layer `bits` times: hits so far count half as much as those to come; 16: nothing."""
        for counts in self._tables[layer]:
            counts >>= bits

    def pages(self, layer: int, sequence: int, pages: int, page_tokens: int) -> Int64s:
        """Returns the hits [pages] int64 of whole pages: the sum over their tokens."""
        counts = self.rows(layer, sequence, pages * page_tokens)
        found: Int64s = counts.reshape(pages, page_tokens).sum(axis=1, dtype=np.int64)
        return found


@njit(nogil=True, cache=True)
def _add(counts, chosen, most):  # type: ignore[no-untyped-def]
    """Adds 1 for each of `chosen`, a token as often as it is in it; False, and nothing added, if one would overflow."""
    for i in range(chosen.size):
        if counts[chosen[i]] >= most:
            for j in range(i):
                counts[chosen[j]] -= np.uint16(1)
            return False
        counts[chosen[i]] += np.uint16(1)
    return True
