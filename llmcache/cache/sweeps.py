"""Sweeps: for every block of a file, how often it was walked over in sequence, when last, and how long lies between.

Kept as disjoint regions of blocks with one history. A pass over a region moves the border between what has been walked
in this pass and what has not: a loop is one region, or two while it is being walked. A pass counts only if the walk
before it was over: readers of one loop that follow each other make one pass together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from llmcache.cache.intervals import Intervals, is_about
from llmcache.cache.streams import Moment, Walk

MAX_REGIONS = 256  # of one file; beyond that neighbours become one
ONE_SWEEP = 16  # neighbours belong to one sweep if the time between them is so small a part of what it takes

IsRunning = Callable[[int, Moment], bool]
"""Whether the stream with this number was still coming on after that moment."""


@dataclass(slots=True)
class Region:
    """Blocks first .. end - 1, `touched` of them walked over `passes` times in sequence since `since`, the last time from
    `at_first` to `at_end` (earlier, if it went down) by stream `stream`. `accesses`: blocks accessed in all passes.
    """

    first: int
    end: int
    touched: int
    passes: int
    since: Moment
    at_first: Moment
    at_end: Moment
    accesses: int
    stream: int
    intervals: Intervals
    gap: int = 0  # blocks accessed between the last two passes

    @property
    def last(self) -> Moment:
        """When it was accessed last."""
        return max(self.at_first, self.at_end, key=lambda moment: moment.blocks)

    def at(self, block: float) -> Moment:
        """When `block` was walked over last, taken to lie evenly between the two ends."""
        part = (block - self.first) / (self.end - self.first)
        return Moment(
            round(self.at_first.ns + part * (self.at_end.ns - self.at_first.ns)),
            round(self.at_first.blocks + part * (self.at_end.blocks - self.at_first.blocks)),
        )

    def share(self, value: int, first: int, end: int) -> int:
        """Returns how much of `value`, which stands for all of the region, falls to blocks first .. end - 1."""
        length = self.end - self.first
        return value * (end - self.first) // length - value * (first - self.first) // length

    def part(self, first: int, end: int) -> Region:
        """Returns blocks first .. end - 1 of it, with a history of their own."""
        return replace(
            self,
            first=first,
            end=end,
            touched=self.share(self.touched, first, end),
            at_first=self.at(first),
            at_end=self.at(end),
            accesses=self.share(self.accesses, first, end),
            intervals=self.intervals.copy(),
        )


class Sweeps:
    """The regions of one file, in the order of their blocks; at most `limit` of them."""

    def __init__(self, limit: int = MAX_REGIONS) -> None:
        self.regions: list[Region] = []
        self.limit = limit

    def add(self, walk: Walk, is_running: IsRunning) -> None:
        """Takes a sequential walk into account."""
        begin = bisect_right(self.regions, walk.first, key=lambda region: region.end)
        if begin and _goes_on(self.regions[begin - 1], walk) and self._moves_border(begin, walk, is_running):
            return
        new = _region_of(walk)
        end = begin
        while end < len(self.regions) and self.regions[end].first < walk.end:
            end += 1
        pieces: list[Region] = []
        at = walk.first
        for old in self.regions[begin:end]:
            first, last = max(old.first, walk.first), min(old.end, walk.end)
            if old.first < first:
                pieces.append(old.part(old.first, first))
            if at < first:
                pieces.append(new.part(at, first))
            together = old.stream == walk.stream or is_running(old.stream, walk.born)
            pieces.append(_again(old.part(first, last), new.part(first, last), together))
            if last < old.end:
                pieces.append(old.part(last, old.end))
            at = last
        if at < walk.end:
            pieces.append(new.part(at, walk.end))
        around = slice(max(0, begin - 1), end + 1)
        self.regions[around] = _joined([*self.regions[around.start : begin], *pieces, *self.regions[end : around.stop]])
        if len(self.regions) > self.limit:
            self._compact()

    def _moves_border(self, index: int, walk: Walk, is_running: IsRunning) -> bool:
        """Takes `walk`, which goes on in the region before `index`, if all that happens is that this region gets longer.

        That is what nearly all walks do; `add` does the same for them at several times the cost.
        """
        mine = self.regions[index - 1]
        ahead = self.regions[index] if index < len(self.regions) else None
        touched = walk.mask.bit_count() or walk.end - walk.first
        accesses = walk.accesses
        if ahead is not None and ahead.first <= walk.end:
            whole = ahead.first == walk.first and walk.end < ahead.end and ahead.passes + 1 == mine.passes
            if not whole or not is_about(walk.start.blocks - ahead.at_first.blocks, mine.gap):
                return False
            if ahead.stream == walk.stream or is_running(ahead.stream, walk.born):
                return False
            shared = ahead.share(ahead.touched, walk.first, walk.end)
            earlier = ahead.share(ahead.accesses, walk.first, walk.end)
            ahead.at_first, ahead.first = ahead.at(walk.end), walk.end
            ahead.touched -= shared
            ahead.accesses -= earlier
            touched, accesses = max(touched, shared), accesses + earlier
        elif mine.passes > 1:
            return False
        mine.end, mine.at_end = walk.end, walk.stop
        mine.touched += touched
        mine.accesses += accesses
        return True

    def _compact(self) -> None:
        """Joins pairs of neighbours, those that lose least first, until a quarter of the room is free."""
        losses = [(_loss(*pair), index) for index, pair in enumerate(pairwise(self.regions))]
        gone: set[int] = set()
        for _, index in sorted(losses):
            if len(self.regions) - len(gone) <= self.limit * 3 // 4:
                break
            if index not in gone and index + 1 not in gone and index - 1 not in gone:
                self.regions[index + 1] = _join(self.regions[index], self.regions[index + 1])
                gone.add(index)
        self.regions = [region for index, region in enumerate(self.regions) if index not in gone]


def _goes_on(region: Region, walk: Walk) -> bool:
    return region.end == walk.first and region.stream == walk.stream and not walk.descending


def _region_of(walk: Walk) -> Region:
    length = walk.end - walk.first
    touched = walk.mask.bit_count() or length
    times = (walk.stop, walk.start) if walk.descending else (walk.start, walk.stop)
    return Region(walk.first, walk.end, touched, 1, walk.start, *times, walk.accesses, walk.stream, Intervals())


def _again(old: Region, new: Region, together: bool) -> Region:
    """Returns the region `old` after the walk `new` over it; `together`: both are one pass."""
    accesses, touched = old.accesses + new.accesses, max(old.touched, new.touched)
    if together:
        return replace(old, accesses=accesses, touched=touched)
    # Where the walk came in: there its time is known best.
    before, now = (old.at_end, new.at_end) if new.at_end < new.at_first else (old.at_first, new.at_first)
    gap = now.blocks - before.blocks
    old.intervals.add(now.ns - before.ns, gap)
    return replace(
        new,
        passes=old.passes + 1,
        since=min(old.since, new.since),
        accesses=accesses,
        touched=touched,
        intervals=old.intervals,
        gap=gap,
    )


def _joined(regions: list[Region]) -> list[Region]:
    """Returns `regions` with neighbours made one where they have one history."""
    result = regions[:1]
    for region in regions[1:]:
        if _is_one(result[-1], region):
            result[-1] = _join(result[-1], region)
        else:
            result.append(region)
    return result


def _is_one(left: Region, right: Region) -> bool:
    if left.end != right.first or left.passes != right.passes:
        return False
    if left.stream != right.stream:
        between = abs(right.at_first.blocks - left.at_end.blocks)
        if between * ONE_SWEEP > left.end - left.first + right.end - right.first:
            return False
    mine, theirs = left.intervals.period(), right.intervals.period()
    return mine is theirs or (mine is not None and theirs is not None and is_about(mine.blocks, theirs.blocks))


def _join(left: Region, right: Region) -> Region:
    """Returns both as one region, with the history of the longer one."""
    main = left if left.touched >= right.touched else right
    return replace(
        main,
        first=left.first,
        end=right.end,
        touched=left.touched + right.touched,
        since=min(left.since, right.since),
        at_first=left.at_first,
        at_end=right.at_end,
        accesses=left.accesses + right.accesses,
        stream=right.stream,
    )


def _loss(left: Region, right: Region) -> tuple[bool, int]:
    """What joining two neighbours would hide: a difference in passes, and how many blocks get another history."""
    return left.passes != right.passes, min(left.touched, right.touched) + right.first - left.end
