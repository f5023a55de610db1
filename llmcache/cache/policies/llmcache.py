"""What a mount keeps, decided by the very code that decides in it: `steering` for loops, `hotset` for experts.

`Recorded` replays the access log of an arena mount: every row is one reference, facts and budget changes come from the
provenance, and verdicts are those of the mount. `Cut` is what a mount would make of any other trace. Both map runs of dense
block ids to files through a `BlockSpace`; per reference they are plain Python.
"""

from __future__ import annotations

import json
import reprlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from llmcache.arrays import Flags, Int64s
from llmcache.cache.arbitration import MIN_WINDOW_BYTES
from llmcache.cache.hotset import HotSet
from llmcache.cache.models import UNKNOWN, ExpertSlices, Models, first_guess
from llmcache.cache.policies.base import Policy
from llmcache.cache.steering import (
    HIT,
    LARGE_EXTENT,
    LARGEST_EXTENT,
    LEAST_LOOP_BYTES,
    SMALL_EXTENT,
    Space,
    Steering,
    extent_bytes_for,
)
from llmcache.errors import DataError
from llmcache.trace.record import BlockSpace, Provenance, TraceFile
from llmcache.units import BLOCK_BYTES

SCHEME, SCHEME_1_0 = "llmcache.mount/2", "llmcache.mount/1"  # extra["mount"] of what llmcache.fs.daemon.logwriter writes
_MOST_EXTENTS = 1 << 22  # of all spaces of a log at a time: eight times what a mount has
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what events of any types come to
WINDOW_SHARE = 8  # of the capacity, inverted: what is read of an extent within the last so many blocks is one visit


class LLMCache(Policy):
    """What llmcachefs keeps: loops by their periods, experts by popularity and recency, the rest as the page cache does.

    On the access log of an arena mount, with its budget as the capacity: the mount's own hits, misses and evictions.
    Differs from the other policies: a block of a loop that the plan does not want is not inserted, one that it wants comes
    with its whole extent (1 MiB; 128 KiB of files below 32 MiB), an expert with all its slices, and windows beside the
    budget hold what is being read. Without `describe` all ids are one file.
    Source: io_caching section 4.1 (classes, loops by period); `hotset` for experts.
    """

    name = "llmcache"
    title = "llmcache"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        everything = BlockSpace(np.array([0]), np.array([blocks]))  # one file
        self._source: Recorded | Cut = Cut(everything, (), capacity, UNKNOWN)

    def describe(self, space: BlockSpace, files: Sequence[TraceFile], provenance: Provenance, models: Models) -> None:
        """Takes the facts on files from a mount's log, or from the file table. DataError for a damaged log."""
        if Recorded.fits(provenance):
            self._source = Recorded(space, provenance, self.capacity)
        else:
            self._source = Cut(space, files, self.capacity, models)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        """A few microseconds for each extent, or page of what does not loop."""
        hits[:] = self._source.replay(first, count)

    def _resident(self) -> Flags:
        held = np.zeros(self.blocks, np.bool_)
        held[self._source.resident()] = True
        return held

    @property
    def evictions(self) -> int:
        """Blocks that have left; what is not wanted never came in."""
        return self._source.evictions


