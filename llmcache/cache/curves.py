"""LRU hits at every cache size from one pass over a trace, by Mattson's stack distances (Mattson et al., 1970).

The distance of a block is the number of distinct blocks referenced since its last reference, itself included. LRU hits it in
every cache of at least that many blocks.

Each block reference is a "moment", whose bit is set while its block has not been referenced since. A distance is the number
of set bits from a block's last moment on, which a Fenwick tree counts. Used-up moments are renumbered, so memory is
proportional to the footprint. Consecutive blocks whose last references were consecutive too share one lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Doubles, Flags, Int64s, Uint64s
from llmcache.cache.policies.base import F, lean_kernel, subroutine

WORD = 64
BUCKET_WORDS = 8
BUCKET = WORD * BUCKET_WORDS
BUCKET_SHIFT = 9  # 2**9 moments
MOMENTS_PER_BLOCK = 4  # one bit each: with more, renumbering is rarer, but fewer fit into the CPU's cache
NOW, LIVE = 0, 1  # indices into the kernel's state

Moments = NDArray[np.signedinteger[Any]]


def inlined(function: F) -> F:
    """Inline `function` into its callers, because passing seven words per array would cost more than the function."""
    compiled: F = numba.njit(inline="always")(function)
    return compiled


@dataclass(frozen=True)
class Curve:
    """Hits of one policy at many cache sizes (blocks, ascending); all arrays are int64."""

    policy: str
    sizes: Int64s
    hits: Int64s  # blocks found in the cache, reads and writes
    read_hits: Int64s
    accesses: int
    reads: int

    def hit_ratio(self) -> Doubles:
        return self.hits / self.accesses

    def miss_ratio(self) -> Doubles:
        return 1 - self.hits / self.accesses

    def thinned(self, points: int) -> Curve:
        """Return at most `points` exact points of the curve, both ends included."""
        if len(self.sizes) <= points:
            return self
        kept = np.unique(np.linspace(0, len(self.sizes) - 1, points).astype(np.int64))
        return replace(self, sizes=self.sizes[kept], hits=self.hits[kept], read_hits=self.read_hits[kept])


class StackDistances:
    """Counts LRU stack distances of block ids 0 .. `blocks` - 1; `feed` continues after the last call."""

    def __init__(self, blocks: int) -> None:
        buckets = -(-MOMENTS_PER_BLOCK * blocks // BUCKET) + 1
        moments = buckets * BUCKET
        self._stack = Stack(
            last=np.full(blocks, -1, np.int32 if moments < 2**31 else np.int64),
            bits=np.zeros(buckets * BUCKET_WORDS, np.uint64),
            tree=np.zeros(buckets + 1, np.int64),
            ranks=np.zeros(buckets * BUCKET_WORDS, np.int64),
            state=np.zeros(2, np.int64),
            histogram=np.zeros((2, blocks + 1), np.int64),
        )
        self._totals = [0, 0]

    def feed(self, first: Int64s, count: Int64s, reads: Flags) -> None:
        """Process runs (ids first[i] .. first[i] + count[i] - 1); `reads[i]` is False for writes."""
        _feed(self._stack, np.ascontiguousarray(first), np.ascontiguousarray(count), reads)
        self._totals[1] += int(count[reads].sum())
        self._totals[0] += int(count[~reads].sum())

    def curve(self) -> Curve:
        footprint = int(self._stack.state[LIVE])
        hits = np.cumsum(self._stack.histogram[:, : footprint + 1], axis=1)
        sizes = np.arange(footprint + 1, dtype=np.int64)
        return Curve("lru", sizes, hits[0] + hits[1], hits[1], sum(self._totals), self._totals[1])


class Stack(NamedTuple):
    """State of the kernel: the last moment of each block (-1 for none), a bit for each moment, and the tree over them.

    `histogram`: hits by kind (writes, reads) and distance; `state`: NOW and LIVE.
    """

    last: Moments
    bits: Uint64s
    tree: Int64s
    ranks: Int64s
    state: Int64s
    histogram: Int64s


@lean_kernel
def _feed(stack: Stack, first: Int64s, count: Int64s, reads: Flags) -> None:
    last, bits, tree, ranks, state, histogram = stack
    moments = len(bits) * WORD
    now, live = state[NOW], state[LIVE]
    for run in range(len(first)):
        if now + count[run] > moments:
            _renumber(last, bits, tree, ranks)
            now = live
        begin, opened = now, now >> BUCKET_SHIFT
        block, end = first[run], first[run] + count[run]
        kind = np.int64(reads[run])
        while block < end:
            moment = np.int64(last[block])
            start = block
            if moment < 0:
                while block < end and last[block] < 0:
                    last[block] = now + (block - start)
                    block += 1
                live += block - start
            else:
                # Consecutive blocks that were referenced consecutively share the distance of the first.
                while block < end and last[block] == moment + (block - start):
                    last[block] = now + (block - start)
                    block += 1
                histogram[kind, live - _below(moment, bits, tree)] += block - start
                _forget(moment, moment + block - start, opened, bits, tree)
            now += block - start
        # Not earlier: until the run ends, no lookup in it goes beyond the moment at which it began.
        _remember(begin, now, bits, tree)
    state[NOW], state[LIVE] = now, live


@inlined
def _ones(word: Any) -> Any:
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined
def _bits_of(begin: int, end: int) -> Any:
    return (~np.uint64(0) >> np.uint64(WORD - (end - begin))) << np.uint64(begin & 63)


@inlined
def _before(moment: int) -> Any:
    return (np.uint64(1) << np.uint64(moment & 63)) - np.uint64(1)


@inlined
def _below(moment: int, bits: Uint64s, tree: Int64s) -> Any:
    word, node = moment >> 6, moment >> BUCKET_SHIFT
    total = _ones(bits[word] & _before(moment))
    for index in range(node * BUCKET_WORDS, word):
        total += _ones(bits[index])
    while node > 0:
        total += tree[node]
        node &= node - 1
    return total


@inlined
def _add(bucket: int, change: int, tree: Int64s) -> None:
    node = bucket + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@inlined
def _forget(begin: int, end: int, opened: int, bits: Uint64s, tree: Int64s) -> None:
    moment = begin
    while moment < end:
        stop = min(end, ((moment >> 6) + 1) << 6)
        bits[moment >> 6] &= ~_bits_of(moment, stop)
        moment = stop
    moment = begin
    while moment < end:
        bucket = moment >> BUCKET_SHIFT
        stop = min(end, (bucket + 1) << BUCKET_SHIFT)
        if bucket != opened:
            _add(bucket, moment - stop, tree)
        moment = stop


@inlined
def _remember(begin: int, end: int, bits: Uint64s, tree: Int64s) -> None:
    moment = begin
    while moment < end:
        stop = min(end, ((moment >> 6) + 1) << 6)
        bits[moment >> 6] |= _bits_of(moment, stop)
        moment = stop
    for bucket in range(begin >> BUCKET_SHIFT, end >> BUCKET_SHIFT):
        change = np.int64(0)
        for word in range(bucket * BUCKET_WORDS, (bucket + 1) * BUCKET_WORDS):
            change += _ones(bits[word])
        _add(bucket, change, tree)


@subroutine
def _renumber(last: Moments, bits: Uint64s, tree: Int64s, ranks: Int64s) -> None:
    live = np.int64(0)
    for word in range(len(bits)):
        ranks[word] = live
        live += _ones(bits[word])
    for block in range(len(last)):
        moment = np.int64(last[block])
        if moment >= 0:
            last[block] = ranks[moment >> 6] + _ones(bits[moment >> 6] & _before(moment))
    bits[:] = 0
    tree[:] = 0
    _remember(0, live, bits, tree)
