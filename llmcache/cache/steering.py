"""What a mount keeps of its loops: a pure, deterministic machine that the mount (mode arena) and the simulator share.

It is driven by references to extents (one for each time that a mount fetches an extent, for a reader or ahead of one)
and by events: facts about files, opens, and budget changes. Its clock is the number of references, its verdicts depend
on nothing else, and the same sequence gives the same verdicts: an access log of a mount, replayed, shows what the mount
did. No I/O, no threads, no time; the caller brings the lock.

Rules: a loop space that was passed over twice (or whose header says so) loops; its period is counted in references;
`share_budget` serves active loops first, shorter periods before longer ones; what a loop may keep is spread over it.
A wanted extent is held from its next reference on. Held extents leave when the plan gives their room to others.

A loop space is a file, or the shards of one model in a row; its extents are numbered through all files.
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
LARGE_FILE_BYTES = 32 << 20  # from here on extents are large
LEAST_LOOP_BYTES = 4 << 20  # smaller files are hot (tokenizers), model or not; larger ones may be found to loop
EXTENTS_MAX = 1 << 18  # of one space: state and plans cost by the extent. Beyond 256 GiB extents become larger
LARGEST_EXTENT = 4 << 20  # that is fetched whole, so that a space of more than 1 TiB is read page by page
HUGE_BYTES = 2 << 20  # of a huge page, and of an extent of a large file that is steered in place


def extent_bytes_for(size_bytes: int, most: int = EXTENTS_MAX, large: int = LARGE_EXTENT) -> int:
    """Returns the size of the extents (bytes) into which a loop space of `size_bytes` is cut, at most `most` of them.

    A large one has extents of `large`, or of a multiple."""
    least = large if size_bytes >= LARGE_FILE_BYTES else SMALL_EXTENT
    return least * max(1, -(-size_bytes // (least * most)))


@dataclass(frozen=True)
class SpacePart:
    """One file of a loop space: its extents are `base` .. `base + count - 1`."""

    size_bytes: int
    base: int
    count: int


class Space:
    """Facts and state of one loop space. `single` extents are read page by page and never held; `hot` ones are of these."""

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
        self.pages: dict[int, int] = {}  # hot extent -> bytes of it that were read
        self.open = True
        self.convoy = 0
        self.first = False  # as the user wants
        self.left = False  # to LRU, which reads less
        self.last = 0  # clock of the last reference
        self.share = Share(0, 0)
        self.settled = Settled(0, 0, [])

    @property
    def loop_bytes(self) -> int:
        """Bytes that take part in the loop, without what is no longer used; 0 when nothing loops."""
        if not self.learner.looping:
            return 0
        return max(0, self.size_bytes - (self.single.count(1) + self.learner.use.unused.count(1)) * self.extent_bytes)

    @property
    def visible(self) -> int:
        """Extents that a whole pass references."""
        return self.single.count(0) - self.learner.use.unused.count(1)

    def blocks(self, extent: int) -> int:
        """Returns the 4 KiB blocks of `extent` (the last one of a file may be short)."""
        part = self.part_of(extent)
        size = min(self.extent_bytes, part.size_bytes - (extent - part.base) * self.extent_bytes)
        return max(0, -(-size // BLOCK_BYTES))

    def part_of(self, extent: int) -> SpacePart:
        """Returns the file that `extent` is in; IndexError beyond the last."""
        for part in self.parts:
            if extent < part.base + part.count:
                return part
        raise IndexError(f"extent: must be from 0 to {self.count - 1}, not {extent}")


HIT, KEPT, MISS = range(3)
"""Verdicts: held already; read from storage and held from now on; read from storage and not held."""

IDLE_PERIODS = 2  # a loop that misses two periods has ended or rests

Ranges = Iterable[Sequence[int]]
Event = Sequence[Any]
"""A name of `Steering.EVENTS` and its arguments, as JSON knows them."""


class Steering:
    """The machine. `limit_bytes` is what may be held; counts are in blocks of 4 KiB.

    `on_evict(key, extent)` is called for each held extent that leaves, `on_plan()` after each new plan. Without `judges_use`
    extents that are no longer referenced stay part of their loop, as in mounts up to version 1.0.
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
        self._spare_bytes = 0  # that the present plan leaves for what is no longer used
        self._ranked: list[object] = []

    # References

    def reference(self, key: str, extent: int) -> int:
        """Returns the verdict on a fetch of the whole `extent` of space `key`: HIT, KEPT or MISS."""
        space = self.spaces[key]
        self.clock += 1
        space.last = self.clock
        done = space.learner.note(extent, self.clock)
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
        """Takes a read of `blocks` of a single extent from storage; the page cache may keep them, this machine does not."""
        self.miss_blocks += blocks
        space = self.spaces[key]
        if extent in space.hot:
            space.pages[extent] = min(space.extent_bytes, space.pages.get(extent, 0) + blocks * BLOCK_BYTES)

    def is_single(self, key: str, extent: int) -> bool:
        """True if `extent` is read page by page; extents beyond the end are those of a growing file that is written."""
        single = self.spaces[key].single
        return bool(single[extent] if extent < len(single) else single[0])

    def holds(self, key: str, extent: int) -> bool:
        """True if `extent` of space `key` is held."""
        space = self.spaces.get(key)
        return space is not None and extent in space.held

    def wants(self, key: str, extent: int) -> bool:
        """True if the present plan would hold `extent` of space `key`; the plan may change with the next reference."""
        space = self.spaces.get(key)
        return space is not None and bool(space.wanted[extent])

    # Events

    def apply(self, event: Event) -> None:
        """Takes one event: the name of a method below and its arguments. ValueError for a name that is not in EVENTS."""
        name, *arguments = event
        if name not in self.EVENTS:
            raise ValueError(f"event: must be one of {', '.join(self.EVENTS)}, not {name!r}")
        getattr(self, name)(*arguments)

    def space(self, key: str, extent_bytes: int, parts: Ranges, kind: str) -> None:
        """A new space: `parts` are (size_bytes, base, count) of its files; `kind` is "loop", "hot", "written" or "paged"."""
        space = Space(key, extent_bytes, [SpacePart(*part) for part in parts], single=kind != "loop")
        space.last = self.clock
        if kind == "hot":
            space.hot.update(range(space.count))
        self.spaces[key] = space
        self._due = True

    def guess(
        self, key: str, single: Iterable[Sequence[int]], hot: Iterable[Sequence[int]], order: Iterable[Sequence[int]]
    ) -> None:
        """A header's word, in ranges (first, end) of extents: what is read page by page, and the order of the rest."""
        space = self.spaces[key]
        space.learner.believe(_extents(order, space.count))
        space.hot.update(_extents(hot, space.count))
        for extent in _extents(single, space.count):
            space.single[extent], space.wanted[extent] = 1, 0
            if extent in space.held:
                self._evict(space, extent)
        self._due = True

    def open(self, key: str) -> None:
        """Somebody has a file of the space open (again)."""
        self.spaces[key].open, self.spaces[key].last = True, self.clock
        self._due = True

    def close(self, key: str) -> None:
        """Nobody has a file of the space open any more: what it holds gives way to active loops."""
        self.spaces[key].open, self.spaces[key].last = False, self.clock
        self._due = True

    def convoy(self, key: str, steps: int) -> None:
        """Readers of the space drift apart and need a window wider by `steps`; 0 when they keep together."""
        self.spaces[key].convoy = steps
        self._due = True

    def limit(self, limit_bytes: int) -> None:
        """A new budget, at once: what does not fit any more leaves now."""
        self.limit_bytes = limit_bytes
        self._plan()

    def end(self, key: str) -> None:
        """The space is gone: its file was changed or removed, or has been closed for long."""
        space = self.spaces.pop(key)
        for extent in sorted(space.held):
            self._evict(space, extent)
        self._due = True

    def lost(self, key: str, extent: int) -> None:
        """An extent that was to be held could not be read. It was never there, so it counts as no eviction."""
        space = self.spaces[key]
        if extent in space.held:
            space.held.remove(extent)
            self.held_blocks -= space.blocks(extent)

    def first(self, key: str) -> None:
        """The user wants the space kept before all others, open or not."""
        self.spaces[key].first = True
        self._due = True

    def leave(self, key: str) -> None:
        """Steering reads more of the space than LRU would: nothing of it is held until `steer`."""
        self.spaces[key].left = True
        self._due = True

    def steer(self, key: str) -> None:
        """The space is steered again."""
        self.spaces[key].left = False
        self._due = True

    def plan(self) -> None:
        """Plans now what is due, and not with the next reference: somebody wants to know it before there is one."""
        if self._due:
            self._plan()

    def hold(self, key: str, extent: int) -> None:
        """An extent was brought in before anybody asked for it (a warm-up); it is held if the plan wants it."""
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
        """Keys of loops that were referenced within two periods: their own, or those of a slower loop that is active.

        Loops take turns (a draft model and its target): one rests while the other makes a pass.
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
        """Shares the budget anew; held extents that are wanted no longer leave."""
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
        # What is no longer used stays while there is room for it.
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
    """The period in references; before it is seen, that of a lone reader."""
    return space.learner.period or space.count


def _ranking(loops: list[Loop]) -> list[object]:
    """What the order of service depends on: a new plan is due when it changes."""
    ranked = sorted(loops, key=lambda loop: (not loop.first, loop.period is None, loop.period or 0, loop.size_bytes))
    return [(loop.key, loop.active, loop.period is None) for loop in ranked]


def _extents(ranges: Ranges, count: int) -> array[int]:
    """Returns the extents in `ranges`; IndexError if a space of `count` has no such, or not as many."""
    extents = array("I")
    for first, end in ranges:
        if not 0 <= first <= end <= count or len(extents) + end - first > count:
            raise IndexError(f"ranges: {first} to {end} is not within the {count} extents of the space")
        extents.extend(range(first, end))
    return extents
