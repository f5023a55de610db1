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
from llmcache.kv.csd.wire import decode, encode
from llmcache.kv.kernels import RunningTop
from llmcache.kv.pipeline.timeline import CPU, DEVICE, EVALUATE, LINK
from llmcache.kv.policies.base import KvPolicy

Candidates = Sequence[Int64s] | None
HOST_TOKENS = 8192
"""Tokens that the host scores between two merges: its scores cross no link, so its blocks need not be small."""


class HierarchicalEvaluation:
    """Chooses the most important tokens of the middle for `policy`, by head of every sequence, over both pools of its store.

    `parallel` False is the ablation without HIE: first the device, then the host (hillinfer.txt, figure 5 b).
    """

    def __init__(self, policy: KvPolicy, *, parallel: bool) -> None:
        self.policy, self.store, self.parallel = policy, policy.store, parallel
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llmcache-hie")

    def important(self, layer: int, queries: Floats, k: int, pages: Candidates = None) -> Int64s:
        """Returns the positions [batch, kv_heads, k] int64, ascending, of the `k` best tokens of the middle of each head.

        `queries` [batch, heads, dim] float32; `k` 1 .. tokens of the middle. `pages`: for each sequence, the only pages
        that are looked at, ascending; None: the middle. Padding is chosen only where there is nothing else. Scores are
        rounded to halves, those of the host too, so that what is chosen does not depend on which pool a token is in.
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
        """Lines 4 to 8 and 11: the device scores its tokens, block by block, and every block is merged when it comes."""
        # Where there is no device, the link is busy: the host reads the keys.
        near_data, asked = self.store.config.ssd == "csd", self.policy.settings
        with self._span(DEVICE if near_data else LINK, layer):
            for sequence, of_sequence in enumerate(queries):
                wanted = None if pages is None else pages[sequence][~self.store.in_cpu(layer, sequence)[pages[sequence]]]
                scored = self.store.score_ssd(layer, sequence, of_sequence, wanted, asked.combine, asked.score_block_tokens)
                for block in scored:
                    merged.add(sequence, block.head, block.positions, block.scores if near_data else _halves(block.scores))

    def _host(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        """Line 10: the host scores the tokens of its own pool, `HOST_TOKENS` at a time."""
        size, middle = self.store.shape.page_tokens, self.store.middle
        step = max(1, HOST_TOKENS // size)
        with self._span(CPU, layer):
            for sequence, asked in enumerate(queries):
                wanted = np.arange(middle.start, middle.stop) if pages is None else pages[sequence]
                here = wanted[self.store.in_cpu(layer, sequence)[wanted]]
                for at in range(0, len(here), step):
                    share = here[at : at + step]
                    scored, scores = self.store.score_cpu(layer, sequence, asked, share, self.policy.settings.combine)
                    positions = (scored[:, None] * size + np.arange(size)).reshape(-1)
                    for head, own in enumerate(scores):
                        merged.add(sequence, head, positions, _halves(own))

    def _span(self, resource: str, layer: int) -> AbstractContextManager[None]:
        return self.policy.timeline.span(resource, EVALUATE, layer, self.store.step)


class _Merged:
    """The lists S_CPU: the best so far, of each head of each sequence."""

    def __init__(self, policy: KvPolicy, k: int) -> None:
        self.tops = [[RunningTop(k) for _ in range(policy.kv_heads)] for _ in range(policy.store.batch)]
        self._first, self._lock = policy.first, threading.Lock()

    def add(self, sequence: int, head: int, positions: Int64s, scores: Floats) -> None:
        """Takes scores, which it may overwrite, of tokens at ascending `positions`."""
        if len(scores) and positions[0] < self._first[sequence]:
            scores[positions < self._first[sequence]] = -np.inf
        with self._lock:
            self.tops[sequence][head].add(positions, scores)


def _halves(scores: Floats) -> Floats:
    """`scores` rounded to what a score block carries: the nearest half, the largest for what is larger."""
    pairs = np.empty((len(scores), 2), np.uint16)
    encode(np.ascontiguousarray(scores), pairs)
    return decode(0, 0, pairs).scores
