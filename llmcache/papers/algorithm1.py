"""Algorithm 1 of the buffer-cache paper, literally as printed; choices that the paper leaves open are marked G1-G7."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmcache.arrays import Flags, Int64s
from llmcache.cache.policies.base import Policy, lean_kernel, subroutine
from llmcache.cache.policies.structures import (
    ITEM,
    NEXT,
    NONE,
    Heap,
    Links,
    back,
    front,
    is_empty,
    is_linked,
    move_to_front,
    new_heap,
    new_links,
    push,
    push_back,
    push_front,
    remove,
    take_out,
)

HOT_SHARE = 0.1

NO_BLOCK = -2  # not -1: block 0 would follow it
NO_SEQUENCE = -1
SEQ, LOOP, HOT = 0, 1, 2


class Algorithm1(Policy):
    """Block sequences (BS) of three classes: SEQ is evicted first, HOT by LRU, LOOP by the longest period.

        get(b): if the previous access was b - 1: add b to BS(b - 1); if that is HOT, it becomes SEQ
                else if BS(b) is SEQ or LOOP: {b} becomes a new LOOP BS
                else if BS(b) is undefined: {b} becomes a new HOT BS
                if b is resident: hit
                if full: if SEQ has a resident block: evict the highest-numbered one of the oldest BS in SEQ
                         else if HOT is full: evict the least recently used block of HOT
                         else: evict the highest-numbered resident block of the BS of the longest period
                miss

    The printed algorithm is followed even where it performs badly (hit ratios of Algorithm 1, LRU, Belady from
    `tests/unit/test_cache_policies.py`):

    - interleaved, descending and strided streams are never sequences (0.000 0.000 0.475);
    - fragments of a loop get periods of their own (0.299 0.055 0.484);
    - a block accessed twice in a row becomes a LOOP (0.214 0.214 0.554);
    - an old loop never ages (0.198 0.158 0.524);
    - one further reference makes a permanent LOOP (0.009 0.745 0.745);
    - metadata is unbounded (G3).

    Choices where the paper is silent:

    - G1 HOT is full if at least 10 % of the capacity (at least one block) is resident in it (section 4.1: "a dedicated
      portion").
    - G2 The period of a LOOP BS is the number of references since the last one to its first block, measured once.
    - G3 BS(b) survives the eviction of b; otherwise no loop larger than the cache could be found. This contradicts the "O(1)
      per cache block" of section 4.1.
    - G4 A block that is added to a BS is removed from its previous one.
    - G5 If the chosen class has no resident block: HOT if LOOP is empty, LOOP if HOT is.
    - G6 The oldest BS in SEQ is the one that became SEQ first; if LOOP BSs have equal periods, the oldest loses a block.
    - G7 Evict comes last in an access: b is already in its BS, whose other blocks may be evicted.

    Reads and writes are the same. The state takes 88 bytes per block, because of G3, and 24 per place. An access is O(1),
    unless a BS enters or leaves LOOP (a heap).

    Source: io_caching section 4.1, Algorithm 1.
    """

    name = "algorithm1"
    title = "Algorithm 1"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        # As many sequences as blocks are enough: each has a block, and a block is in one sequence (G4).
        self._state = SequenceState(
            cells=np.full((blocks, 2), NO_SEQUENCE, np.int64),
            held=new_links(blocks, blocks),
            order=new_links(blocks, 3),
            known=np.zeros((blocks, 5), np.int64),
            loops=new_heap(min(capacity, blocks), blocks),
            numbers=np.array([blocks, 0, 0, 0, 0, NO_BLOCK], np.int64),
        )
        self._state.known[:, SPARE] = np.arange(blocks - 1, -1, -1)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _algorithm1(self._state, self.capacity, max(1, int(self.capacity * HOT_SHARE)), first, count, hits)

    def _resident(self) -> Flags:
        return self._state.held[: self.blocks, NEXT] != NONE


class SequenceState(NamedTuple):
    """State: `cells` by block, `known` by sequence, and lists.

    `held`: the resident blocks of each sequence, ascending (head: `blocks` + its number). `order`: the sequences in SEQ and
    in HOT (head: `blocks` + the class). `loops`: those in LOOP with resident blocks.
    """

    cells: Int64s
    held: Links
    order: Links
    known: Int64s
    loops: Heap
    numbers: Int64s


OF, LAST = 0, 1
# Columns of `known`. BORN is the serial number of the sequence: row numbers are reused. SPARE is a stack of free row
# numbers, unrelated to the sequence of its row.
CLASS, MEMBERS, PERIOD, BORN, SPARE = 0, 1, 2, 3, 4
# Indices into `numbers`: the height of the free stack, references so far, resident blocks, resident blocks in HOT,
# sequences created so far, the block of the previous access.
FREE, TIME, RESIDENT, HOT_RESIDENT, MADE, PREVIOUS = 0, 1, 2, 3, 4, 5


@lean_kernel
def _algorithm1(state: SequenceState, capacity: int, hot_limit: int, first: Int64s, count: Int64s, hits: Int64s) -> None:
    cells, held, order, known, _, numbers = state
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            numbers[TIME] += 1
            _classify(state, block)
            cells[block, LAST] = numbers[TIME]
            numbers[PREVIOUS] = block
            if is_linked(held, block):
                hits[run] += 1
                if known[cells[block, OF], CLASS] == HOT:
                    move_to_front(order, len(cells) + HOT, cells[block, OF])
                continue
            if numbers[RESIDENT] == capacity:
                _evict(state, hot_limit)
            _enter(state, block)


@subroutine
def _classify(state: SequenceState, block: int) -> None:
    cells, _, order, known, _, numbers = state
    if numbers[PREVIOUS] == block - 1:
        sequence = cells[block - 1, OF]
        if known[sequence, CLASS] == HOT:
            # Its only block was the previous access, and so is resident.
            remove(order, sequence)
            numbers[HOT_RESIDENT] -= 1
            known[sequence, CLASS] = SEQ
            push_back(order, len(known) + SEQ, sequence)
        _move(state, block, sequence)  # never the block's own sequence, since every run begins a new one
    elif cells[block, OF] == NO_SEQUENCE:
        _begin(state, block, HOT, 0)
    elif known[cells[block, OF], CLASS] != HOT:
        _begin(state, block, LOOP, numbers[TIME] - cells[block, LAST])  # G2


@subroutine
def _evict(state: SequenceState, hot_limit: int) -> None:
    cells, held, order, _, loops, numbers = state
    blocks = len(cells)
    sequence = front(order, blocks + SEQ)
    # An empty SEQ sequence stays empty (its blocks begin a LOOP sequence when they return), so it is removed when
    # found.
    while sequence != blocks + SEQ and is_empty(held, blocks + sequence):
        remove(order, sequence)
        sequence = front(order, blocks + SEQ)
    if sequence == blocks + SEQ:
        evicts_hot = numbers[HOT_RESIDENT] >= hot_limit or loops.size[0] == 0  # G1, G5
        sequence = back(order, blocks + HOT) if evicts_hot else loops.rows[0, ITEM]
    _exit(state, back(held, blocks + sequence))


@subroutine
def _begin(state: SequenceState, block: int, kind: int, period: int) -> None:
    _, held, _, known, _, numbers = state
    resident = is_linked(held, block)
    _leave(state, block)
    numbers[FREE] -= 1
    sequence = known[numbers[FREE], SPARE]
    numbers[MADE] += 1
    known[sequence, CLASS] = kind
    known[sequence, MEMBERS] = 0
    known[sequence, PERIOD] = period
    known[sequence, BORN] = numbers[MADE]
    _join(state, block, sequence, resident)


@subroutine
def _move(state: SequenceState, block: int, sequence: int) -> None:
    resident = is_linked(state.held, block)
    _leave(state, block)
    _join(state, block, sequence, resident)


@subroutine
def _join(state: SequenceState, block: int, sequence: int, resident: bool) -> None:
    state.cells[block, OF] = sequence
    state.known[sequence, MEMBERS] += 1
    if resident:
        _enter(state, block)


@subroutine
def _leave(state: SequenceState, block: int) -> None:
    cells, held, order, known, _, numbers = state
    sequence = cells[block, OF]
    if sequence == NO_SEQUENCE:
        return
    if is_linked(held, block):
        _exit(state, block)
    known[sequence, MEMBERS] -= 1
    if known[sequence, MEMBERS] == 0:
        if is_linked(order, sequence):
            remove(order, sequence)
        known[numbers[FREE], SPARE] = sequence
        numbers[FREE] += 1


@subroutine
def _enter(state: SequenceState, block: int) -> None:
    cells, held, order, known, loops, numbers = state
    sequence = cells[block, OF]
    numbers[RESIDENT] += 1
    if known[sequence, CLASS] == HOT:
        push_front(order, len(cells) + HOT, sequence)
        numbers[HOT_RESIDENT] += 1
    elif known[sequence, CLASS] == LOOP and is_empty(held, len(cells) + sequence):
        push(loops, -known[sequence, PERIOD], known[sequence, BORN], sequence)  # G6
    push_back(held, len(cells) + sequence, block)


@subroutine
def _exit(state: SequenceState, block: int) -> None:
    cells, held, order, known, loops, numbers = state
    sequence = cells[block, OF]
    numbers[RESIDENT] -= 1
    remove(held, block)
    if known[sequence, CLASS] == HOT:
        remove(order, sequence)
        numbers[HOT_RESIDENT] -= 1
    elif known[sequence, CLASS] == LOOP and is_empty(held, len(cells) + sequence):
        take_out(loops, sequence)
