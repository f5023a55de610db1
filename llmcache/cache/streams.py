"""Streams: sort the accesses to one file into sequential walks, even if several clients read the file at the same time.

A run within `WINDOW` blocks of the expected position of a stream belongs to it, because readahead and threads access these
blocks in any order. A stream becomes *sequential* once it has covered `WINDOW` blocks in order, up or down, perhaps with a
stride.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

WINDOW = 32  # blocks: the kernel's default readahead, 128 KiB
LEAST_STEPS = 3  # equal steps that make a stride: two occur by chance
MAX_PATH = 2  # blocks skipped in either direction, per block of progress; random accesses skip a third of a window each
LONG = 4 * WINDOW  # longer windows come from long runs or strides, and have no mask of their blocks
# blocks of a file accessed by others during a pause: four alternating readers, 1 MiB requests (FUSE's maximum)
STILL = 4 * 256
DWELL = WINDOW  # runs without progress after which a stream is no walk: a window in any order has fewer


class Moment(NamedTuple):
    """A point in time: nanoseconds, and the number of blocks accessed before it in all files."""

    ns: int
    blocks: int


class BlockRun(NamedTuple):
    """Blocks first .. end - 1, accessed from `start` to `stop`; `accesses` counts blocks with repeats."""

    first: int
    end: int
    accesses: int
    start: Moment
    stop: Moment


@dataclass(frozen=True)
class Walk:
    """Blocks first .. end - 1 of a file, accessed from `start` to `stop` by a stream that began at `born`.

    `mask`: bit i stands for block first + i; 0 for all. `stride`: distance of the runs of `width` blocks; 0 without holes.
    """

    stream: int
    first: int
    end: int
    born: Moment
    start: Moment
    stop: Moment
    accesses: int
    descending: bool
    sequential: bool
    mask: int
    stride: int
    width: int


class Stream:
    """One stream; `low` .. `high` - 1 is the range covered since the last test."""

    def __init__(self, number: int, run: BlockRun) -> None:
        self.number = number
        first, end = run.first, run.end
        self.born = run.start
        self.sequential = False
        self.down = False
        self.last = (first, end)
        self.width = end - first
        self.left = 0  # blocks of the file accessed up to the end of its last run
        self.step = 0  # from run to run, if `even`
        self.even = True
        self.runs = 1
        self._begin(first, end, run.start)
        self._touch(first, end)
        self.accesses = run.accesses
        self.stop = run.stop

    def _begin(self, low: int, high: int, now: Moment) -> None:
        self.low, self.high = low, high
        self.start = self.stop = now
        self.mask = self.path = self.accesses = self.idle = 0

    def repeats(self, first: int, end: int) -> bool:
        return (first, end) == self.last

    @property
    def head(self) -> int:
        return self.low if self.down else self.high

    @property
    def strided(self) -> bool:
        return self.even and self.runs > LEAST_STEPS and abs(self.step) > self.width

    @property
    def far(self) -> bool:
        return self.even and self.runs >= LEAST_STEPS and abs(self.step) > max(self.width, WINDOW)

    def distance(self, first: int, end: int) -> int:
        """Return the distance of the run from the expected position; more than WINDOW if it cannot belong to the stream."""
        beyond = WINDOW + 1
        if self.repeats(first, end):
            return 0 if end - first < WINDOW else beyond  # repeating a long run is another pass
        if self.far:
            return 0 if first == self.last[0] + self.step else beyond
        up = beyond if self.down and self.runs > 1 else abs(first - self.high)
        down = abs(end - self.low) if self.down or (self.runs == 1 and not self.sequential) else beyond
        return min(up, down)

    def places(self) -> tuple[int, ...]:
        aim = self.last[0] + self.step if self.far else self.head
        return (aim, self.low, *self.last) if self.runs == 1 else (aim, *self.last)

    def comes_back(self, run: BlockRun) -> bool:
        """Return whether `run` revisits blocks long after their last access: another visit, not a repeat."""
        stays = run.first >= self.head if self.down else run.end <= self.head
        if not self.sequential:
            stays = self.low <= run.first and run.end <= self.high
        return stays and run.start.blocks - self.stop.blocks > LONG

    def resume(self, number: int, run: BlockRun) -> Walk | None:
        walk = None
        if self.sequential and self.high > self.low:
            walk = self._walk(sequential=True)
            self._begin(self.head, self.head, run.start)
        self.number, self.born = number, run.start
        return walk

    def take(self, run: BlockRun, at_once: bool) -> None:
        """Add a run; `at_once`: nothing else was accessed since the stream's last run."""
        first, end = run.first, run.end
        self.accesses += run.accesses
        if self.low == self.high:
            self.start = run.start
        if self.repeats(first, end):
            self.idle += not at_once
            return
        before = self.low, self.high
        gap = max(0, first - self.last[1], self.last[0] - end)
        self.path += gap
        step = first - self.last[0]
        self.even = self.even and end - first == self.width and self.step in (0, step)
        self.step = step
        self.last = (first, end)
        self.runs += 1
        if self.runs == 2 and not self.sequential:  # a first run of a window's length is tested, and has a direction
            self.down = first < self.low
        if self.sequential:  # blocks behind the head were tested before
            first, end = (first, min(end, self.high)) if self.down else (max(first, self.low), end)
        if first < end:
            self._touch(first, end)
        self.idle = self.idle + 1 if before == (self.low, self.high) else 0
        self.stop = run.stop

    def _touch(self, first: int, end: int) -> None:
        if first < self.low:
            self.mask <<= min(self.low - first, LONG)
            self.low = first
        self.high = max(self.high, end)
        if self.high - self.low <= LONG:
            self.mask |= ((1 << (end - first)) - 1) << (first - self.low)

    @property
    def due(self) -> bool:
        return self.high - self.low >= WINDOW or self.idle > DWELL

    def test(self) -> Walk | None:
        length = self.high - self.low
        if length < WINDOW:
            return self.end()
        sparse = self.even and abs(self.step) > self.width
        if sparse and not self.strided:
            return None
        touched = self.mask.bit_count() if length <= LONG else self.accesses
        ordered = sparse or (2 * touched >= length and self.path <= MAX_PATH * length)
        if not ordered:
            self.sequential = False
            return self.end()
        if not self.sequential:
            self.down = self.last[0] - self.low < self.high - self.last[1]
        walk = self._walk(sequential=True)
        self.sequential = True
        self._begin(self.head, self.head, self.stop)
        return walk

    def end(self) -> Walk | None:
        """Return the untested rest as a walk, None if it is empty; the stream starts over with its last run."""
        if self.accesses and self.high == self.low:
            # All accesses were behind the window: count them at the last of them.
            self.sequential = False
            self.low, self.high = self.last
            self.mask = (1 << (self.high - self.low)) - 1
        walk = self._walk(self.sequential) if self.accesses else None
        self.sequential, self.even, self.step, self.runs = False, True, 0, 1
        self.born = self.stop
        self._begin(*self.last, self.stop)
        self.width = self.last[1] - self.last[0]
        return walk

    def _walk(self, sequential: bool) -> Walk:
        long = self.high - self.low > LONG
        strided = self.even and abs(self.step) > self.width and (sequential or long)
        return Walk(
            stream=self.number,
            first=self.low,
            end=self.high,
            born=self.born,
            start=self.start,
            stop=self.stop,
            accesses=self.accesses,
            descending=self.down,
            sequential=sequential,
            mask=0 if strided or long else self.mask,
            stride=abs(self.step) if strided else 0,
            width=self.width if strided else 0,
        )


