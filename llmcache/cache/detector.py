"""The detector: which blocks of which files are read once, in a loop, or again and again without order. Online.

    detector = Detector()
    detector.note(t_ns, file, first, count, write)      # each run of blocks, O(1)
    for place in detector.places(file): ...             # SEQ, LOOP or HOT, with passes and period

Runs become streams (`streams`), streams become walks; walks in sequence become passes over regions (`sweeps`), others
visits of spots (`spots`). A region walked `LOOP_PASSES` times is a loop; a spot with blocks that came again is hot; the
rest was read once. Reads and writes are apart, and so are the phases of a stride.

What it keeps is bounded, whatever comes: files, and in each of them streams, regions and cells. The standard library is
all that it needs, so that the daemon can use it.

Source: io_caching sections 3 and 4.1 (Algorithm 1). Differs from the paper: streams instead of one previous access;
repeats of a block collapse; a loop needs two equal distances and not one re-reference, so that a prompt that is tried
again is none (section 3.2); a loop is a region with one period however many pieces its passes have; a loop expires.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmcache.cache.intervals import Period
from llmcache.cache.spots import Spot, Spots
from llmcache.cache.streams import Moment, Run, Walk
from llmcache.cache.streamtable import StreamTable
from llmcache.cache.sweeps import MAX_REGIONS, Region, Sweeps

SEQ: Literal["SEQ"] = "SEQ"
LOOP: Literal["LOOP"] = "LOOP"
HOT: Literal["HOT"] = "HOT"
Class = Literal["SEQ", "LOOP", "HOT"]

LOOP_PASSES = 3  # two intervals: one re-reference makes no loop
MISSED_PERIODS = 2  # after which a loop is over
MAX_FILES = 4096  # with reads and writes apart
MAX_ENTRIES = 1 << 16  # streams, regions and cells of all files: 63 MB when measured with random ones
MAX_STRIDES = 16  # phases of strides of one file


@dataclass(frozen=True)
class Place:
    """What became of blocks first .. end - 1 of a file, of which `blocks` were accessed, `accesses` times in all.

    `passes` is how often they were walked over (visited, if HOT); first at `since`, last from `start` to `last`.
    `regularity`: part of the intervals that were about the period. `stride` and `width`: runs of `width` blocks in this
    distance; 0 for all blocks.
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
    width: int = 0
    spot: bool = False  # accessed without order
    rhythms: tuple[Period, ...] = ()  # all intervals that keep coming, shortest first; the period is the most frequent

    def expired(self, now: Moment) -> bool:
        """Whether this loop has missed MISSED_PERIODS, both in time (a slow storage) and in accesses (a user's pause)."""
        if not self.rhythms:
            return False
        longest = self.rhythms[-1]
        overdue = now.blocks - self.last.blocks > MISSED_PERIODS * longest.blocks
        return overdue and now.ns - self.last.ns >= MISSED_PERIODS * longest.ns


