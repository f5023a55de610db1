"""Steering: a deterministic state machine, for the mount (mode arena) and the simulator, that selects extents to pin.

Its input is a sequence of references to extents (one for each time that a mount fetches an extent, for a reader or as a
prefetch) and events: facts about files, opens, and budget changes. The clock is the number of references. The same
sequence always gives the same verdicts, so that replaying an access log repeats the decisions of the mount. No I/O, no
threads, no time; the caller holds the lock.

Rules: a loop space loops after two passes, or at once if its header says so. `share_budget` serves active loops first,
shorter periods (in references) before longer ones. The pinned extents of a loop are spread over it. A wanted extent is
pinned from its next reference on, and evicted when a plan assigns its memory to others.

A loop space is one file, or all shards of one model; extents are numbered across all its files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.cache.arbitration import (
    WINDOW_ALLOWANCE_BYTES,
    Loop,
    Settled,
    Share,
    cap_pins,
    reserve_bytes,
    settle,
    share_budget,
)
from llmcache.cache.loops import LoopLearner
from llmcache.units import BLOCK_BYTES

LARGE_EXTENT = 1 << 20
SMALL_EXTENT = 128 << 10
LARGE_FILE_BYTES = 32 << 20  # files of at least this size have large extents
LEAST_LOOP_BYTES = 4 << 20  # smaller files are hot (tokenizers), model or not; larger ones can turn out to loop
EXTENTS_MAX = 1 << 18  # per space: state and plans grow with the extents. Beyond 256 GiB extents become larger
LARGEST_EXTENT = 4 << 20  # the largest that is fetched whole; a space of more than 1 TiB is read page by page
HUGE_BYTES = 2 << 20  # size of a huge page, and of the extents of a large file in mode inplace


def extent_bytes_for(size_bytes: int, most: int = EXTENTS_MAX, large: int = LARGE_EXTENT) -> int:
    """Return the extent size (bytes) for a loop space of `size_bytes`, so that it has at most `most` extents.

    Large spaces have extents of `large` bytes, or a multiple.
    """
    least = large if size_bytes >= LARGE_FILE_BYTES else SMALL_EXTENT
    return least * max(1, -(-size_bytes // (least * most)))


@dataclass(frozen=True)
class SpacePart:
    """One file of a loop space, with the extents `base` .. `base + count - 1`."""

    size_bytes: int
    base: int
    count: int


class Space:
    """Facts and state of one loop space.

    `single` extents are read page by page and never pinned; `hot` extents are single too.
    """

    def __init__(self, key: str, extent_bytes: int, parts: Sequence[SpacePart], single: bool) -> None:
        self.key = key
        self.extent_bytes = extent_bytes
        self.parts = tuple(parts)
        self.count = sum(part.count for part in parts)
        self.size_bytes = BLOCK_BYTES * sum(-(-part.size_bytes // BLOCK_BYTES) for part in parts)
        self.single = bytearray([single]) * self.count
        self.hot: set[int] = set()
        self.learner = LoopLearner(self.count)
        self.wanted = bytearray(self.count)
        self.held: set[int] = set()
        self.pages: dict[int, int] = {}  # hot extent -> number of its bytes read
        self.open = True
        self.convoy = 0
        self.first = False  # the user pinned it
        self.left = False  # left to LRU, which reads less
        self.last = 0  # clock of the last reference
        self.share = Share(0, 0)
        self.settled = Settled(0, 0, [])

    @property
    def loop_bytes(self) -> int:
        """Bytes that are part of the loop, without unused extents; 0 if the space does not loop."""
        if not self.learner.looping:
            return 0
        return max(0, self.size_bytes - (self.single.count(1) + self.learner.use.unused.count(1)) * self.extent_bytes)

    @property
    def visible(self) -> int:
        """Number of extents that a whole pass references."""
        return self.single.count(0) - self.learner.use.unused.count(1)

    def blocks(self, extent: int) -> int:
        """Return the number of 4 KiB blocks of `extent` (the last one of a file may be short)."""
        part = self.part_of(extent)
        size = min(self.extent_bytes, part.size_bytes - (extent - part.base) * self.extent_bytes)
        return max(0, -(-size // BLOCK_BYTES))

    def part_of(self, extent: int) -> SpacePart:
        """Return the file that contains `extent`; IndexError beyond the last."""
        for part in self.parts:
            if extent < part.base + part.count:
                return part
        raise IndexError(f"extent: must be from 0 to {self.count - 1}, not {extent}")


HIT, KEPT, MISS = range(3)
"""Verdicts: already pinned; read from storage and now pinned; read from storage and not pinned."""

IDLE_PERIODS = 2  # a loop that misses two periods has ended or is idle

Ranges = Iterable[Sequence[int]]
Event = Sequence[Any]
"""A name of `Steering.EVENTS` and its arguments, with JSON types."""


class Steering:
    """The state machine. `limit_bytes` is the budget for pinned extents; counts are in blocks of 4 KiB.

    `on_evict(key, extent)` is called for each evicted extent, `on_plan()` after each new plan. Without `judges_use`,
    unused extents stay part of their loop, as in mounts up to version 1.0.
    """

    EVENTS = ("space", "guess", "open", "close", "convoy", "limit", "end", "lost", "first", "plan", "hold", "leave", "steer")

    def __init__(
        self,
        limit_bytes: int,
        on_evict: Callable[[str, int], None] = lambda _key, _extent: None,
        on_plan: Callable[[], None] = lambda: None,
        *,
        judges_use: bool = True,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.spaces: dict[str, Space] = {}
        self.clock = 0
        self.hit_blocks = 0
        self.miss_blocks = 0
        self.evicted_blocks = 0
        self.held_blocks = 0
        self._on_evict = on_evict
        self._on_plan = on_plan
        self._due = False
        self._judges_use = judges_use
        self._spare_bytes = 0  # left by the current plan for unused extents
        self._ranked: list[object] = []

    # References

    def reference(self, key: str, extent: int) -> int:
        """Return the verdict on a fetch of the whole `extent` of space `key`: HIT, KEPT or MISS."""
        space = self.spaces[key]
        self.clock += 1
        space.last = self.clock
        done = space.learner.record_access(extent, self.clock)
        if done is not None:
            lesson = space.learner.learn(done, space.visible)
            use = space.learner.use
            if self._judges_use and space.learner.looping:
                use.judge(extent for extent in range(space.count) if not space.single[extent])
            self._due = self._due or lesson.changed or use.changed
            self._due = self._due or (lesson.counts and self._ranked != _ranking(self._loops()))
            use.changed = False
        if self._due:
            self._plan()
        blocks = space.blocks(extent)
        if extent in space.held:
            self.hit_blocks += blocks
            return HIT
        self.miss_blocks += blocks
        if not space.wanted[extent]:
            return MISS
        space.held.add(extent)
        self.held_blocks += blocks
        return KEPT

    def page(self, key: str, extent: int, blocks: int) -> None:
        """Record that `blocks` of a single extent were read from storage; only the page cache may keep them."""
        self.miss_blocks += blocks
        space = self.spaces[key]
        if extent in space.hot:
            space.pages[extent] = min(space.extent_bytes, space.pages.get(extent, 0) + blocks * BLOCK_BYTES)

    def is_single(self, key: str, extent: int) -> bool:
        """Return True if `extent` is read page by page; extents past the end are those of a growing file."""
        single = self.spaces[key].single
        return bool(single[extent] if extent < len(single) else single[0])

    def holds(self, key: str, extent: int) -> bool:
        """Return True if `extent` of space `key` is pinned."""
        space = self.spaces.get(key)
        return space is not None and extent in space.held

    def wants(self, key: str, extent: int) -> bool:
        """Return True if the current plan pins `extent` of space `key`; the next reference may change the plan."""
        space = self.spaces.get(key)
        return space is not None and bool(space.wanted[extent])

    # Events

    def apply(self, event: Event) -> None:
        """Apply one event: the name of a method below and its arguments. ValueError for a name that is not in EVENTS."""
        name, *arguments = event
        if name not in self.EVENTS:
            raise ValueError(f"event: must be one of {', '.join(self.EVENTS)}, not {name!r}")
        getattr(self, name)(*arguments)

    def space(self, key: str, extent_bytes: int, parts: Ranges, kind: str) -> None:
        """Add a space: `parts` are (size_bytes, base, count) of its files; `kind` is "loop", "hot", "written" or "paged"."""
        space = Space(key, extent_bytes, [SpacePart(*part) for part in parts], single=kind != "loop")
        space.last = self.clock
        if kind == "hot":
            space.hot.update(range(space.count))
        self.spaces[key] = space
        self._due = True

    def guess(
        self, key: str, single: Iterable[Sequence[int]], hot: Iterable[Sequence[int]], order: Iterable[Sequence[int]]
    ) -> None:
        """Apply a header's guess, as ranges (first, end) of extents: single ones, hot ones, and the order of the rest."""
        space = self.spaces[key]
        space.learner.set_predicted_order(_extents(order, space.count))
        space.hot.update(_extents(hot, space.count))
        for extent in _extents(single, space.count):
            space.single[extent], space.wanted[extent] = 1, 0
            if extent in space.held:
                self._evict(space, extent)
        self._due = True

    def open(self, key: str) -> None:
        """Record that a client has opened a file of the space."""
        self.spaces[key].open, self.spaces[key].last = True, self.clock
        self._due = True

    def close(self, key: str) -> None:
        """Record that no client has a file of the space open: its extents make room for active loops."""
        self.spaces[key].open, self.spaces[key].last = False, self.clock
        self._due = True

    def convoy(self, key: str, steps: int) -> None:
        """Widen the space's window by `steps`, because its readers drift apart; 0 when they stay together."""
        self.spaces[key].convoy = steps
        self._due = True

    def limit(self, limit_bytes: int) -> None:
        """Set a new budget, and evict at once what no longer fits."""
        self.limit_bytes = limit_bytes
        self._plan()

    def end(self, key: str) -> None:
        """Remove the space: its file was changed or removed, or has been closed for long."""
        space = self.spaces.pop(key)
        for extent in sorted(space.held):
            self._evict(space, extent)
        self._due = True

    def lost(self, key: str, extent: int) -> None:
        """Unmark an extent that was to be pinned but could not be read. It was never resident, so this is no eviction."""
        space = self.spaces[key]
        if extent in space.held:
            space.held.remove(extent)
            self.held_blocks -= space.blocks(extent)

    def first(self, key: str) -> None:
        """Mark the space as pinned by the user: it comes before all others, open or not."""
        self.spaces[key].first = True
        self._due = True

    def leave(self, key: str) -> None:
        """Pin nothing of the space until `steer`, because steering reads more of it than LRU would."""
        self.spaces[key].left = True
        self._due = True

    def steer(self, key: str) -> None:
        """Steer the space again."""
        self.spaces[key].left = False
        self._due = True

    def plan(self) -> None:
        """Make a due plan now, for a caller that needs it before the next reference."""
        if self._due:
            self._plan()

    def hold(self, key: str, extent: int) -> None:
        """Record that an extent was read before a client requested it (a warm-up); it is pinned if the plan wants it."""
        space = self.spaces[key]
        if space.wanted[extent] and extent not in space.held:
            space.held.add(extent)
            self.held_blocks += space.blocks(extent)

    # The plan

    def _loops(self) -> list[Loop]:
        looping = [
            space
            for space in self.spaces.values()
            if space.loop_bytes and not space.left and (space.open or space.held or space.first)
        ]
        active = self._active(looping)
        return [Loop(s.key, s.loop_bytes, s.learner.period, s.key in active, s.convoy, s.first) for s in looping]

    def _active(self, looping: list[Space]) -> set[str]:
        """Return the keys of loops referenced within two periods: their own, or those of a slower loop that is active.

        Loops alternate (a draft model and its target): one is idle while the other makes a pass.
        """
        active = set()
        longest = 0
        for space in sorted(looping, key=lambda space: -_period(space)):
            longest = max(longest, _period(space))
            if space.open and self.clock - space.last <= IDLE_PERIODS * longest:
                active.add(space.key)
            elif not active:
                longest = 0
        return active

    def _plan(self) -> None:
        self._due = False
        loops = self._loops()
        self._ranked = _ranking(loops)
        budget = self.limit_bytes + WINDOW_ALLOWANCE_BYTES
        hot = sum(sum(space.pages.values()) for space in self.spaces.values())
        reserve = reserve_bytes(budget, hot, any(1 in space.single for space in self.spaces.values()))
        shares = cap_pins(share_budget(max(0, budget - reserve), loops), self.limit_bytes)
        self._spare_bytes = max(0, self.limit_bytes - sum(share.pinned_bytes for share in shares.values()))
        for space in self.spaces.values():
            if space.learner.looping:
                self._settle(space, shares.get(space.key, Share(0, 0)))
        self._on_plan()

    def _settle(self, space: Space, share: Share) -> None:
        whole = bool(space.loop_bytes) and share.pinned_bytes >= space.loop_bytes
        space.share, unused = share, space.learner.use.unused
        stale = [extent for extent in range(space.count) if unused[extent] and space.wanted[extent]]
        for extent in stale:
            space.wanted[extent] = 0
        order = [extent for extent in space.learner.order.extent_at if not (space.single[extent] or unused[extent])]
        space.settled = settle(order, space.wanted, share.pinned_bytes, space.extent_bytes, whole)
        # Unused extents stay while there is room for them.
        for extent in filter(space.held.__contains__, stale):
            size_bytes = space.blocks(extent) * BLOCK_BYTES
            if size_bytes > self._spare_bytes:
                self._evict(space, extent)
            else:
                space.wanted[extent] = 1
                self._spare_bytes -= size_bytes
        for extent in space.settled.unpinned:
            if extent in space.held:
                self._evict(space, extent)

    def _evict(self, space: Space, extent: int) -> None:
        space.held.remove(extent)
        self.held_blocks -= space.blocks(extent)
        self.evicted_blocks += space.blocks(extent)
        self._on_evict(space.key, extent)


def _period(space: Space) -> int:
    """Return the period in references; before one is observed, that of a lone reader."""
    return space.learner.period or space.count


def _ranking(loops: list[Loop]) -> list[object]:
    """Return the data that the order of service depends on: a new plan is due when it changes."""
    ranked = sorted(loops, key=lambda loop: (not loop.first, loop.period is None, loop.period or 0, loop.size_bytes))
    return [(loop.key, loop.active, loop.period is None) for loop in ranked]


def _extents(ranges: Ranges, count: int) -> array[int]:
    """Return the extents in `ranges`; IndexError if they exceed the `count` extents of the space."""
    extents = array("I")
    for first, end in ranges:
        if not 0 <= first <= end <= count or len(extents) + end - first > count:
            raise IndexError(f"ranges: {first} to {end} is not within the {count} extents of the space")
        extents.extend(range(first, end))
    return extents
