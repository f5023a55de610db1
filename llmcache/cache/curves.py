"""Hits of LRU at every cache size from one pass over a trace: Mattson's stack distances, in memory of the footprint.

A block's distance is the number of distinct blocks referenced since it was referenced last, itself included: LRU hits
it in every cache of at least so many blocks (io_caching has no such curve; Mattson et al., 1970).

Time is counted in block references. A bit for each moment tells whether the block referenced then has not been
referenced since, and a Fenwick tree counts the bits by buckets of `BUCKET` moments, so that it stays in the CPU's
cache; a distance is the number of bits from a block's last moment on. When the moments run out, those of the blocks
that live are renumbered in place: no array grows with the trace.

Blocks of one run that were last referenced next to one another share one distance: as the run goes on, each leaves one
block less behind it in the old run and one more in the new one. So a loop costs a look-up per run, not per block.
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
MOMENTS_PER_BLOCK = 4  # a bit each: more make renumbering rarer, fewer stay in the CPU's cache
NOW, LIVE = 0, 1  # places in the kernel's state

Moments = NDArray[np.signedinteger[Any]]


def inlined(function: F) -> F:
    """Puts `function` into its callers: a call passes every array in seven words, which costs more than it does."""
    compiled: F = numba.njit(inline="always")(function)
    return compiled


@dataclass(frozen=True)
class Curve:
    """Hits of one policy at many cache sizes; all arrays are int64 of one length, sizes ascending, in blocks."""

    policy: str
    sizes: Int64s
    hits: Int64s  # blocks found in the cache, reads and writes
    read_hits: Int64s
    accesses: int
    reads: int

    def hit_ratio(self) -> Doubles:
        """Returns hits / accesses of each size (float64, 0..1)."""
        return self.hits / self.accesses

    def miss_ratio(self) -> Doubles:
        """Returns 1 - hit ratio of each size (float64, 0..1): the miss-ratio curve."""
        return 1 - self.hits / self.accesses

    def thinned(self, points: int) -> Curve:
        """Returns at most `points` exact points of the curve, spread over its sizes, both ends among them."""
        if len(self.sizes) <= points:
            return self
        kept = np.unique(np.linspace(0, len(self.sizes) - 1, points).astype(np.int64))
        return replace(self, sizes=self.sizes[kept], hits=self.hits[kept], read_hits=self.read_hits[kept])


class StackDistances:
    """Counts LRU stack distances over ids 0 .. `blocks` - 1; `feed` goes on where the last call ended."""

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
        """Takes runs (ids first[i] .. first[i] + count[i] - 1, in this order) and which of them are reads."""
        _feed(self._stack, np.ascontiguousarray(first), np.ascontiguousarray(count), reads)
        self._totals[1] += int(count[reads].sum())
        self._totals[0] += int(count[~reads].sum())

    def curve(self) -> Curve:
        """Returns the LRU curve for every size from 0 to the number of distinct blocks seen."""
        footprint = int(self._stack.state[LIVE])
        hits = np.cumsum(self._stack.histogram[:, : footprint + 1], axis=1)
        sizes = np.arange(footprint + 1, dtype=np.int64)
        return Curve("lru", sizes, hits[0] + hits[1], hits[1], sum(self._totals), self._totals[1])


class Stack(NamedTuple):
    """The last moment of each block, -1 if it has none; a bit for each moment, counted in the tree by buckets; hits.

    `histogram`: by kind (writes, reads) and distance; `state`: NOW and LIVE; `ranks`: room for renumbering.
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
                # Neighbours that were referenced one after the other share the distance of the first.
                while block < end and last[block] == moment + (block - start):
                    last[block] = now + (block - start)
                    block += 1
                histogram[kind, live - _below(moment, bits, tree)] += block - start
                _forget(moment, moment + block - start, opened, bits, tree)
            now += block - start
        # Not sooner: until its end no look-up in this run goes beyond the moment at which it began.
        _remember(begin, now, bits, tree)
    state[NOW], state[LIVE] = now, live


@inlined
def _ones(word: Any) -> Any:
    """Number of bits set in `word`; LLVM makes one instruction of it."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined
def _bits_of(begin: int, end: int) -> Any:
    """The bits of a word that stand for moments `begin` .. `end` - 1: at least one, all in that word."""
    return (~np.uint64(0) >> np.uint64(WORD - (end - begin))) << np.uint64(begin & 63)


@inlined
def _before(moment: int) -> Any:
    """The bits of the word of `moment` that stand for earlier ones."""
    return (np.uint64(1) << np.uint64(moment & 63)) - np.uint64(1)


@inlined
def _below(moment: int, bits: Uint64s, tree: Int64s) -> Any:
    """Number of bits set before `moment`."""
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
    """Clears the bits of moments `begin` .. `end` - 1, all of which are set."""
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
    """Sets the bits of moments `begin` .. `end` - 1, the newest; buckets enter the tree when they are full."""
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
    """Gives the blocks that live the moments 0, 1, … in the order of the old ones; overwrites `ranks`."""
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