class Trail:
    """What one file (its reads, or its writes) has shown."""

    def __init__(self) -> None:
        self.streams = StreamTable()
        self.sweeps = Sweeps()
        self.spots = Spots()
        self.strides: OrderedDict[tuple[int, int, int], Sweeps] = OrderedDict()  # stride, phase, width of the runs
        self._strided = 0  # regions in `strides`

    def __len__(self) -> int:
        """Entries kept: what memory goes by."""
        return len(self.streams) + len(self.sweeps.regions) + len(self.spots) + self._strided

    def note(self, run: Run) -> bool:
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
                self.spots.add(first, (1 << walk.width) - 1, walk.width, walk.stop)
            self.spots.credit(walk.first, walk.accesses - walk.width * len(runs))
        elif walk.mask:
            self.spots.add(walk.first, walk.mask, walk.accesses, walk.stop)
        else:
            self.spots.credit(walk.first, walk.accesses)

    def _take_strided(self, walk: Walk) -> None:
        """A stride is a sequence of its own: in runs instead of blocks, and apart from other phases of it."""
        at = walk.first if walk.descending else walk.end - walk.width
        runs = -(-(walk.end - walk.first) // walk.stride)
        number, phase = divmod(at, walk.stride)
        first = number if walk.descending else number - runs + 1
        key = walk.stride, phase, walk.width
        sweeps = self.strides.pop(key, None) or Sweeps(MAX_REGIONS // MAX_STRIDES)
        self.strides[key] = sweeps
        self._strided -= len(sweeps.regions)
        sweeps.add(replace(walk, first=first, end=first + runs, mask=0), self.streams.is_running)
        self._strided += len(sweeps.regions)
        if len(self.strides) > MAX_STRIDES:
            _, oldest = self.strides.popitem(last=False)
            self._strided -= len(oldest.regions)
            self.spots.forget(
                sum(region.touched for region in oldest.regions) * walk.width,
                sum(region.accesses for region in oldest.regions),
            )

    @property
    def forgotten(self) -> tuple[int, int]:
        """Blocks accessed without coming back of which nothing else is kept any more, and the accesses to them."""
        return self.spots.forgotten_blocks, self.spots.forgotten_accesses

    def places(self) -> Iterator[Place]:
        """Yields regions, then strided ones, then spots, each in the order of blocks; they may overlap."""
        spots = list(self.spots.spots())
        ends = [spot.end for spot in spots]
        for region in self.sweeps.regions:
            near = spots[bisect_right(ends, region.first) : bisect_left(ends, region.end) + 1]
            visits = sum(spot.accesses * _common(spot, region) // (spot.end - spot.first) for spot in near)
            # Of very many accesses without order some look like a walk.
            yield _place_of(region, ordered=visits <= region.accesses)
        for (stride, phase, width), sweeps in self.strides.items():
            for region in sweeps.regions:
                yield _strided(_place_of(region), stride, phase, width)
        for spot in spots:
            yield Place(
                kind=HOT if spot.hot else SEQ,
                first=spot.first,
                end=spot.end,
                blocks=spot.hot or spot.once,
                passes=spot.visits,
                accesses=spot.accesses,
                since=spot.since,
                start=spot.since,
                last=spot.last,
                spot=True,
            )


def _common(spot: Spot, region: Region) -> int:
    """Blocks that lie in both."""
    return max(0, min(spot.end, region.end) - max(spot.first, region.first))


def _strided(place: Place, stride: int, phase: int, width: int) -> Place:
    first, end = place.first * stride + phase, (place.end - 1) * stride + phase + width
    return replace(place, first=first, end=end, blocks=place.blocks * width, stride=stride, width=width)


def _place_of(region: Region, ordered: bool = True) -> Place:
    looping = region.passes >= LOOP_PASSES and ordered
    return Place(
        kind=LOOP if looping else SEQ,
        first=region.first,
        end=region.end,
        blocks=region.touched,
        passes=region.passes,
        accesses=region.accesses,
        since=region.since,
        start=min(region.at_first, region.at_end, key=lambda moment: moment.blocks),
        last=region.last,
        descending=region.at_end.blocks < region.at_first.blocks,
        period=region.intervals.period() if looping else None,
        regularity=region.intervals.regularity() if looping else 0.0,
        rhythms=region.intervals.rhythms() if looping else (),
    )


Forget = Callable[[Hashable, bool, Trail], None]
"""Called with a file, whether it is its writes, and what they have shown, when there is no room for it any more."""


class Detector:
    """Streams, loops and hot blocks of all files; `now` is the time and the blocks accessed so far, repeats collapsed."""

    def __init__(self, forget: Forget | None = None) -> None:
        self.now = Moment(0, 0)
        self._trails: OrderedDict[tuple[Hashable, bool], Trail] = OrderedDict()  # least recent first
        self._entries = 0
        self._forget = forget

    def __len__(self) -> int:
        """Entries kept for all files."""
        return self._entries

    def note(self, t_ns: int, file: Hashable, first: int, count: int, write: bool = False) -> None:
        """Takes an access to blocks first .. first + count - 1 of `file`, whose key tells it from a later file at its path.

        Times must ascend. ValueError for a run without blocks.
        """
        self.note_many(t_ns, t_ns, file, first, count, count, write)

    def note_many(
        self, t_ns: int, until_ns: int, file: Hashable, first: int, count: int, accesses: int, write: bool = False
    ) -> None:
        """As `note`, for requests that made one run together: the last at `until_ns`, for `accesses` blocks in all."""
        if count < 1 or first < 0:
            raise ValueError(f"not a run of blocks: first {first}, count {count}")
        key = (file, write)
        trail = self._trails.get(key)
        if trail is None:
            trail = self._trails[key] = Trail()
        else:
            self._trails.move_to_end(key)
        before, blocks = len(trail), self.now.blocks
        stop = Moment(until_ns, blocks + count)
        repeated = trail.note(Run(first, first + count, accesses, Moment(t_ns, blocks), stop))
        self._entries += len(trail) - before
        self.now = Moment(until_ns, blocks) if repeated else stop
        while len(self._trails) > MAX_FILES or (self._entries > MAX_ENTRIES and len(self._trails) > 1):
            self._drop(next(iter(self._trails)))

    def _drop(self, key: tuple[Hashable, bool]) -> None:
        trail = self._trails.pop(key)
        self._entries -= len(trail)
        if self._forget is not None:
            trail.finish()
            self._forget(*key, trail)

    def finish(self) -> None:
        """Ends all streams: the trace is over. What comes later begins new ones."""
        for trail in self._trails.values():
            trail.finish()
        self._entries = sum(len(trail) for trail in self._trails.values())

    def trails(self) -> Iterator[tuple[Hashable, bool, Trail]]:
        """Yields (file, whether it is its writes, what they have shown), least recent first."""
        for (file, write), trail in self._trails.items():
            yield file, write, trail

    def places(self, file: Hashable, write: bool = False) -> list[Place]:
        """Returns what became of the blocks of `file`; what its streams walk at the moment is not in it yet."""
        trail = self._trails.get((file, write))
        return [] if trail is None else list(trail.places())

    def loops(self, file: Hashable, write: bool = False) -> list[Place]:
        """Returns the loops of `file` that have not expired."""
        return [place for place in self.places(file, write) if place.kind == LOOP and not place.expired(self.now)]
