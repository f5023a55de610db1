"""The detector: which blocks of which files are read once, in a loop, or again and again without order. Online.

    detector = Detector()
    detector.note(t_ns, until_ns, file, first, count, accesses, write)      # each run of blocks, O(1)
    for place in detector.trails[file, write].places(): ...                 # SEQ, LOOP or HOT, with passes and period

Runs become streams (`streams`), streams become walks; walks in sequence become passes over regions (sweeps), others
visits of scattered blocks. A region walked `LOOP_PASSES` times is a loop; scattered blocks that came again are hot; the
rest was read once. Reads and writes are apart, and so are the phases of a stride.

What it keeps of a file is bounded, whatever comes: streams, regions and cells, a kilobyte for each at most.

Source: io_caching sections 3 and 4.1 (Algorithm 1). Differs from the paper: streams instead of one previous access;
repeats of a block collapse; a loop needs two equal distances and not one re-reference, so that a prompt that is tried
again is none (section 3.2); a loop is a region with one period however many pieces its passes have; a loop expires.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
MISSED_PERIODS = 2  # after which a loop is over
MAX_STRIDES = 16  # phases of strides of one file


@dataclass(frozen=True)
class Place:
    """What became of blocks first .. end - 1 of a file, of which `blocks` were accessed, `accesses` times in all.

    `passes` is how often they were walked over (visited, if HOT); first at `since`, last from `start` to `last`.
    `regularity`: part of the intervals that were about the period. `stride`: distance of its runs; 0 for all blocks.
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
    rhythms: tuple[Period, ...] = ()  # all intervals that keep coming, shortest first; the period is the most frequent

    def expired(self, now: Moment) -> bool:
        """Whether this loop has missed MISSED_PERIODS, both in time (a slow storage) and in accesses (a user's pause)."""
        if not self.rhythms:
            return False
        longest = self.rhythms[-1]
        overdue = now.blocks - self.last.blocks > MISSED_PERIODS * longest.blocks
        return overdue and now.ns - self.last.ns >= MISSED_PERIODS * longest.ns


def common(one: Place | SweepRegion, other: Place | SweepRegion) -> int:
    """Blocks that lie between the ends of both."""
    return max(0, min(one.end, other.end) - max(one.first, other.first))


MAX_REGIONS = 256  # of one file; beyond that neighbours become one
ONE_SWEEP = 16  # neighbours belong to one sweep if the time between them is so small a part of what it takes

IsRunning = Callable[[int, Moment], bool]  # whether the stream with this number was still coming on after that moment


@dataclass(slots=True)
class SweepRegion:
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

    def part(self, first: int, end: int) -> SweepRegion:
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

    def place(self, ordered: bool = True) -> Place:
        """What became of it; not `ordered`: it only looks like a walk."""
        looping = self.passes >= LOOP_PASSES and ordered
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
    """Where one file was walked over in sequence: regions in the order of their blocks, at most `limit` of them.

    They are disjoint, each with one history. A pass over a region moves the border between what has been walked in this
    pass and what has not: a loop is one region, or two while it is being walked. A pass counts only if the walk before it
    was over: readers of one loop that follow each other make one pass together.
    """

    def __init__(self, limit: int = MAX_REGIONS) -> None:
        self.regions: list[SweepRegion] = []
        self.limit = limit

    def add(self, walk: Walk, is_running: IsRunning) -> None:
        """Takes a sequential walk into account."""
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
        """Takes `walk` if it goes on in the region before `index`, and all that happens is that this region gets longer.

        That is what nearly all walks do; `add` does the same for them at several times the cost.
        """
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
        """Joins pairs of neighbours, those that lose least first, until a quarter of the room is free."""
        # What joining two would hide: a difference in passes, and how many blocks get another history.
        losses = [
            (left.passes != right.passes, min(left.touched, right.touched) + right.first - left.end, index)
            for index, (left, right) in enumerate(pairwise(self.regions))
        ]
        gone: set[int] = set()
        for *_, index in sorted(losses):
            if len(self.regions) - len(gone) <= self.limit * 3 // 4:
                break
            if index not in gone and index + 1 not in gone and index - 1 not in gone:
                self.regions[index + 1] = _join(self.regions[index], self.regions[index + 1])
                gone.add(index)
        self.regions = [region for index, region in enumerate(self.regions) if index not in gone]


def _again(old: SweepRegion, new: SweepRegion, together: bool) -> SweepRegion:
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


