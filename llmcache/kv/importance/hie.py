"""Hierarchical importance evaluation (HIE): host and device score what each of them has, and the scores are merged as
they come.

Source: hillinfer.txt, section 3.2 and Algorithm 1; its line numbers stand at the code.

Concurrency: `important` uses two threads. One, the evaluation's own, takes score blocks from the device, and is the only
one that uses the device; the caller's scores the pages of the host's pool. Both merge into the same lists, under one
lock, which is held for as long as a block takes. What they choose does not depend on who comes first: of equal scores
the earlier position wins. The caller returns, or raises, only when both are done, so the device is at rest then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.csd.wire import ScoreBlock, decode, encode
from llmcache.kv.kernels import RunningTop
from llmcache.kv.pipeline.timeline import CPU, DEVICE, EVALUATE, LINK, NO_TIMELINE, Timeline
from llmcache.kv.tiers import KvStore

Candidates = Sequence[Int64s] | None
HOST_TOKENS = 8192
"""Tokens that the host scores between two merges: its scores cross no link, so its blocks need not be small."""


class HierarchicalEvaluation:
    """Chooses the most important tokens of the middle, by head of every sequence, over both pools of a store.

    `block_tokens` (n): tokens of a score block. `combine`: as `kernels.score`. `parallel` False is the ablation without
    HIE: first the device, then the host (hillinfer.txt, figure 5 b).
    """

    def __init__(
        self,
        store: KvStore,
        block_tokens: int = 256,
        combine: str = "max",
        *,
        parallel: bool = True,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.store, self.block_tokens, self.combine, self.parallel = store, block_tokens, combine, parallel
        self.timeline = timeline
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llmcache-hie")

    def important(
        self, layer: int, queries: Floats, k: int, first: Int64s | None = None, pages: Candidates = None
    ) -> Int64s:
        """Returns the positions [batch, kv_heads, k] int64, ascending, of the `k` best tokens of the middle of each head.

        `queries` [batch, heads, dim] float32; `k` 0 .. tokens of the middle. `first` [batch]: tokens before it are
        padding, chosen only where there is nothing else. `pages`: for each sequence, the only pages that are looked at,
        ascending; None: the middle. Scores are rounded to halves, those of the host too, so that what is chosen does not
        depend on which pool a token is in.
        """
        batch, kv_heads = len(queries), self.store.shape.kv_heads
        if k == 0:
            return np.empty((batch, kv_heads, 0), np.int64)
        merged = _Merged(batch, kv_heads, k, np.zeros(batch, np.int64) if first is None else first)  # line 1
        if self.parallel:  # lines 3 to 13
            device = self._threads.submit(self._device, layer, queries, pages, merged)
            try:
                self._host(layer, queries, pages, merged)
            finally:
                device.result()
        else:
            self._device(layer, queries, pages, merged)
            self._host(layer, queries, pages, merged)
        with self._span(CPU, layer):
            return merged.result()  # lines 14 and 15; lines 16 and 17 are `KvStore.gather`

    def _device(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        """Lines 4 to 8 and 11: the device scores its tokens, block by block, and every block is merged when it comes."""
        # Where there is no device, the link is busy: the host reads the keys.
        near_data = self.store.config.ssd == "csd"
        with self._span(DEVICE if near_data else LINK, layer):
            for sequence, asked in enumerate(queries):
                wanted = None if pages is None else pages[sequence][~self.store.in_cpu(layer, sequence)[pages[sequence]]]
                for block in self.store.score_ssd(layer, sequence, asked, wanted, self.combine, self.block_tokens):
                    merged.add(sequence, block, near_data)

    def _host(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        """Line 10: the host scores the tokens of its own pool."""
        with self._span(CPU, layer):
            for sequence, asked in enumerate(queries):
                for share in self._shares(layer, sequence, pages):
                    scored, scores = self.store.score_cpu(layer, sequence, asked, share, self.combine)
                    merged.add_pages(sequence, scored, scores)

    def _shares(self, layer: int, sequence: int, pages: Candidates) -> list[Int64s]:
        """Pages that are to be scored and are in the host's pool, in shares of `HOST_TOKENS`."""
        middle = self.store.middle
        wanted = np.arange(middle.start, middle.stop) if pages is None else pages[sequence]
        here = wanted[self.store.in_cpu(layer, sequence)[wanted]]
        share = max(1, HOST_TOKENS // self.store.shape.page_tokens)
        return [here[at : at + share] for at in range(0, len(here), share)]

    def _span(self, resource: str, layer: int) -> AbstractContextManager[None]:
        return self.timeline.span(resource, EVALUATE, layer, self.store.step)


class _Merged:
    """The lists S_CPU: the best so far, of each head of each sequence."""

    def __init__(self, batch: int, kv_heads: int, k: int, first: Int64s) -> None:
        self._tops = [[RunningTop(k) for _ in range(kv_heads)] for _ in range(batch)]
        self._first = first
        self._lock = threading.Lock()

    def add(self, sequence: int, block: ScoreBlock, halves: bool = False) -> None:
        """Takes a block; `halves`: its scores are rounded already."""
        scores = block.scores if halves else as_halves(block.scores)
        if len(scores) and block.positions[0] < self._first[sequence]:
            scores[block.positions < self._first[sequence]] = -np.inf
        with self._lock:
            self._tops[sequence][block.head].add(block.positions, scores)

    def add_pages(self, sequence: int, pages: Int64s, scores: Floats) -> None:
        """Takes scores [kv_heads, pages * page_tokens] of whole pages."""
        tokens = scores.shape[1] // len(pages)
        positions = (pages[:, None] * tokens + np.arange(tokens)).reshape(-1)
        for head, own in enumerate(scores):
            self.add(sequence, ScoreBlock(head, positions, own))

    def result(self) -> Int64s:
        return np.array([[top.result()[0] for top in tops] for tops in self._tops], np.int64)


def as_halves(scores: Floats) -> Floats:
    """Returns `scores` [tokens] rounded to what a score block carries: the nearest half, the largest for what is larger."""
    pairs = np.empty((len(scores), 2), np.uint16)
    encode(np.ascontiguousarray(scores), pairs)
    return decode(0, 0, pairs).scores
