"""HillInfer: importance is evaluated where the keys are, and frequently hit pages move up.

Hierarchical importance evaluation (HIE), hillinfer.txt, section 3.2 and Algorithm 1, whose lines the comments name: one
thread receives score blocks from the device, and the caller's thread scores the host's pool. Both merge into the same
lists under a lock, held for one block at a time. The result does not depend on their order. The caller returns, or
raises, only when both are done, so that the device is idle.

Bidirectional KV cache pools (BKP), section 3.2 and equation 1. Differs from the paper: the ssd tier stores every page,
so a move down writes nothing; hits decay; and a page replaces only one with less than half of its hits, because pages
of similar rank would swap in each step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numba import njit

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.kernels import RunningTop
from llmcache.kv.pipeline.timeline import CPU, DEVICE, EVALUATE, LINK
from llmcache.kv.policies.base import KvPolicy, PolicySettings, TokenTable
from llmcache.kv.tiers import Selection
from llmcache.papers.csd.wire import decode, encode

Candidates = Sequence[Int64s] | None
HOST_TOKENS = 8192  # tokens that the host scores between two merges; no link limits the size of these blocks


class HierarchicalEvaluation:
    """Chooses the most important tokens of the middle for each head of every sequence, over both pools.

    `parallel` False is the ablation without HIE: first the device, then the host (hillinfer.txt, figure 5 b).
    """

    def __init__(self, policy: KvPolicy, *, parallel: bool) -> None:
        self.policy, self.store, self.parallel = policy, policy.store, parallel
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llmcache-hie")

    def important(self, layer: int, queries: Floats, k: int, pages: Candidates = None) -> Int64s:
        """Return the positions [batch, kv_heads, k] int64, ascending, of the `k` best tokens of the middle for each head.

        `queries` [batch, heads, dim] float32. `pages`: for each sequence, the only pages to score, ascending; None for the
        middle. Padding is chosen only if there are no other tokens. Scores are rounded to fp16 in both pools.
        """
        merged = _Merged(self.policy, k)  # line 1
        if self.parallel:  # lines 3 to 13
            device = self._threads.submit(self._device, layer, queries, pages, merged)
            try:
                self._host(layer, queries, pages, merged)
            finally:
                device.result()
        else:
            self._device(layer, queries, pages, merged)
            self._host(layer, queries, pages, merged)
        with self._span(CPU, layer):  # lines 14 and 15; lines 16 and 17 are `KvStore.gather`
            return np.array([[top.result() for top in tops] for tops in merged.tops], np.int64)

    def _device(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        # Without a device, the link is busy, because the host reads the keys.
        near_data, knobs = self.store.config.ssd == "csd", self.policy.settings
        with self._span(DEVICE if near_data else LINK, layer):
            for sequence, of_sequence in enumerate(queries):
                wanted = None if pages is None else pages[sequence][~self.store.in_cpu(layer, sequence)[pages[sequence]]]
                scored = self.store.score_ssd(layer, sequence, of_sequence, wanted, knobs.combine, knobs.score_block_tokens)
                for block in scored:
                    merged.add(sequence, block.head, block.positions, block.scores if near_data else _halves(block.scores))

    def _host(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        size, middle = self.store.shape.page_tokens, self.store.middle
        step = max(1, HOST_TOKENS // size)
        with self._span(CPU, layer):
            for sequence, of_sequence in enumerate(queries):
                wanted = np.arange(middle.start, middle.stop) if pages is None else pages[sequence]
                resident = wanted[self.store.in_cpu(layer, sequence)[wanted]]
                for at in range(0, len(resident), step):
                    share = resident[at : at + step]
                    scored, scores = self.store.score_cpu(layer, sequence, of_sequence, share, self.policy.settings.combine)
                    positions = (scored[:, None] * size + np.arange(size)).reshape(-1)
                    for head, own in enumerate(scores):
                        merged.add(sequence, head, positions, _halves(own))

    def _span(self, resource: str, layer: int) -> AbstractContextManager[None]:
        return self.policy.timeline.span(resource, EVALUATE, layer, self.store.step)


class _Merged:
    def __init__(self, policy: KvPolicy, k: int) -> None:
        self.tops = [[RunningTop(k) for _ in range(policy.kv_heads)] for _ in range(policy.store.batch)]
        self._first, self._lock = policy.first, threading.Lock()

    def add(self, sequence: int, head: int, positions: Int64s, scores: Floats) -> None:
        """Add scores, which may be overwritten, of tokens at ascending `positions`."""
        if len(scores) and positions[0] < self._first[sequence]:
            scores[positions < self._first[sequence]] = -np.inf
        with self._lock:
            self.tops[sequence][head].add(positions, scores)


def _halves(scores: Floats) -> Floats:
    pairs = np.empty((len(scores), 2), np.uint16)
    encode(np.ascontiguousarray(scores), pairs)
    return decode(0, 0, pairs).scores


MOST = np.iinfo(np.uint16).max  # largest count of a token, in two bytes
HALF_LIFE_STEPS = 16
"""Steps after which a hit counts half. Measured on synthetic streams with drifting topics: without decay, the pool keeps
outdated pages (it has 3 to 9 percentage points fewer of the chosen tokens); with 8, more moves are in vain."""
CLEARLY = 2
"""Factor by which a page's hits must exceed those of a page it replaces; relevant if the pool is smaller than 2 alpha."""


