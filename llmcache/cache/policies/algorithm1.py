"""Algorithm 1 of the buffer-cache paper, literally as printed; what the print leaves open is filled in and marked G1-G7."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.heaps import ITEM, Places, Rows, new_heap, push, take_out
from llmcache.cache.policies.lists import (
    Links,
    back,
    front,
    is_empty,
    is_linked,
    linked,
    move_to_front,
    new_links,
    push_back,
    push_front,
    remove,
)

HOT_SHARE = 0.1

NO_BLOCK = -2  # not -1: block 0 does not follow it
NO_SEQUENCE = -1
SEQ, LOOP, HOT = 0, 1, 2


class Algorithm1(Policy):
    """Block sequences (BS) of three classes: SEQ goes first, HOT is kept by LRU, LOOP by the shortest period.

        get(b): if the previous access was b - 1: add b to BS(b - 1); if that is HOT, it becomes SEQ
                else if BS(b) is SEQ or LOOP: {b} becomes a new LOOP BS
                else if BS(b) is undefined: {b} becomes a new HOT BS
                if b is resident: hit
                if full: if SEQ has a resident block: the highest-numbered one of the oldest BS in SEQ goes
                         else if HOT is full: the least recently used block of HOT goes
                         else: the highest-numbered resident block of the BS of the longest period goes
                miss

    What is printed is followed even where it fails (hit ratios of this, LRU, Belady in `tests/unit/test_algorithm1.py`):
    interleaved streams are never sequences (.000 .000 .475), nor are descending or strided ones (.000 .000 .475);
    fragments of a loop get periods of their own (.299 .055 .484); a block asked for twice in a row becomes a LOOP (.214
    .214 .554); an old loop never ages (.198 .158 .524); one further reference makes a LOOP for good (.009 .745 .745);
    metadata is unbounded (G3).
    What is not printed:
    G1 "HOT is full": HOT has at least 10 % of the capacity (at least one block) resident. Section 4.1 reserves "a
       dedicated portion" and gives no share.
    G2 the period of a LOOP BS: references since its first block was last referenced, measured once, when the BS is made.
    G3 BS(b) outlives the eviction of b: "undefined" means never accessed. So metadata grows with every block ever seen,
       which the "O(1) per cache block" of section 4.1 contradicts; but if BS(b) ended with b's eviction, no loop longer
       than the cache could ever be found.
    G4 a block that is added to a BS leaves the one it was in.
    G5 when the chosen class has no resident block: HOT when LOOP is empty, LOOP when HOT is.
    G6 the oldest BS in SEQ is the one that became SEQ first; of equal periods, the BS that was made first gives way.
    G7 Evict comes last in an access: b is already in its BS, whose other blocks may go.

    Reads and writes are the same (the paper speaks of accesses). 88 bytes per block, because of G3, and 24 per place.
    O(1) per access except where LOOP gains or gives up a BS (a heap: logarithmic in their number).
    Source: io_caching section 4.1, Algorithm 1.
    """

    name = "algorithm1"
    title = "Algorithm 1"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        # As many sequences as blocks suffice: each has a block, and a block is in one (G4).
        rows, at = new_heap(capacity, blocks)
        self._cells = np.zeros((blocks, 2), np.int64)
        self._cells[:, OF] = NO_SEQUENCE
        self._held = new_links(blocks, blocks)
        self._order = new_links(blocks, 3)
        self._known = np.zeros((blocks, 5), np.int64)
        self._known[:, SPARE] = np.arange(blocks - 1, -1, -1)
        self._heap = (rows, at)
        self._numbers = np.array([blocks, 0, 0, 0, 0, 0, NO_BLOCK], np.int64)
        self._hot_limit = max(1, int(capacity * HOT_SHARE))

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._cells, self._held, self._order, self._known, *self._heap, self._numbers)
        self.evictions += _replay(*state, (self.capacity, self._hot_limit), first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return linked(self._held, self.blocks)

    @property
    def metadata(self) -> int:
        """Blocks that belong to a sequence, resident or not: the entries that a program without dense ids must keep (G3)."""
        return int(np.count_nonzero(self._cells[:, OF] != NO_SEQUENCE))

    @property
    def sequences(self) -> int:
        """Block sequences that have a block, resident or not."""
        return int(self.blocks - self._numbers[FREE])


# The loop's state: cells, the sequence of each block and the time of its last reference; held, the resident blocks of
# each sequence, ascending (head: `blocks` + its number); order, the sequences in SEQ, oldest first, and in HOT, latest
# first (head: `blocks` + the class); known, what is known of each sequence; LOOP's heap, rows and at; numbers.
OF, LAST = 0, 1
# Columns of known. BORN counts the sequences made: numbers are used again, this is not. SPARE is a stack of the sequence
# numbers that are free, which has nothing to do with the sequence of its row.
CLASS, MEMBERS, PERIOD, BORN, SPARE = 0, 1, 2, 3, 4
# Places in the numbers: the height of the free stack, references so far, resident blocks, those in HOT, the size of
# LOOP's heap (sequences with resident blocks), sequences made so far, the block of the previous access.
FREE, TIME, RESIDENT, HOT_RESIDENT, LOOPS, MADE, PREVIOUS = 0, 1, 2, 3, 4, 5, 6


@lean_kernel
def _replay(
    cells: Any,
    held: Links,
    order: Links,
    known: Any,
    rows: Rows,
    at: Places,
    numbers: Any,
    limits: tuple[int, int],
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    capacity, hot_limit = limits
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            numbers[TIME] += 1
            _classify(cells, held, order, known, rows, at, numbers, block)
            cells[block, LAST] = numbers[TIME]
            numbers[PREVIOUS] = block
            if is_linked(held, block):
                found += 1
                if known[cells[block, OF], CLASS] == HOT:
                    move_to_front(order, len(cells) + HOT, cells[block, OF])
                continue
            if numbers[RESIDENT] == capacity:
                _evict(cells, held, order, known, rows, at, numbers, hot_limit)
                evicted += 1
            _enter(cells, held, order, known, rows, at, numbers, block)
        hits[run] = found
    return evicted


@subroutine
def _classify(cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, block: int) -> None:
    """The printed procedure Access."""
    if numbers[PREVIOUS] == block - 1:
        sequence = cells[block - 1, OF]
        if known[sequence, CLASS] == HOT:
            _make_sequential(order, known, numbers, sequence)
        _add(cells, held, order, known, rows, at, numbers, block, sequence)
    elif cells[block, OF] == NO_SEQUENCE:
        _begin(cells, held, order, known, rows, at, numbers, block, HOT, 0)
    elif known[cells[block, OF], CLASS] != HOT:
        _begin(cells, held, order, known, rows, at, numbers, block, LOOP, numbers[TIME] - cells[block, LAST])  # G2


@subroutine
def _evict(cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, hot_limit: int) -> None:
    """The printed procedure Evict."""
    blocks = len(cells)
    sequence = front(order, blocks + SEQ)
    # An empty SEQ sequence stays empty (a block of it that comes back begins a LOOP one), so it is dropped when met.
    while sequence != blocks + SEQ and is_empty(held, blocks + sequence):
        remove(order, sequence)
        sequence = front(order, blocks + SEQ)
    if sequence == blocks + SEQ:
        hot_goes = numbers[HOT_RESIDENT] >= hot_limit or numbers[LOOPS] == 0  # G1, G5
        sequence = back(order, blocks + HOT) if hot_goes else rows[0, ITEM]
    _exit(cells, held, order, known, rows, at, numbers, back(held, blocks + sequence))


@subroutine
def _begin(
    cells: Any,
    held: Links,
    order: Links,
    known: Any,
    rows: Rows,
    at: Places,
    numbers: Any,
    block: int,
    kind: int,
    period: int,
) -> None:
    """Makes {block} a new sequence."""
    resident = is_linked(held, block)
    _leave(cells, held, order, known, rows, at, numbers, block)
    numbers[FREE] -= 1
    sequence = known[numbers[FREE], SPARE]
    numbers[MADE] += 1
    known[sequence, CLASS] = kind
    known[sequence, MEMBERS] = 0
    known[sequence, PERIOD] = period
    known[sequence, BORN] = numbers[MADE]
    _join(cells, held, order, known, rows, at, numbers, block, sequence, resident)


@subroutine
def _add(
    cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, block: int, sequence: int
) -> None:
    """Moves a block to the end of another sequence; it is not in that one, since every run begins a sequence."""
    resident = is_linked(held, block)
    _leave(cells, held, order, known, rows, at, numbers, block)
    _join(cells, held, order, known, rows, at, numbers, block, sequence, resident)


@subroutine
def _join(
    cells: Any,
    held: Links,
    order: Links,
    known: Any,
    rows: Rows,
    at: Places,
    numbers: Any,
    block: int,
    sequence: int,
    resident: bool,
) -> None:
    cells[block, OF] = sequence
    known[sequence, MEMBERS] += 1
    if resident:
        _enter(cells, held, order, known, rows, at, numbers, block)


@subroutine
def _leave(cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, block: int) -> None:
    """Takes a block out of its sequence, if it has one (G4), and frees a sequence that is left without blocks."""
    sequence = cells[block, OF]
    if sequence == NO_SEQUENCE:
        return
    if is_linked(held, block):
        _exit(cells, held, order, known, rows, at, numbers, block)
    known[sequence, MEMBERS] -= 1
    if known[sequence, MEMBERS] == 0:
        if is_linked(order, sequence):
            remove(order, sequence)
        known[numbers[FREE], SPARE] = sequence
        numbers[FREE] += 1


@subroutine
def _make_sequential(order: Links, known: Any, numbers: Any, sequence: int) -> None:
    """Moves a sequence, whose one block was the previous access and so is resident, from HOT to SEQ."""
    remove(order, sequence)
    numbers[HOT_RESIDENT] -= 1
    known[sequence, CLASS] = SEQ
    push_back(order, len(known) + SEQ, sequence)


@subroutine
def _enter(cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, block: int) -> None:
    """Makes a block resident: from now on its sequence can give it up."""
    sequence = cells[block, OF]
    numbers[RESIDENT] += 1
    if known[sequence, CLASS] == HOT:
        push_front(order, len(cells) + HOT, sequence)
        numbers[HOT_RESIDENT] += 1
    elif known[sequence, CLASS] == LOOP and is_empty(held, len(cells) + sequence):
        numbers[LOOPS] = push(rows, at, numbers[LOOPS], -known[sequence, PERIOD], known[sequence, BORN], sequence)  # G6
    push_back(held, len(cells) + sequence, block)


@subroutine
def _exit(cells: Any, held: Links, order: Links, known: Any, rows: Rows, at: Places, numbers: Any, block: int) -> None:
    """Makes a block not resident."""
    sequence = cells[block, OF]
    numbers[RESIDENT] -= 1
    remove(held, block)
    if known[sequence, CLASS] == HOT:
        remove(order, sequence)
        numbers[HOT_RESIDENT] -= 1
    elif known[sequence, CLASS] == LOOP and is_empty(held, len(cells) + sequence):
        numbers[LOOPS] = take_out(rows, at, numbers[LOOPS], sequence)