class Recorded:
    """The rows of an arena mount's access log, one after the other, from the first.

    With another capacity than the mount's budget, its budget changes are taken in proportion.
    """

    def __init__(self, places: BlockSpace, provenance: Provenance, capacity: int) -> None:
        self._places = places
        self.core = Steering(capacity * BLOCK_BYTES, judges_use=provenance.extra.get("mount") != SCHEME_1_0)
        try:
            self._budget = int(provenance.extra["budget_bytes"])
            self._rows = int(provenance.extra["rows"])
            events = json.loads(provenance.extra["events"])
            self._events = [(int(row), list(event)) for row, event in events]
        except (*_DAMAGE, RecursionError) as error:
            raise _damaged(f"events: {error}") from error
        self._capacity = capacity * BLOCK_BYTES
        self._row = self._next = 0
        self._files: dict[int, tuple[str, int, int]] = {}  # id -> space, first extent, bytes of an extent

    @staticmethod
    def fits(provenance: Provenance) -> bool:
        """True for the log of a mount whose references are all in it: mode arena, and no row lost."""
        extra = provenance.extra
        return extra.get("mount") in (SCHEME, SCHEME_1_0) and extra.get("mode") == "arena" and not provenance.lost_events

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        """Returns the hit blocks of each row; DataError if rows and provenance do not belong together."""
        files, blocks = self._places.locate(first)
        hits = np.zeros(len(first), np.int64)
        for index, (file, block, length) in enumerate(zip(files.tolist(), blocks.tolist(), count.tolist(), strict=True)):
            self._catch_up()
            hits[index] = self._reference(file, block, length)
            self._row += 1
        if self._row == self._rows:
            self._catch_up()
        return hits

    def _reference(self, file: int, block: int, length: int) -> int:
        if file not in self._files:
            raise _damaged(f"row {self._row}: file {file} is in no event")
        key, base, extent_bytes = self._files[file]
        extent = base + block * BLOCK_BYTES // extent_bytes
        try:
            if self.core.is_single(key, extent):
                self.core.page(key, extent, length)
                return 0
            return length if self.core.reference(key, extent) == HIT else 0
        except _DAMAGE as error:
            raise _damaged(f"row {self._row}: no extent {extent} in space {reprlib.repr(key)}") from error

    def _catch_up(self) -> None:
        """Applies the events that happened before the next row."""
        while self._next < len(self._events) and self._events[self._next][0] <= self._row:
            event = self._events[self._next][1]
            self._next += 1
            try:
                self._apply(event)
            except _DAMAGE as error:
                raise _damaged(f"event {reprlib.repr(event)}: {reprlib.repr(error)}") from error

    def _apply(self, event: list[Any]) -> None:
        if event[0] == "file":
            _, file, key, part = event
            space = self.core.spaces[key]
            self._files[file] = (key, space.parts[part].base, space.extent_bytes)
        elif event[0] == "limit":
            self.core.limit(event[1] * self._capacity // self._budget)
        else:
            more = [max(0, int(count)) for _, _, count in event[3]] if event[0] == "space" else []
            if more and sum(space.count for space in self.core.spaces.values()) + sum(more) > _MOST_EXTENTS:
                raise ValueError(f"more than {_MOST_EXTENTS} extents")
            self.core.apply(event)

    @property
    def evictions(self) -> int:
        """Blocks that have left."""
        return self.core.evicted_blocks

    def resident(self) -> Int64s:
        """Returns the ids of the blocks that are held, ascending."""
        files = {(key, base): file for file, (key, base, _) in self._files.items()}
        return _sorted(_resident_ids(self.core, self._places, files))


class _Latest(NamedTuple):
    """The latest visit: of the extent with the blocks first .. end - 1 of a file."""

    space: Space
    file: int
    first: int
    end: int
    visit: list[int]


@dataclass
class _Use:
    """The latest use of an expert: whether it was there, and how far its slices have been read since, by their number."""

    hit: bool
    ends: dict[int, int] = field(default_factory=dict)


@dataclass
class _FileExperts:
    """The experts of one file; expert n has the key `first` + n."""

    file: int
    experts: ExpertSlices
    first: int
    uses: dict[int, _Use] = field(default_factory=dict)

    def blocks(self, expert: int) -> int:
        return -(-self.experts.bytes_of(expert) // BLOCK_BYTES)


class Cut:
    """Runs of any trace, cut as a mount would.

    The first run that touches an extent is the reference; runs that follow soon belong to the same visit: a mount then
    has the extent in its window. New blocks of a visit share its verdict, blocks of it that come again are hits. An expert
    comes in whole where its first block is missed: what is read of it for the same use came from storage too.

    All else is kept as the page cache keeps it, in what loops and experts leave free, least recently used first out: small
    files, single rows of tables, files that do not loop.
    """

    def __init__(self, places: BlockSpace, files: Sequence[TraceFile], capacity: int, models: Models) -> None:
        self._places = places
        self._capacity = capacity
        self._known = {file.id: file for file in files}
        self._models = models
        self.core = Steering(capacity * BLOCK_BYTES, on_plan=self._planned)
        self._spaces: dict[int, Space] = {}
        self._visits: OrderedDict[tuple[int, int], list[int]] = OrderedDict()  # -> first, end, hit
        self._visited = 0  # blocks
        self._latest = _Latest(Space("", BLOCK_BYTES, (), single=False), -1, 0, 0, [0, 0, 0])
        self._window = min(MIN_WINDOW_BYTES // BLOCK_BYTES, capacity // WINDOW_SHARE)
        self._rest: OrderedDict[int, None] = OrderedDict()
        self._mixtures: dict[int, _FileExperts] = {}
        self._hot = HotSet()
        self._expert_blocks, self._expert_room = 0, capacity
        self._evictions = 0  # of experts, and of the rest

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        """Returns the hit blocks of each run."""
        files, blocks = self._places.locate(first)
        hits: list[int] = []
        space, latest, low, high, visit = self._latest
        for start, file, block, length in zip(first.tolist(), files.tolist(), blocks.tolist(), count.tolist(), strict=True):
            end = block + length
            # Most runs go on in the extent of the one before, which either was there or comes from storage.
            if file == latest and low <= block and end <= high:
                lowest, highest, known = visit
                again, looping = lowest <= block and end <= highest, space.learner.looping
                if known or again or (looping and block >= highest and not self._rest):
                    if known:
                        hits.append(length)
                    elif looping:
                        hits.append(self._found(start, length, length * again))
                    else:
                        hits.append(self._keep(start, length))
                    if end > highest:
                        self._visited += end - highest
                        visit[1] = end
                        if self._visited > self._window:
                            self._shrink()
                    continue
            hits.append(self._run(self._spaces.get(file) or self._begin(file), file, start, block, end))
            space, latest, low, high, visit = self._latest
        return np.array(hits, np.int64)

    def _begin(self, file: int) -> Space:
        """Takes a file in."""
        known = self._known.get(file)
        size = max(known.size_bytes if known else 0, self._places.end_of(file) * BLOCK_BYTES)
        header = None if known is None else self._models.header(known)
        experts = None if known is None else self._models.experts(known)
        extent_bytes = extent_bytes_for(size, large=SMALL_EXTENT if experts else LARGE_EXTENT)
        kind = "loop" if known is None or size > LEAST_LOOP_BYTES else "hot"
        kind = "paged" if extent_bytes > LARGEST_EXTENT else kind
        count = -(-size // extent_bytes)
        self.core.space(str(file), extent_bytes, [(size, 0, count)], kind)
        space = self._spaces[file] = self.core.spaces[str(file)]
        if kind != "loop" or known is None:
            return space
        if header is not None:
            guess = first_guess(header.regions(), header.header_bytes, extent_bytes, count, experts is not None)
            self.core.guess(str(file), *([(extent, extent + 1) for extent in part] for part in guess))
        if experts is not None:
            first = max((mixture.first + mixture.experts.count for mixture in self._mixtures.values()), default=0)
            self._mixtures[file] = _FileExperts(file, experts[1], first)
            self._hot.token_uses += experts[1].token_uses
        return space

    def _run(self, space: Space, file: int, start: int, block: int, end: int) -> int:
        """The hits of one run, whose first block has the id `start`."""
        hits, size = 0, space.extent_bytes // BLOCK_BYTES
        while block < end:
            extent = block // size
            until = min(end, (extent + 1) * size)
            if not space.single[extent]:
                hits += self._visit(file, space, extent, start, block, until)
            elif file in self._mixtures:
                until, found = self._slice(self._mixtures[file], space, extent, start, block, until)
                hits += found
            else:
                hits += self._page(space, extent, start, until - block)
            start += until - block
            block = until
        return hits

    def _visit(self, file: int, space: Space, extent: int, start: int, first: int, end: int) -> int:
        """The hits among the blocks first .. end - 1, all of one extent of what loops, or may be found to loop."""
        key, size = (file, extent), space.extent_bytes // BLOCK_BYTES
        visit = self._visits.get(key)
        if visit is None:
            visit = self._visits[key] = [first, end, self.core.reference(space.key, extent) == HIT]
            self._visited += end - first
            self._shrink()
            again = 0
        else:
            self._visits.move_to_end(key)
            again = max(0, min(end, visit[1]) - max(first, visit[0]))
            before = visit[1] - visit[0]
            visit[0], visit[1] = min(first, visit[0]), max(end, visit[1])
            self._visited += visit[1] - visit[0] - before
        if self._latest.visit is not visit:
            self._latest = _Latest(space, file, extent * size, (extent + 1) * size, visit)
        if visit[2]:
            return end - first
        if not space.learner.looping:
            return self._keep(start, end - first)
        return self._found(start, end - first, again)

    def _found(self, start: int, length: int, again: int) -> int:
        """The hits among blocks of a loop: `again` of them were read in this visit, others before it was known to loop."""
        rest = self._rest
        if rest:
            for page in range(start, start + length):
                again += rest.pop(page, page) is None
        return min(again, length)

    def _shrink(self) -> None:
        while self._visited > self._window and len(self._visits) > 1:
            _, (first, end, _) = self._visits.popitem(last=False)
            self._visited -= end - first

    def _page(self, space: Space, extent: int, start: int, length: int) -> int:
        hits = self._keep(start, length)
        if hits < length:
            self.core.page(space.key, extent, length - hits)
        return hits

    def _keep(self, start: int, length: int) -> int:
        """The hits among pages that nobody steers; they are kept as those used last."""
        rest, hits = self._rest, 0
        for page in range(start, start + length):
            if page in rest:
                hits += 1
                rest.move_to_end(page)
            else:
                rest[page] = None
        if hits < length:
            self._trim()
        return hits

    def _trim(self) -> None:
        room = max(0, self._capacity - self.core.held_blocks - self._expert_blocks)
        while len(self._rest) > room:
            self._rest.popitem(last=False)
            self._evictions += 1

    # Experts

    def _slice(
        self, mixture: _FileExperts, space: Space, extent: int, start: int, block: int, until: int
    ) -> tuple[int, int]:
        """Where the part of a slice, or of what is none, that begins at `block` ends, at most at `until`; and its hits."""
        experts, offset = mixture.experts, block * BLOCK_BYTES
        number = bisect_right(experts.starts, offset) - 1
        if number < 0 or offset >= experts.starts[number] + experts.sizes[number]:
            if number + 1 < len(experts.starts):
                until = min(until, max(block + 1, experts.starts[number + 1] // BLOCK_BYTES))
            return until, self._page(space, extent, start, until - block)
        until = min(until, max(block + 1, (experts.starts[number] + experts.sizes[number]) // BLOCK_BYTES))
        expert = experts.expert_of[number]
        use = mixture.uses.get(expert)
        if use is None or block < use.ends.get(number, 0):
            use = mixture.uses[expert] = _Use(self._used(mixture, expert))
        use.ends[number] = until
        return until, (until - block) * use.hit

    def _used(self, mixture: _FileExperts, expert: int) -> bool:
        """Whether an expert that is used is there; it is from then on."""
        key = mixture.first + expert
        hit = key in self._hot
        self._hot.use(key)
        if not hit:
            self._hot.keep(key)
            self._expert_blocks += mixture.blocks(expert)
            self._trim_experts()
        return hit

    def _trim_experts(self) -> None:
        while self._expert_blocks > self._expert_room and (key := self._hot.least()) is not None:
            mixture = next(one for one in self._mixtures.values() if one.first <= key < one.first + one.experts.count)
            self._hot.drop(key)
            blocks = mixture.blocks(key - mixture.first)
            self._expert_blocks -= blocks
            self._evictions += blocks
        self._trim()

    def _planned(self) -> None:
        """Experts have what loops leave."""
        shares = [space.share for space in self.core.spaces.values()]
        taken = sum(share.pinned_bytes + share.window_bytes for share in shares) // BLOCK_BYTES
        self._expert_room = max(0, self._capacity - taken)
        self._trim_experts()

    @property
    def evictions(self) -> int:
        """Blocks that have left."""
        return self.core.evicted_blocks + self._evictions

    def resident(self) -> Int64s:
        """Returns the ids of the blocks that are held, ascending."""
        self._trim()
        held = _resident_ids(self.core, self._places, {(str(file), 0): file for file in self._spaces})
        for mixture in self._mixtures.values():
            for expert in range(mixture.experts.count):
                if mixture.first + expert in self._hot:
                    for offset, size in mixture.experts.ranges(expert):
                        ends = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
                        held.append(self._places.within(mixture.file, *ends))
        return _sorted([*held, np.fromiter(self._rest, np.int64)])


def _resident_ids(core: Steering, places: BlockSpace, files: dict[tuple[str, int], int]) -> list[Int64s]:
    found = []
    for space in core.spaces.values():
        for extent in space.held:
            part = space.part_of(extent)
            first = (extent - part.base) * space.extent_bytes // BLOCK_BYTES
            found.append(places.within(files[space.key, part.base], first, first + space.blocks(extent)))
    return found


def _sorted(parts: list[Int64s]) -> Int64s:
    """The ids in all `parts`, ascending, each once: a block may lie in two experts."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))


def _damaged(what: str) -> DataError:
    hint = "a log is replayed whole, from its first row: no slice, no concatenation; else it is damaged"
    return DataError(f"provenance: not the access log of an arena mount: {what}", hint)