MAX_STREAMS = 64
MAX_YOUNG = MAX_STREAMS // 2  # streams not yet sequential: random accesses cannot displace the sequential ones
RECENT_STARTS = 4  # new streams that are checked for a stride longer than a window
_BUCKET = 2 * WINDOW  # blocks: two blocks within a window are in the same bucket or in neighboring ones


class StreamTable:
    """Assigns every run to a stream."""

    def __init__(self) -> None:
        self._young: OrderedDict[int, Stream] = OrderedDict()  # least recently used first
        self._proved: OrderedDict[int, Stream] = OrderedDict()
        self._buckets: dict[int, dict[int, Stream]] = {}
        self._places: dict[int, tuple[int, ...]] = {}  # buckets of each stream
        self._starts: deque[Stream] = deque(maxlen=RECENT_STARTS)
        self._strides: OrderedDict[int, tuple[Stream, Stream]] = OrderedDict()  # block that would make a third step
        # clock (blocks) at the end of each of the last few sequential streams
        self._ended: OrderedDict[int, int] = OrderedDict()
        self._accessed = 0  # blocks of this file
        self._latest: Stream | None = None
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._young) + len(self._proved)

    def record_run(self, run: BlockRun) -> tuple[bool, list[Walk]]:
        """Return whether `run` repeats the one before it, and the walks that it completes."""
        walks: list[Walk] = []
        stream = self._expected(run) or self._far(run.first, run.end)
        if stream is not None and stream.comes_back(run):
            self._drop(stream, walks)
            stream = None
        if stream is None:
            repeated, stream = False, self._start(run)
        else:
            repeated = stream.repeats(run.first, run.end)
            self._unfile(stream)
            if self._accessed - stream.left > STILL:  # the stream resumes after a long pause
                self._record_end(stream)
                walks += filter(None, [stream.resume(next(self._numbers), run)])
            stream.take(run, at_once=stream is self._latest)
        if stream.due and (walk := stream.test()) is not None:
            self._overtake(stream, walk, walks)
            walks.append(walk)
        self._file(stream, walks)
        self._latest = stream
        self._accessed += run.end - run.first
        stream.left = self._accessed
        return repeated, walks

    def _overtake(self, stream: Stream, walk: Walk, walks: list[Walk]) -> None:
        """End streams of earlier passes that stopped in the range of `walk`, so that their last steps come before it."""
        for other in list(self._proved.values()):
            here = walk.first - WINDOW <= other.head <= walk.end + WINDOW
            if here and other is not stream and other.stop.blocks <= walk.born.blocks:
                self._drop(other, walks)

    def end(self) -> list[Walk]:
        walks: list[Walk] = []
        for stream in [*self._young.values(), *self._proved.values()]:
            self._drop(stream, walks)
        return walks

    def is_running(self, number: int, since: Moment) -> bool:
        stream = self._proved.get(number) or self._young.get(number)
        stop = self._ended.get(number, 0) if stream is None else stream.stop.blocks
        return stop > since.blocks

    def _expected(self, run: BlockRun) -> Stream | None:
        best: Stream | None = None
        best_rank = (True, True, 0)
        first, end = run.first, run.end
        for bucket in {(block + side) // _BUCKET for block in (first, end) for side in (-WINDOW, WINDOW)}:
            for stream in self._buckets.get(bucket, {}).values():
                distance = stream.distance(first, end)
                # Prefer a stream expected exactly here, then the most recent: others ended here in an earlier pass.
                if distance <= WINDOW:
                    rank = (stream.comes_back(run), distance > 0, -stream.stop.blocks)
                    if best is None or rank < best_rank:
                        best, best_rank = stream, rank
        return best

    def _far(self, first: int, end: int) -> Stream | None:
        pair = self._strides.pop(first, None)
        if pair is None:
            return None
        older, newer = pair
        lone = all(self._young.get(stream.number) is stream and stream.runs == 1 and stream.accesses for stream in pair)
        even = newer.last[0] - older.last[0] == first - newer.last[0]  # neither has restarted elsewhere
        if not (lone and even and older.width == newer.width == end - first):
            return None
        self._unfile(newer)
        older.take(BlockRun(*newer.last, newer.accesses, newer.start, newer.stop), at_once=False)
        return older

    def _start(self, run: BlockRun) -> Stream:
        stream = Stream(next(self._numbers), run)
        first, end = run.first, run.end
        if end - first <= WINDOW:
            for earlier in self._starts:
                step = first - earlier.last[0]
                if earlier.width == end - first and abs(step) > WINDOW:
                    self._strides[first + step] = (earlier, stream)
            while len(self._strides) > MAX_STREAMS:
                self._strides.popitem(last=False)
            self._starts.append(stream)
        return stream

    def _file(self, stream: Stream, walks: list[Walk]) -> None:
        self._unfile(stream)
        table, limit = (self._proved, MAX_STREAMS - MAX_YOUNG) if stream.sequential else (self._young, MAX_YOUNG)
        table[stream.number] = stream
        places = tuple({block // _BUCKET for block in stream.places()})
        self._places[stream.number] = places
        for place in places:
            self._buckets.setdefault(place, {})[stream.number] = stream
        if len(table) > limit:
            self._drop(next(iter(table.values())), walks)

    def _unfile(self, stream: Stream) -> None:
        self._young.pop(stream.number, None)
        self._proved.pop(stream.number, None)
        for place in self._places.pop(stream.number, ()):
            bucket = self._buckets[place]
            del bucket[stream.number]
            if not bucket:
                del self._buckets[place]

    def _drop(self, stream: Stream, walks: list[Walk]) -> None:
        self._unfile(stream)
        self._record_end(stream)
        if (walk := stream.end()) is not None:
            walks.append(walk)

    def _record_end(self, stream: Stream) -> None:
        if stream.sequential:
            self._ended[stream.number] = stream.stop.blocks
            if len(self._ended) > MAX_STREAMS:
                self._ended.popitem(last=False)
