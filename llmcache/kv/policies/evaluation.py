"""Hierarchical importance evaluation (HIE): host and device each score their tokens, and scores are merged as they arrive.

Source: hillinfer.txt, section 3.2 and Algorithm 1; comments refer to its lines.

Concurrency: `important` uses two threads. Its own thread receives score blocks from the device, which only it uses; the
caller's thread scores the pages of the host's pool. Both merge into the same lists under a lock, which is held for one block
at a time. The result does not depend on their order: of equal scores, the earlier position wins. The caller returns, or
raises, only when both are done, so that the device is idle.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.kernels import RunningTop
from llmcache.kv.pipeline.timeline import CPU, DEVICE, EVALUATE, LINK
from llmcache.kv.policies.base import KvPolicy
from llmcache.papers.csd.wire import decode, encode

Candidates = Sequence[Int64s] | None
HOST_TOKENS = 8192
"""Tokens that the host scores between two merges; no link limits the size of these blocks."""


class HierarchicalEvaluation:
    """Chooses the most important tokens of the middle for `policy`, for each head of every sequence, over both pools.

    `parallel` False is the ablation without HIE: first the device, then the host (hillinfer.txt, figure 5 b).
    """

    def __init__(self, policy: KvPolicy, *, parallel: bool) -> None:
        self.policy, self.store, self.parallel = policy, policy.store, parallel
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llmcache-hie")

    def important(self, layer: int, queries: Floats, k: int, pages: Candidates = None) -> Int64s:
        """Return the positions [batch, kv_heads, k] int64, ascending, of the `k` best tokens of the middle for each head.

        `queries` [batch, heads, dim] float32; `k` from 1 to the tokens of the middle. `pages`: for each sequence, the only
        pages to score, ascending; None for the middle. Padding is chosen only if there are no other tokens. All scores are
        rounded to fp16, so that the choice does not depend on the pool of a token.
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
        """Lines 4 to 8 and 11: the device scores its tokens, and each block is merged when it arrives."""
        # Without a device, the link is busy, because the host reads the keys.
        near_data, knobs = self.store.config.ssd == "csd", self.policy.settings
        with self._span(DEVICE if near_data else LINK, layer):
            for sequence, of_sequence in enumerate(queries):
                wanted = None if pages is None else pages[sequence][~self.store.in_cpu(layer, sequence)[pages[sequence]]]
                scored = self.store.score_ssd(layer, sequence, of_sequence, wanted, knobs.combine, knobs.score_block_tokens)
                for block in scored:
                    merged.add(sequence, block.head, block.positions, block.scores if near_data else _halves(block.scores))

    def _host(self, layer: int, queries: Floats, pages: Candidates, merged: _Merged) -> None:
        """Line 10: the host scores the tokens of its own pool, `HOST_TOKENS` at a time."""
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
    """The lists S_CPU: the best tokens of each head of each sequence."""

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
    """Return `scores` rounded as in a score block: to the nearest fp16 number, clamped to its range."""
    pairs = np.empty((len(scores), 2), np.uint16)
    encode(np.ascontiguousarray(scores), pairs)
    return decode(0, 0, pairs).scores
