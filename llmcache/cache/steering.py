"""The loop spaces of a mount or of a simulated one, and the events that change them.

`Spaces` holds the facts in all modes. `Steering`, for arena and the simulator, is a deterministic state machine whose input
is a sequence of events and of references to extents (one for each fetch of an extent, for a reader or as a prefetch). Its
clock is the number of references, so replaying an access log repeats the verdicts of the mount. No I/O, no threads, no time;
the caller holds the lock.

A space loops after two passes, or at once if its header says so. A wanted extent is pinned from its next reference on, and
evicted when a plan assigns its memory to others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from llmcache.cache.arbitration import WINDOW_ALLOWANCE_BYTES, Limits, plan
from llmcache.cache.space import Space, SpacePart
from llmcache.units import BLOCK_BYTES

HIT, KEPT, MISS = range(3)
"""Verdicts: already pinned; read from storage and now pinned; read from storage and not pinned."""

IDLE_PERIODS = 2  # a loop that misses two periods has ended or is idle

Ranges = Iterable[Sequence[int]]
Event = Sequence[Any]
"""The JSON form of an event: the name of a method, and its arguments."""

_EVENTS: set[str] = set()
_Self = TypeVar("_Self", bound="Spaces")
_Arguments = ParamSpec("_Arguments")


def _event(method: Callable[Concatenate[_Self, _Arguments], None]) -> Callable[Concatenate[_Self, _Arguments], None]:
    """Make calls of a method events: their JSON form is written to the journal first."""
    name = method.__name__
    _EVENTS.add(name)

    def recorded(self: _Self, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        assert not named, "the JSON form has no names of arguments"
        self.journal((name, *arguments))
        method(self, *arguments, **named)

    recorded.__name__, recorded.__doc__ = name, method.__doc__
    return recorded


class Spaces:
    """The loop spaces by key. `journal` receives each event, for the access log; `due` is set when a new plan is due."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.spaces: dict[str, Space] = {}
        self.with_single: set[str] = set()  # keys of the spaces with extents that are read by pages
        self.clock = 0
        self.due = False
        self._added = 0
        self.journal: Callable[[Event], None] = lambda _event: None

    def apply(self, event: Event) -> None:
        """Apply an event in its JSON form; ValueError for a name that is not one of an event."""
        name, *arguments = event
        if name not in _EVENTS:
            raise ValueError(f"event: must be one of {', '.join(sorted(_EVENTS))}, not {name!r}")
        getattr(self, name)(*arguments)

    @_event
    def space(self, key: str, extent_bytes: int, parts: Ranges, kind: str) -> None:
        """Add a space: `parts` are (size_bytes, base, count) of its files; `kind` is "loop", "hot", "written" or "paged"."""
        self._add(Space(key, extent_bytes, (SpacePart(*part) for part in parts), kind))

    def add(self, space: Space) -> None:
        parts = [(part.size_bytes, part.base, part.count) for part in space.parts]
        self.journal(("space", space.key, space.extent_bytes, parts, space.kind))
        self._add(space)

    def _add(self, space: Space) -> None:
        space.last, space.open = self.clock, True
        self._added += 1
        space.number = self._added
        self.spaces[space.key] = space
        if 1 in space.single:
            self.with_single.add(space.key)
        self.due = True

    @_event
    def guess(self, key: str, single: Ranges, hot: Ranges, order: Ranges) -> None:
        """Apply a guess: ranges (first, end) of the single extents, the hot ones, and the order of the rest."""
        space = self.spaces[key]
        extents = _extents(order, space.count)
        if extents or not space.learner.looping:
            space.set_predicted_order(extents)
        space.hot.update(_extents(hot, space.count))
        self._make_single(space, _extents(single, space.count))
        if 1 in space.single:
            self.with_single.add(key)

    @_event
    def open(self, key: str) -> None:
        self._set_open(self.spaces[key], True)

    @_event
    def close(self, key: str) -> None:
        self._set_open(self.spaces[key], False)

    @_event
    def convoy(self, key: str, steps: int) -> None:
        """Widen the space's window by `steps`, because its readers drift apart; 0 when they stay together."""
        self.spaces[key].convoy = steps
        self.due = True

    @_event
    def limit(self, limit_bytes: int) -> None:
        self._set_limit(limit_bytes)

    @_event
    def end(self, key: str) -> None:
        self.with_single.discard(key)
        self._remove(self.spaces.pop(key))

    @_event
    def first(self, key: str) -> None:
        """Mark the space as pinned by the user: it comes before all others, open or not."""
        self.spaces[key].user_pinned = True
        self.due = True

    @_event
    def leave(self, key: str) -> None:
        """Pin nothing of the space until `steer`, because steering reads more of it than LRU would."""
        self.spaces[key].left = True
        self.due = True

    @_event
    def steer(self, key: str) -> None:
        self.spaces[key].left = False
        self.due = True

    @_event
    def plan(self) -> None:
        self._plan_if_due()

    def _set_open(self, space: Space, is_open: bool) -> None:
        space.open, space.last = is_open, self.clock
        self.due = True

    def _make_single(self, space: Space, extents: Sequence[int]) -> None:
        space.make_single(extents)
        self.due = True

    def _set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.due = True

    def _remove(self, space: Space) -> None:
        self.due = True

    def _plan_if_due(self) -> None:
        pass  # the mount makes its own plans


