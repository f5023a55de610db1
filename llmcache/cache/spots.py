"""Spots: blocks accessed in no order, and which of them came again.

Kept in cells of 64 places; a place is a block, or a power of two of blocks once all cells are full of hot blocks. Cells
in which nothing came again are given up first: what is hot comes often, and survives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llmcache.cache.streams import Moment

MAX_CELLS = 256  # of one file: 64 MiB of hot blocks, one by one
PLACES = 64
_ALL = (1 << PLACES) - 1


@dataclass(slots=True)
class Cell:
    """64 places: bit i of `seen` (accessed) and of `again` (in more than one visit). `visits` come and go between `since`
    and `last`.
    """

    seen: int
    again: int
    visits: int
    accesses: int
    since: Moment
    last: Moment


@dataclass(frozen=True)
class Spot:
    """Neighbouring cells: blocks first .. end - 1 with `hot` blocks that came again and `once` blocks that did not."""

    first: int
    end: int
    hot: int
    once: int
    visits: int
    accesses: int
    since: Moment
    last: Moment


class Spots:
    """The cells of one file; at most `MAX_CELLS` of them."""

    def __init__(self) -> None:
        self.shift = 0  # log2 of the blocks of a place
        self.forgotten_blocks = 0  # accessed once, in cells given up
        self.forgotten_accesses = 0
        self._cells: OrderedDict[int, Cell] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, first: int, mask: int, accesses: int, now: Moment) -> None:
        """Takes one visit: the blocks first + i for the bits i of `mask`, `accesses` in all counting repeats."""
        places = self._places(first, mask)
        left, blocks = accesses, sum(bits.bit_count() for bits in places.values())
        for index, bits in places.items():
            share = left * bits.bit_count() // blocks
            left, blocks = left - share, blocks - bits.bit_count()
            cell = self._cells.pop(index, None)
            if cell is None:
                cell = Cell(bits, 0, 1, share, now, now)
            else:
                cell.again |= cell.seen & bits
                cell.seen |= bits
                cell.visits += 1
                cell.accesses += share
                cell.since, cell.last = min(cell.since, now), max(cell.last, now)  # streams end later than they stop
            self._cells[index] = cell
        if len(self._cells) > MAX_CELLS:
            self._make_room()

    def credit(self, block: int, accesses: int) -> None:
        """Counts accesses that only repeat a visit of `block`, which was taken before."""
        cell = self._cells.get((block >> self.shift) // PLACES)
        if cell is None:
            self.forgotten_accesses += accesses
        else:
            cell.accesses += accesses

    def _places(self, first: int, mask: int) -> dict[int, int]:
        """Returns the bits of each cell that a visit touches."""
        result: dict[int, int] = {}
        if self.shift == 0:
            index, offset = divmod(first, PLACES)
            mask <<= offset
            while mask:
                if mask & _ALL:
                    result[index] = mask & _ALL
                mask >>= PLACES
                index += 1
            return result
        while mask:
            low = (mask & -mask).bit_length() - 1
            index, offset = divmod(first + low >> self.shift, PLACES)
            result[index] = result.get(index, 0) | 1 << offset
            mask &= mask - 1
        return result

    def _make_room(self) -> None:
        """Gives up the least recent cells without anything hot; takes larger places where there are too few of those."""
        cold = [index for index, cell in self._cells.items() if not cell.again]
        for index in cold[: max(1, len(cold) // 2)] if cold else ():
            cell = self._cells.pop(index)
            self.forget(cell.seen.bit_count() << self.shift, cell.accesses)
        while len(self._cells) > MAX_CELLS * 7 // 8 and len(cold) < MAX_CELLS // 8:
            self._widen()

    def forget(self, blocks: int, accesses: int) -> None:
        """Counts blocks that were accessed once, and about which nothing else is kept."""
        self.forgotten_blocks += blocks
        self.forgotten_accesses += accesses

    def _widen(self) -> None:
        self.shift += 1
        old, self._cells = self._cells, OrderedDict()
        for index, cell in old.items():
            half = (index % 2) * (PLACES // 2)
            cell.seen, cell.again = _halved(cell.seen) << half, _halved(cell.again) << half
            other = self._cells.pop(index // 2, None)
            if other is not None:
                cell.seen |= other.seen
                cell.again |= other.again
                cell.visits += other.visits
                cell.accesses += other.accesses
                cell.since = min(cell.since, other.since)
                cell.last = max(cell.last, other.last)
            self._cells[index // 2] = cell

    def spots(self) -> Iterator[Spot]:
        """Yields cells as spots, in the order of blocks; one that has both hot and other blocks is cut to the hot ones."""
        for index, cell in sorted(self._cells.items()):
            base = index * PLACES
            shown = cell.again or cell.seen
            low, high = (shown & -shown).bit_length() - 1, shown.bit_length()
            hot, once = cell.again.bit_count(), (cell.seen & ~cell.again).bit_count()
            yield Spot(
                base + low << self.shift, base + high << self.shift, hot << self.shift, once << self.shift,
                cell.visits, cell.accesses, cell.since, cell.last,
            )  # fmt: skip


def _halved(bits: int) -> int:
    """Returns `bits` with each pair made one, set if either was."""
    bits |= bits >> 1
    return sum(((bits >> 2 * place) & 1) << place for place in range(PLACES // 2))
