"""Classify blocks online as read once, read in a loop, or accessed repeatedly without order.

Sequential walks of streams (`streams`) count as passes over regions, other walks as visits of scattered blocks. A region
walked `LOOP_PASSES` times is a loop; scattered blocks that are revisited are hot; all others were read once. Reads and
writes are separate, and so are the phases of a stride. The state per file is bounded.

Source: io_caching sections 3 and 4.1 (Algorithm 1). Differs from the paper: streams instead of one previous access; repeats
of a block collapse; a loop needs two equal distances, so that a prompt that is submitted twice is no loop (section 3.2); a
loop is a region with one period, in any number of pieces; a loop expires.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from llmcache.cache.loops import Intervals, Period, is_about
from llmcache.cache.streams import BlockRun, Moment, StreamTable, Walk

SEQ: Literal["SEQ"] = "SEQ"
LOOP: Literal["LOOP"] = "LOOP"
HOT: Literal["HOT"] = "HOT"
Class = Literal["SEQ", "LOOP", "HOT"]

LOOP_PASSES = 3  # two intervals: one re-reference makes no loop
MISSED_PERIODS = 2  # after which a loop has ended
MAX_STRIDES = 16  # phases of strides per file


@dataclass(frozen=True)
class Place:
    """Blocks first .. end - 1 of a file with one class; `blocks` of them were accessed, `accesses` times in all.

    They were walked over (visited, if HOT) `passes` times, first at `since`, last from `start` to `last`. `stride`: 0
    without holes.
    """

    kind: Class
    first: int
    end: int
    blocks: int
    passes: int
    accesses: int
    since: Moment
    start: Moment
    last: Moment
    period: Period | None = None
    regularity: float = 0.0
    descending: bool = False
    stride: int = 0
    scattered: bool = False  # accessed without order
    rhythms: tuple[Period, ...] = ()  # all recurring intervals, shortest first; the period is the most frequent one

    def expired(self, now: Moment) -> bool:
        """Return whether this loop missed MISSED_PERIODS, in time (slow storage) and in accesses (a user's pause)."""
        if not self.rhythms:
            return False
        longest = self.rhythms[-1]
        overdue = now.blocks - self.last.blocks > MISSED_PERIODS * longest.blocks
        return overdue and now.ns - self.last.ns >= MISSED_PERIODS * longest.ns


def common(one: Place | SweepRegion, other: Place | SweepRegion) -> int:
    """Return the number of blocks in both ranges."""
    return max(0, min(one.end, other.end) - max(one.first, other.first))


MAX_REGIONS = 256  # per file; beyond that, neighbors are joined
ONE_SWEEP = 16  # neighbors belong to one sweep if the gap between them in time is at most 1/ONE_SWEEP of their length

IsRunning = Callable[[int, Moment], bool]  # returns True if the stream with this number advanced after that moment


@dataclass(slots=True)
class SweepRegion:
    """Blocks first .. end - 1, of which `touched` were accessed, walked over in sequence `passes` times since `since`.

    The last pass went from `at_first` to `at_end`, or back if it went down. `accesses`: blocks of all passes.
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
        return max(self.at_first, self.at_end, key=lambda moment: moment.blocks)

    def at(self, block: float) -> Moment:
        part = (block - self.first) / (self.end - self.first)
        return Moment(
            round(self.at_first.ns + part * (self.at_end.ns - self.at_first.ns)),
            round(self.at_first.blocks + part * (self.at_end.blocks - self.at_first.blocks)),
        )

    def share(self, value: int, first: int, end: int) -> int:
        """Return the part of `value`, a total of the region, that belongs to blocks first .. end - 1."""
        length = self.end - self.first
        return value * (end - self.first) // length - value * (first - self.first) // length

    def part(self, first: int, end: int) -> SweepRegion:
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

    def place(self) -> Place:
        looping = self.passes >= LOOP_PASSES
        return Place(
            kind=LOOP if looping else SEQ,
            first=self.first,
            end=self.end,
            blocks=self.touched,
            passes=self.passes,
            accesses=self.accesses,
            since=self.since,
            start=min(self.at_first, self.at_end, key=lambda moment: moment.blocks),
            last=self.last,
            descending=self.at_end.blocks < self.at_first.blocks,
            period=self.intervals.period() if looping else None,
            regularity=self.intervals.regularity() if looping else 0.0,
            rhythms=self.intervals.rhythms() if looping else (),
        )


class Sweeps:
    """Where one file was walked over in sequence: disjoint regions in block order, at most `limit` of them.

    A pass counts only if the previous walk has ended, so readers that follow each other make one pass together.
    """

    def __init__(self, limit: int = MAX_REGIONS) -> None:
        self.regions: list[SweepRegion] = []
        self.limit = limit

    def add(self, walk: Walk, is_running: IsRunning) -> None:
        begin = bisect_right(self.regions, walk.first, key=lambda region: region.end)
        if begin and self._moves_border(begin, walk, is_running):
            return
        touched = walk.mask.bit_count() or walk.end - walk.first
        times = (walk.stop, walk.start) if walk.descending else (walk.start, walk.stop)
        new = SweepRegion(walk.first, walk.end, touched, 1, walk.start, *times, walk.accesses, walk.stream, Intervals())
        end = begin
        while end < len(self.regions) and self.regions[end].first < walk.end:
            end += 1
        pieces: list[SweepRegion] = []
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
        """Record `walk` if it only extends a region: most do, and `add` costs several times as much."""
        mine = self.regions[index - 1]
        if mine.end != walk.first or mine.stream != walk.stream or walk.descending:
            return False
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
        # What joining a pair hides: a difference in passes, and the number of blocks that get a different history.
        losses = [
            (left.passes != right.passes, min(left.touched, right.touched) + right.first - left.end, index)
            for index, (left, right) in enumerate(pairwise(self.regions))
        ]
        joined: set[int] = set()
        for *_, index in sorted(losses):
            if len(self.regions) - len(joined) <= self.limit * 3 // 4:
                break
            if index not in joined and index + 1 not in joined and index - 1 not in joined:
                self.regions[index + 1] = _join(self.regions[index], self.regions[index + 1])
                joined.add(index)
        self.regions = [region for index, region in enumerate(self.regions) if index not in joined]


def _again(old: SweepRegion, new: SweepRegion, together: bool) -> SweepRegion:
    """Return the region `old` after the walk `new` over it; `together`: both belong to one pass."""
    accesses, touched = old.accesses + new.accesses, max(old.touched, new.touched)
    if together:
        return replace(old, accesses=accesses, touched=touched)
    # Use the end at which the walk entered: its time is the most accurate.
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


def _joined(regions: list[SweepRegion]) -> list[SweepRegion]:
    result = regions[:1]
    for region in regions[1:]:
        if _is_one(result[-1], region):
            result[-1] = _join(result[-1], region)
        else:
            result.append(region)
    return result


def _is_one(left: SweepRegion, right: SweepRegion) -> bool:
    if left.end != right.first or left.passes != right.passes:
        return False
    if left.stream != right.stream:
        between = abs(right.at_first.blocks - left.at_end.blocks)
        if between * ONE_SWEEP > left.end - left.first + right.end - right.first:
            return False
    mine, theirs = left.intervals.period(), right.intervals.period()
    return mine is theirs or (mine is not None and theirs is not None and is_about(mine.blocks, theirs.blocks))


def _join(left: SweepRegion, right: SweepRegion) -> SweepRegion:
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


MAX_CELLS = 256  # per file: 64 MiB of hot blocks, one by one
PLACES = 64
_ALL = (1 << PLACES) - 1


@dataclass(slots=True)
class ScatteredCell:
    """64 places: bit i is set in `seen` if place i was accessed, and in `again` if several visits accessed it."""

    seen: int
    again: int
    visits: int
    accesses: int
    since: Moment
    last: Moment


class ScatteredBlocks:
    """The blocks of one file that were accessed without order, in at most `MAX_CELLS` cells of 64 places.

    A place is one block, and grows to a power of two of blocks once hot blocks fill all cells.
    """

    def __init__(self) -> None:
        self.shift = 0  # log2 of the blocks per place
        self.forgotten_blocks = 0  # accessed once, in dropped cells
        self.forgotten_accesses = 0
        self._cells: OrderedDict[int, ScatteredCell] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, first: int, mask: int, accesses: int, now: Moment) -> None:
        """Record one visit: block first + i for each bit i of `mask`; `accesses` counts repeats."""
        places = self._places(first, mask)
        left, blocks = accesses, sum(bits.bit_count() for bits in places.values())
        for index, bits in places.items():
            share = left * bits.bit_count() // blocks
            left, blocks = left - share, blocks - bits.bit_count()
            cell = self._cells.pop(index, None)
            if cell is None:
                cell = ScatteredCell(bits, 0, 1, share, now, now)
            else:
                cell.again |= cell.seen & bits
                cell.seen |= bits
                cell.visits += 1
                cell.accesses += share
                # streams are ended later than their last access
                cell.since, cell.last = min(cell.since, now), max(cell.last, now)
            self._cells[index] = cell
        if len(self._cells) > MAX_CELLS:
            self._make_room()

    def credit(self, block: int, accesses: int) -> None:
        cell = self._cells.get((block >> self.shift) // PLACES)
        if cell is None:
            self.forgotten_accesses += accesses
        else:
            cell.accesses += accesses

    def _places(self, first: int, mask: int) -> dict[int, int]:
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
        cold = [index for index, cell in self._cells.items() if not cell.again]
        for index in cold[: max(1, len(cold) // 2)] if cold else ():
            cell = self._cells.pop(index)
            self.forget(cell.seen.bit_count() << self.shift, cell.accesses)
        while len(self._cells) > MAX_CELLS * 7 // 8 and len(cold) < MAX_CELLS // 8:
            self._widen()

    def forget(self, blocks: int, accesses: int) -> None:
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

    def places(self) -> Iterator[Place]:
        for index, cell in sorted(self._cells.items()):
            base = index * PLACES
            shown = cell.again or cell.seen
            low, high = (shown & -shown).bit_length() - 1, shown.bit_length()
            yield Place(
                kind=HOT if cell.again else SEQ,
                first=base + low << self.shift,
                end=base + high << self.shift,
                blocks=shown.bit_count() << self.shift,
                passes=cell.visits,
                accesses=cell.accesses,
                since=cell.since,
                start=cell.since,
                last=cell.last,
                scattered=True,
            )


def _halved(bits: int) -> int:
    bits |= bits >> 1
    return sum(((bits >> 2 * place) & 1) << place for place in range(PLACES // 2))


class Trail:
    """The accesses to one file (its reads, or its writes)."""

    def __init__(self) -> None:
        self.streams = StreamTable()
        self.sweeps = Sweeps()
        self.scattered = ScatteredBlocks()
        self.strides: OrderedDict[tuple[int, int, int], Sweeps] = OrderedDict()  # key: stride, phase, width of the runs

    def record_run(self, run: BlockRun) -> bool:
        """Return whether the run only repeats the one before it."""
        repeated, walks = self.streams.record_run(run)
        for walk in walks:
            self._take(walk)
        return repeated

    def finish(self) -> None:
        for walk in self.streams.end():
            self._take(walk)

    def _take(self, walk: Walk) -> None:
        if walk.stride and walk.sequential:
            self._take_strided(walk)
        elif walk.sequential:
            self.sweeps.add(walk, self.streams.is_running)
        elif walk.stride:
            runs = range(walk.first, walk.end, walk.stride)
            for first in runs:
                self.scattered.add(first, (1 << walk.width) - 1, walk.width, walk.stop)
            self.scattered.credit(walk.first, walk.accesses - walk.width * len(runs))
        elif walk.mask:
            self.scattered.add(walk.first, walk.mask, walk.accesses, walk.stop)
        else:
            self.scattered.credit(walk.first, walk.accesses)

    def _take_strided(self, walk: Walk) -> None:
        at = walk.first if walk.descending else walk.end - walk.width
        runs = -(-(walk.end - walk.first) // walk.stride)
        number, phase = divmod(at, walk.stride)
        first = number if walk.descending else number - runs + 1
        key = walk.stride, phase, walk.width
        sweeps = self.strides.pop(key, None) or Sweeps(MAX_REGIONS // MAX_STRIDES)
        self.strides[key] = sweeps
        sweeps.add(replace(walk, first=first, end=first + runs, mask=0), self.streams.is_running)
        if len(self.strides) > MAX_STRIDES:
            _, oldest = self.strides.popitem(last=False)
            self.scattered.forget(
                sum(region.touched for region in oldest.regions) * walk.width,
                sum(region.accesses for region in oldest.regions),
            )

    @property
    def forgotten(self) -> tuple[int, int]:
        """Return the number of blocks accessed once that are no longer tracked, and of accesses to them."""
        return self.scattered.forgotten_blocks, self.scattered.forgotten_accesses

    def places(self) -> Iterator[Place]:
        """Yield regions, then strided regions, then scattered ones; they may overlap."""
        yield from (region.place() for region in self.sweeps.regions)
        for (stride, phase, width), sweeps in self.strides.items():
            for region in sweeps.regions:
                place = region.place()
                first, end = place.first * stride + phase, (place.end - 1) * stride + phase + width
                yield replace(place, first=first, end=end, blocks=place.blocks * width, stride=stride)
        yield from self.scattered.places()


class Detector:
    """Streams, loops and hot blocks of all files; `now` is the time and the number of blocks accessed.

    `trails`: (file, is write) -> trail; without the walks that streams have not completed yet.
    """

    def __init__(self) -> None:
        self.now = Moment(0, 0)
        self.trails: dict[tuple[int, bool], Trail] = {}

    def record_run(self, t_ns: int, until_ns: int, file: int, first: int, count: int, accesses: int, write: bool) -> None:
        """Record requests for `count` blocks from `first` on, `accesses` in all, between `t_ns` and `until_ns`, which
        ascend.
        """
        trail = self.trails.get((file, write))
        if trail is None:
            trail = self.trails[file, write] = Trail()
        blocks = self.now.blocks
        stop = Moment(until_ns, blocks + count)
        repeated = trail.record_run(BlockRun(first, first + count, accesses, Moment(t_ns, blocks), stop))
        self.now = Moment(until_ns, blocks) if repeated else stop

    def finish(self) -> None:
        for trail in self.trails.values():
            trail.finish()