class Steering(Spaces):
    """The state machine. `limit_bytes` is the budget for pinned extents; counts are in blocks of 4 KiB.

    `on_evict(key, extent)` is called for each evicted extent, `on_plan()` after each new plan. Without `judges_use`, unused
    extents stay part of their loop, as in mounts up to version 1.0.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_evict: Callable[[str, int], None] = lambda _key, _extent: None,
        on_plan: Callable[[], None] = lambda: None,
        *,
        judges_use: bool = True,
    ) -> None:
        super().__init__(limit_bytes)
        self.hit_blocks = 0
        self.miss_blocks = 0
        self.evicted_blocks = 0
        self.held_blocks = 0
        self.experts_bytes = 0  # left by the current plan for experts
        self._hot_bytes = 0  # of hot pages that were read
        self._looping: dict[str, Space] = {}
        self.on_evict = on_evict
        self.on_plan = on_plan
        self._judges_use = judges_use
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
            if space.learner.looping:
                self._looping[key] = space
            use = space.learner.use
            if self._judges_use and space.learner.looping:
                use.judge(extent for extent in range(space.count) if not space.single[extent])
            self.due = self.due or lesson.changed or use.changed
            self.due = self.due or (lesson.counts and self._ranked != _ranking(self._competing()))
            use.changed = False
        self._plan_if_due()
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
            before = space.pages.get(extent, 0)
            space.pages[extent] = min(space.extent_bytes, before + blocks * BLOCK_BYTES)
            self._hot_bytes += space.pages[extent] - before

    def is_single(self, key: str, extent: int) -> bool:
        single = self.spaces[key].single
        return bool(single[extent] if extent < len(single) else single[0])

    # More events

    @_event
    def lost(self, key: str, extent: int) -> None:
        """Unmark an extent that was to be pinned but could not be read; this is no eviction."""
        space = self.spaces[key]
        if extent in space.held:
            space.held.remove(extent)
            self.held_blocks -= space.blocks(extent)

    @_event
    def hold(self, key: str, extent: int) -> None:
        """Record that an extent was read before a client requested it; it is pinned if the plan wants it."""
        space = self.spaces[key]
        if space.wanted[extent] and extent not in space.held:
            space.held.add(extent)
            self.held_blocks += space.blocks(extent)

    def _make_single(self, space: Space, extents: Sequence[int]) -> None:
        super()._make_single(space, extents)
        if space.learner.looping:
            self._looping[space.key] = space
        for extent in filter(space.held.__contains__, extents):
            self._evict(space, extent)

    def _set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._make_plan()  # at once, to evict what no longer fits

    def _remove(self, space: Space) -> None:
        for extent in sorted(space.held):
            self._evict(space, extent)
        self._looping.pop(space.key, None)
        self._hot_bytes -= sum(space.pages.values())
        self.due = True

    # The plan

    def _plan_if_due(self) -> None:
        if self.due:
            self._make_plan()

    def _loops(self) -> list[Space]:
        return sorted(self._looping.values(), key=lambda space: space.number)

    def _competing(self) -> list[tuple[Space, bool]]:
        """Return the loops that share the budget, each with whether it is active.

        A loop is active within two periods of its last reference: its own, or those of a slower active loop, because loops
        alternate (a draft model and its target).
        """
        competing = [
            space
            for space in self._loops()
            if space.loop_bytes and not space.left and (space.open or space.held or space.user_pinned)
        ]
        active: set[str] = set()
        longest = 0
        for space in sorted(competing, key=lambda space: -_period(space)):
            longest = max(longest, _period(space))
            if space.open and self.clock - space.last <= IDLE_PERIODS * longest:
                active.add(space.key)
            elif not active:
                longest = 0
        return [(space, space.key in active) for space in competing]

    def _make_plan(self) -> None:
        self.due = False
        competing = self._competing()
        self._ranked = _ranking(competing)
        room_bytes = self.limit_bytes + WINDOW_ALLOWANCE_BYTES
        limits = Limits(room_bytes, self.limit_bytes, self._hot_bytes, bool(self.with_single))
        made = plan(self._loops(), {space.key: is_active for space, is_active in competing}, limits)
        self.experts_bytes = made.experts_bytes
        for key, plan_of_space in made.spaces.items():
            space = self.spaces[key]
            space.adopt(plan_of_space)
            for extent in filter(space.held.__contains__, plan_of_space.unpin):
                self._evict(space, extent)
        self.on_plan()

    def _evict(self, space: Space, extent: int) -> None:
        space.held.remove(extent)
        self.held_blocks -= space.blocks(extent)
        self.evicted_blocks += space.blocks(extent)
        self.on_evict(space.key, extent)


def _period(space: Space) -> int:
    return space.learner.period or space.count


def _ranking(competing: list[tuple[Space, bool]]) -> list[object]:
    periods = [(space, is_active, space.learner.period) for space, is_active in competing]
    periods.sort(key=lambda each: (not each[0].user_pinned, each[2] is None, each[2] or 0, each[0].loop_bytes))
    return [(space.key, is_active, period is None) for space, is_active, period in periods]


def _extents(ranges: Ranges, count: int) -> array[int]:
    extents = array("I")
    for first, end in ranges:
        if not 0 <= first <= end <= count or len(extents) + end - first > count:
            raise IndexError(f"ranges: {first} to {end} is not within the {count} extents of the space")
        extents.extend(range(first, end))
    return extents