@dataclass(frozen=True)
class HillInferSettings(PolicySettings):
    """Settings of HillInfer; n is `score_block_tokens`. The store sets the size of the host's pool (`cpu_pages`).

    `hie`, `bkp`: enable each design, for ablation. Without BKP, the important pages of a step move up, and the least
    important move down.
    """

    hie: bool = True
    bkp: bool = True


class HillInfer(KvPolicy):
    """Hierarchical importance evaluation (HIE) and bidirectional pools (BKP) over a computational SSD, *emulated* here.

        select:    the alpha * N best tokens of each key head, scored concurrently by device and host
        attended:  hits are counted; pages with the most hits move up, those with the fewest move down
                   alpha * N tokens stay up because they are recent, and as many because they have the most hits

    The third design, the adaptive prefetch-based pipeline (APP), is in `llmcache.kv.pipeline`.

    Source: hillinfer.txt, sections 3.2 and 3.3, Algorithm 1; the module lists the differences.
    """

    name = "hillinfer"
    title = "HillInfer"
    ssd = "csd"
    ahead = True
    settings_class = HillInferSettings
    settings: HillInferSettings

    def begin(self) -> None:
        self._evaluation = HierarchicalEvaluation(self, parallel=self.settings.hie)
        self.hits = HitTable(self.store.shape.layers, self.store.batch)
        self.remembered.append(self.hits)
        self._steps = [0] * self.store.shape.layers
        self.store.victims = self.victims

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        return Selection(self._evaluation.important(layer, queries, tokens))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
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
        config = self.store.config
        assert config.cpu_pages is not None, "only a bounded pool moves pages"
        return config.cpu_pages - config.sink_pages - config.window_pages

    def _important_pages(self, length: int) -> int:
        return self.store.shape.pages_of(self.settings.attended(length))

    def victims(self, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        ranks = self.hits.pages(layer, sequence, int(pages[-1]) + 1, self.page_tokens)[pages]
        if self.settings.bkp:
            recent = min(self._important_pages(self.store.layer_length(layer)), self._room // 2)
            ranks = np.where(pages > pages[-1] - recent, np.iinfo(np.int64).max, ranks)
        return np.sort(pages[np.argsort(ranks, kind="stable")[:count]])


def moves(in_cpu: Flags, ranks: Int64s, important: int, room: int, recent: int, clearly: int = 1) -> tuple[Int64s, Int64s]:
    """Return the pages of a middle to move up and those to move down, by their index in it.

    `in_cpu` [pages]: the pages in the host's pool; `ranks` [pages]: their hits. `important`: number of pages with the most
    hits that belong in the pool; `recent`: number of the last pages, which stay, at most half of `room`, the pool's pages
    for the middle. A page replaces another only with more than `clearly` times its hits.
    """
    pages = np.arange(len(in_cpu))
    order = np.lexsort((-pages, -ranks))  # most hits first
    pinned = np.zeros(len(pages), bool)
    pinned[len(pages) - min(recent, room // 2, len(pages)) :] = True
    best = order[: max(0, min(important, room - int(pinned.sum())))]
    wanted = best[~in_cpu[best] & (ranks[best] > 0)]
    pinned[best] = True
    spare = order[::-1][(in_cpu & ~pinned)[order[::-1]]]  # fewest hits first
    # The pool may exceed its limit, because a shared page moved up for another sequence.
    free, over = max(0, room - int(in_cpu.sum())), max(0, int(in_cpu.sum()) - room)
    pairs = max(0, min(len(wanted) - free, len(spare) - over))  # the best replaces the worst, and so on
    swapped = np.count_nonzero(ranks[wanted[free : free + pairs]] > clearly * ranks[spare[over : over + pairs]])
    return np.sort(wanted[: free + swapped]), np.sort(spare[: over + swapped])


class HitTable(TokenTable[np.uint16]):
    """Hits of all tokens: one for each key head that chose the token.

    Source: hillinfer.txt, section 3.2 (a table of the cache hit rate) and 4.4 ("2N bytes"). Before an overflow, which the
    paper does not define, all counts of a layer and sequence are halved.
    """

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__(layers, batch, (), np.uint16)

    def record(self, layer: int, positions: Int64s) -> None:
        """Count the chosen tokens `positions` [batch, kv_heads, k] int64 of a step."""
        if not positions.size:
            return
        tokens = int(positions.max()) + 1
        for sequence, chosen in enumerate(positions):
            counts = self.rows(layer, sequence, tokens)
            while not _add(counts, np.ascontiguousarray(chosen).reshape(-1), MOST):
                self._tables[layer][sequence] >>= 1

    def fade(self, layer: int, bits: int = 1) -> None:
        """Halve all counts of a layer `bits` times; 16 clears them."""
        for counts in self._tables[layer]:
            counts >>= bits

    def pages(self, layer: int, sequence: int, pages: int, page_tokens: int) -> Int64s:
        counts = self.rows(layer, sequence, pages * page_tokens)
        found: Int64s = counts.reshape(pages, page_tokens).sum(axis=1, dtype=np.int64)
        return found


@njit(nogil=True, cache=True)
def _add(counts, chosen, most):  # type: ignore[no-untyped-def]
    for i in range(chosen.size):
        if counts[chosen[i]] >= most:
            for j in range(i):
                counts[chosen[j]] -= np.uint16(1)
            return False
        counts[chosen[i]] += np.uint16(1)
    return True