def _joined(regions: list[SweepRegion]) -> list[SweepRegion]:
    """Returns `regions` with neighbours made one where they have one history."""
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


MAX_CELLS = 256  # of one file: 64 MiB of hot blocks, one by one
PLACES = 64
_ALL = (1 << PLACES) - 1


@dataclass(slots=True)
class ScatteredCell:
    """64 places: bit i of `seen` (accessed) and of `again` (in more than one visit). `visits` come and go between `since`
    and `last`.
    """

    seen: int
    again: int
    visits: int
    accesses: int
    since: Moment
    last: Moment


class ScatteredBlocks:
    """The blocks of one file that were accessed in no order, and which of them came again.

    Kept in at most `MAX_CELLS` cells of 64 places; a place is a block, or a power of two of blocks once all cells are full
    of hot blocks. Cells in which nothing came again are given up first: what is hot comes often, and survives.
    """

    def __init__(self) -> None:
        self.shift = 0  # log2 of the blocks of a place
        self.forgotten_blocks = 0  # accessed once, in cells given up
        self.forgotten_accesses = 0
        self._cells: OrderedDict[int, ScatteredCell] = OrderedDict()  # least recent first

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
                cell = ScatteredCell(bits, 0, 1, share, now, now)
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

    def places(self) -> Iterator[Place]:
        """Yields cells in the order of blocks; one that has both hot and other blocks is cut to the hot ones."""
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
    """Returns `bits` with each pair made one, set if either was."""
    bits |= bits >> 1
    return sum(((bits >> 2 * place) & 1) << place for place in range(PLACES // 2))


class Trail:
    """What one file (its reads, or its writes) has shown."""

    def __init__(self) -> None:
        self.streams = StreamTable()
        self.sweeps = Sweeps()
        self.scattered = ScatteredBlocks()
        self.strides: OrderedDict[tuple[int, int, int], Sweeps] = OrderedDict()  # stride, phase, width of the runs

    def note(self, run: BlockRun) -> bool:
        """Takes a run; returns whether it only repeats the one before it."""
        repeated, walks = self.streams.note(run)
        for walk in walks:
            self._take(walk)
        return repeated

    def finish(self) -> None:
        """Ends all streams, so that what they walked last is counted as well."""
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
        """A stride is a sequence of its own: in runs instead of blocks, and apart from other phases of it."""
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
        """Blocks accessed without coming back of which nothing else is kept any more, and the accesses to them."""
        return self.scattered.forgotten_blocks, self.scattered.forgotten_accesses

    def places(self) -> Iterator[Place]:
        """Yields regions, then strided ones, then scattered ones, each in the order of blocks; they may overlap."""
        scattered = list(self.scattered.places())
        ends = [place.end for place in scattered]
        for region in self.sweeps.regions:
            near = scattered[bisect_right(ends, region.first) : bisect_left(ends, region.end) + 1]
            visits = sum(place.accesses * common(place, region) // (place.end - place.first) for place in near)
            # Of very many accesses without order some look like a walk.
            yield region.place(ordered=visits <= region.accesses)
        for (stride, phase, width), sweeps in self.strides.items():
            for region in sweeps.regions:
                place = region.place()
                first, end = place.first * stride + phase, (place.end - 1) * stride + phase + width
                yield replace(place, first=first, end=end, blocks=place.blocks * width, stride=stride)
        yield from scattered


class Detector:
    """Streams, loops and hot blocks of all files; `now` is the time and the blocks accessed so far, repeats collapsed.

    `trails`: by file and whether it is its writes, what they have shown; what streams walk at the moment is not in it yet.
    """

    def __init__(self) -> None:
        self.now = Moment(0, 0)
        self.trails: dict[tuple[int, bool], Trail] = {}

    def note(self, t_ns: int, until_ns: int, file: int, first: int, count: int, accesses: int, write: bool) -> None:
        """Takes requests for blocks first .. first + count - 1 of the file with this number, `accesses` blocks in all.

        The first came at `t_ns`, the last at `until_ns`. Times must ascend.
        """
        trail = self.trails.get((file, write))
        if trail is None:
            trail = self.trails[file, write] = Trail()
        blocks = self.now.blocks
        stop = Moment(until_ns, blocks + count)
        repeated = trail.note(BlockRun(first, first + count, accesses, Moment(t_ns, blocks), stop))
        self.now = Moment(until_ns, blocks) if repeated else stop

    def finish(self) -> None:
        """Ends all streams: the trace is over. What comes later begins new ones."""
        for trail in self.trails.values():
            trail.finish()
