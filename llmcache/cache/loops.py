"""Loop detection by extent: the order, period and use of a loop space's extents, and the positions of its readers.

An order maps a *rank* (the position in the loop) to an extent, and starts as file order. A completed pass becomes the new
order; extents without a touch (pinned ones cause no request) stay behind the extent that preceded them. Mounts (clock in
nanoseconds) and the deterministic core in `steering` (clock in references) use this module; the trace classifier
(`detector`) works on runs of blocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

OCTAVES = 64  # clocks are 64-bit
TOLERANCE = 0.25  # half the spread of an octave (1 : 2) around its middle, 1.5
RARE = 8  # an octave with fewer than 1/RARE of all intervals is an accident, not a rhythm
RECENT = 9  # intervals per octave whose times are stored: an odd number has a middle


@dataclass
class _Octave:
    count: int = 0
    blocks: int = 0
    times_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def mean(self) -> float:
        return self.blocks / self.count


@dataclass(frozen=True)
class Period:
    """How often a loop repeats: time (ns) and blocks accessed from one pass to the next."""

    ns: int
    blocks: int


class Intervals:
    """Intervals between the passes over one region, and the period that they show; at most `OCTAVES` entries.

    Intervals are counted by octave of the blocks accessed in between, because pauses and slow storage do not change these.
    The time of the most frequent octave is the median of its latest times.
    """

    def __init__(self) -> None:
        self._octaves: dict[int, _Octave] = {}

    def __len__(self) -> int:
        return sum(octave.count for octave in self._octaves.values())

    def add(self, ns: int, blocks: int) -> None:
        blocks, ns = max(1, blocks), max(0, ns)
        octave = self._octaves.setdefault(min(OCTAVES - 1, blocks.bit_length()), _Octave())
        octave.count += 1
        octave.blocks += blocks
        octave.times_ns.append(ns)

    def copy(self) -> Intervals:
        twin = Intervals()
        for key, octave in self._octaves.items():
            twin._octaves[key] = _Octave(octave.count, octave.blocks, deque(octave.times_ns, RECENT))
        return twin

    def period(self) -> Period | None:
        if not self._octaves:
            return None
        chosen = self._commonest()
        times = [time for octave in chosen for time in octave.times_ns]
        return Period(round(median(times)), sum(octave.blocks for octave in chosen) // _count(chosen))

    def regularity(self) -> float:
        return _count(self._commonest()) / len(self) if self._octaves else 0.0

    def _commonest(self) -> list[_Octave]:
        return max((self._alike(key) for key in sorted(self._octaves, reverse=True)), key=_count)

    def _alike(self, key: int) -> list[_Octave]:
        """Return the octave `key`, and a neighbor with about the same mean."""
        mine = self._octaves[key]
        near = (self._octaves[other] for other in (key - 1, key + 1) if other in self._octaves)
        return [mine, *(octave for octave in near if is_about(octave.mean, mine.mean))]

    def rhythms(self) -> tuple[Period, ...]:
        """Return all recurring intervals, shortest first. A layer read twice a pass has two."""
        least = max(1, len(self) // RARE)
        shown = [octave for _, octave in sorted(self._octaves.items()) if octave.count >= least]
        return tuple(Period(round(median(octave.times_ns)), octave.blocks // octave.count) for octave in shown)


def is_about(value: float, other: float) -> bool:
    """Return whether two intervals can be the same period: they differ by less than TOLERANCE of the longer one."""
    return abs(value - other) < TOLERANCE * max(value, other)


def _count(octaves: list[_Octave]) -> int:
    return sum(octave.count for octave in octaves)


ORDER_TOLERANCE = 0.05  # share of backward steps above which a pass replaces the order
CHANCE_DISORDER = 0.25  # share of backward steps above which a pass looks random; in random order it is about 0.5
OVERDUE = 3  # periods after its start at which a pass ends even without a repeat
LEAST_APART = 16  # extents: threads of one reader are closer to each other
PROOF = 8  # a second pass has to repeat 1/PROOF of a scan before the scan counts as a loop


@dataclass(frozen=True)
class Pass:
    """One completed pass: extents in the order of their first touch; `duration` ends when the next pass begins."""

    extents: Sequence[int]
    duration: int


class PassRecorder:
    """Cuts a sequence of touched extents into passes, with any clock that never decreases.

    A repeat ends the pass if at least half of the pass, and at least `least` extents, lie between the two touches: threads
    on neighboring stripes touch an extent twice within a short distance. A loop over less than half of the previous pass
    ends that pass once 1/PROOF of its extents have repeated, each at least `least` extents after its first touch, with no
    new extent in between.
    """

    def __init__(self, least: int = 2) -> None:
        self.least = least
        self._extents = array("I")  # in the order of their first touch
        self._places = array("I")  # by extent: its position in this pass, counted from 1; 0 for none
        self._again: dict[int, int] = {}  # extents touched again since the last new one -> time of the repeat
        self._started = 0

    def __len__(self) -> int:
        return len(self._extents)

    def record_access(self, extent: int, now: int) -> Pass | None:
        if extent >= len(self._places):
            self._places.frombytes(bytes(self._places.itemsize * (extent + 1 - len(self._places))))
        place = self._places[extent]
        if not place:
            if not self._extents:
                self._started = now
            self._extents.append(extent)
            self._places[extent] = len(self._extents)
            self._again.clear()
            return None
        apart = len(self._extents) - (place - 1)
        if apart < self.least:
            return None
        self._again.setdefault(extent, now)
        if apart >= len(self._extents) // 2:
            return self._end({extent: now})
        if len(self._again) >= max(self.least, len(self._extents) // PROOF):
            return self._end(self._again)
        return None

    def cut(self, now: int, after: int) -> Pass | None:
        """End the pass if it began more than `after` ago and is not empty; the next touch begins another."""
        if not self._extents or now - self._started <= after:
            return None
        done = Pass(self._extents, now - self._started)
        self._extents, self._places, self._again = array("I"), array("I"), {}
        return done

    def _end(self, again: dict[int, int]) -> Pass:
        started = next(iter(again.values()))
        done = Pass(self._extents, started - self._started)
        self._extents = array("I", again)
        self._places = array("I", bytes(self._places.itemsize * len(self._places)))
        for place, extent in enumerate(again, 1):
            self._places[extent] = place
        self._again = {}
        self._started = started
        return done


class LoopOrder:
    """A permutation of the extents, initially in file order: `rank_of[extent]` and `extent_at[rank]`."""

    def __init__(self, count: int) -> None:
        self.reset(count)

    def __len__(self) -> int:
        return len(self.extent_at)

    def reset(self, count: int) -> None:
        self.extent_at = array("I", range(count))
        self.rank_of = self.extent_at[:]

    def extend(self, count: int) -> None:
        more = array("I", range(len(self), count))
        self.extent_at.extend(more)
        self.rank_of.extend(more)

    def adopt(self, seen: Sequence[int]) -> array[int]:
        """Make `seen` (distinct extents, in touch order) the order; return the old rank of each new rank."""
        places = array("i", [-1]) * len(self)
        for index, extent in enumerate(seen):
            places[extent] = index
        # Each extent in `seen` leads the unseen extents that followed it before; they keep their distance to it.
        leader, leaders = -1, array("i")
        for extent in self.extent_at:
            leader = places[extent] if places[extent] >= 0 else leader
            leaders.append(leader)
        old_ranks = array("I", sorted(range(len(self)), key=leaders.__getitem__))
        old = self.extent_at[:]
        for rank, old_rank in enumerate(old_ranks):
            self.extent_at[rank] = old[old_rank]
            self.rank_of[old[old_rank]] = rank
        return old_ranks

    def disorder(self, seen: Sequence[int]) -> float:
        return _backward_share([self.rank_of[extent] for extent in seen])


def disagreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the share (0..1) of steps of the pass `second` that go backward in the order of the pass `first`."""
    place = {extent: index for index, extent in enumerate(first)}
    return _backward_share([place[extent] for extent in second if extent in place])


def _backward_share(ranks: Sequence[int]) -> float:
    if len(ranks) < 2:
        return 0.0
    back = sum(later < earlier for earlier, later in pairwise(ranks))
    return max(0, back - 1) / (len(ranks) - 1)


UNUSED_PASSES = 2  # whole passes without a touch after which an extent no longer counts as part of the loop
UNUSED_GAPS = 2  # the same limit, in multiples of the extent's usual number of passes between two touches
RUN, RUN_NEAR = 2, 4  # RUN of the RUN_NEAR preceding extents were touched in the same pass
_GAP_MAX = 100  # passes; fits into a byte


class RecentUse:
    """Which extents of a loop space were touched in the last few passes; the others are `unused`.

    An extent becomes unused after UNUSED_PASSES whole passes without a touch, or after UNUSED_GAPS times its usual number of
    passes between two touches, whichever is longer (a fast reader ends several passes while a slow one makes one). It is
    used again once a reader touches it in a run of neighbors, or twice within UNUSED_PASSES passes, which random reads of
    table rows do not. Every extent starts as used.
    """

    def __init__(self, count: int) -> None:
        self.passes = 0  # number of passes that have ended, however short
        self.unused = bytearray(count)  # by extent
        self.changed = False  # set when `unused` changes; the owner clears it
        self.returned = 0  # extents that became used again in this pass or the previous one
        self._returned_now = 0
        self._last = array("I", bytes(4 * count))  # by extent: `passes` at its last touch
        self._gap = bytearray(b"\1" * count)  # by extent: passes between its last two touches
        self._usual = bytearray(b"\1" * count)  # by extent: the smaller one of its last two gaps

    def resize(self, count: int) -> None:
        more = count - len(self.unused)
        if more < 0:
            self.unused, self._last, self._gap, self._usual, more = bytearray(), array("I"), bytearray(), bytearray(), count
        self.unused.extend(bytes(more))
        self._last.extend([self.passes] * more)
        self._gap.extend(b"\1" * more)
        self._usual.extend(b"\1" * more)

    def touch(self, extent: int) -> None:
        gap = self.passes - self._last[extent]
        if not gap:
            return
        gap = min(gap, _GAP_MAX)
        self._usual[extent] = min(gap, self._gap[extent])
        self._gap[extent] = gap
        self._last[extent] = self.passes
        if self.unused[extent] and (gap <= UNUSED_PASSES or self._ends_run(extent)):
            self.unused[extent] = 0
            self.returned += 1
            self._returned_now += 1
            self.changed = True

    def _ends_run(self, extent: int) -> bool:
        return self._last[max(0, extent - RUN_NEAR) : extent].count(self.passes) >= RUN

    def end_pass(self) -> None:
        self.passes += 1
        self.returned, self._returned_now = self._returned_now, 0

    def untouched(self, extent: int) -> int:
        return max(0, self.passes - self._last[extent] - 1)

    def excuse(self, extents: Iterable[int]) -> None:
        """Count used extents as touched in the last pass, because their touches could not be observed."""
        for extent in extents:
            if not self.unused[extent]:
                self._last[extent] = max(self._last[extent], self.passes - 1)

    def judge(self, extents: Iterable[int]) -> list[int]:
        """Mark and return the extents that are no longer used. All touches of `extents` must have been observed."""
        latest, last, usual, unused = self.passes - 1, self._last, self._usual, self.unused
        found = [
            extent
            for extent in extents
            if latest - last[extent] >= UNUSED_PASSES
            and not unused[extent]
            and latest - last[extent] >= UNUSED_GAPS * usual[extent]
        ]
        for extent in found:
            unused[extent] = 1
        self.changed = self.changed or bool(found)
        return found

    def is_late(self, extent: int) -> bool:
        return self.untouched(extent) >= self._usual[extent] and not self.unused[extent]


class Lesson(NamedTuple):
    """The result of a pass. `old_ranks` contains the old rank of each new rank if the order was replaced."""

    counts: bool  # the pass is evidence; if False, nothing changed
    changed: bool = False  # the class or the order changed: a new plan is due
    old_ranks: array[int] | None = None


class LoopLearner:
    """Order, class and period of `count` extents; `looping` after a header's guess or an observed second pass."""

    def __init__(self, count: int) -> None:
        self.order = LoopOrder(count)
        self.looping = False
        self.guessed = False
        self.guess = array("I")  # extents in the order of computation, from the headers
        self.passes = 0
        self.period: int | None = None  # the usual one: a pause does not change it
        self.use = RecentUse(count)
        self._recorder = PassRecorder(_least_apart(count))
        self._intervals = Intervals()
        self._unproved: Sequence[int] = ()  # the last pass in an order other than the current one
        # the longest pass over a space that is not known to loop; re-reading one page does not make it a loop
        self._scan: Pass | None = None

    def resize(self, count: int) -> None:
        if count > len(self.order):
            self.order.extend(count)
        else:
            self.order.reset(count)
        self.use.resize(count)

    def set_predicted_order(self, guess: Iterable[int]) -> None:
        """Mark the space as looping; `guess` is appended to the order of the first pass."""
        self.guess.extend(guess)
        self.looping = self.guessed = True

    def record_access(self, extent: int, now: int) -> Pass | None:
        """Record a touch; return the pass that it ends, or that it proves to have been one, if any."""
        done = self._recorder.record_access(extent, now)
        if done is not None:
            self.use.end_pass()
        self.use.touch(extent)
        if self.looping:
            return done
        if done is not None and (self._scan is None or len(done.extents) >= len(self._scan.extents)):
            self._scan = done
        if self._scan is None or len(self._recorder) < max(2, len(self._scan.extents) // PROOF):
            return None
        done, self._scan = self._scan, None
        return done

    def expect(self, visible: int) -> None:
        """Set the number of extents whose touches are visible; if there are few, closer touches end a pass."""
        self._recorder.least = _least_apart(visible)

    def cut(self, last: int) -> Pass | None:
        """End a pass that exceeds OVERDUE periods: of a mostly resident loop, too few touches are observed."""
        done = None if self.period is None else self._recorder.cut(last, OVERDUE * self.period)
        if done is not None:
            self.use.end_pass()
        return done

    def learn(self, done: Pass, visible: int) -> Lesson:
        """Use a completed pass as evidence, unless it covers less than half of the `visible` extents, or looks random.

        `visible`: the number of extents that are in use and whose touches can be observed.
        """
        whole = len(done.extents) >= visible * 4 // 5
        if len(done.extents) < max(1, visible // 2):
            return Lesson(counts=False)
        if not (self.looping or whole) and self.order.disorder(done.extents) > CHANCE_DISORDER:
            return Lesson(counts=False)
        self.passes += 1
        # Pages pinned in the page cache cause no touches. Scaling by the visible share makes passes comparable at any
        # budget.
        self._intervals.add(done.duration, min(len(self.order), len(done.extents) * len(self.order) // max(1, visible)))
        usual = self._intervals.period()
        self.period = None if usual is None else usual.ns
        changed = not self.looping
        self.looping, self.guessed = True, False
        if whole and self.order.disorder(done.extents) > ORDER_TOLERANCE:
            # Adopt an order only when it repeats: independent readers interleave their touches differently in every
            # pass.
            proved = bool(self._unproved) and disagreement(self._unproved, done.extents) <= ORDER_TOLERANCE
            self._unproved = done.extents
            if proved:
                return Lesson(True, True, self.order.adopt(done.extents))
        elif self.passes == 1 and self.order.disorder(self.guess) > ORDER_TOLERANCE:
            # Loading reads a file from front to back; the passes after it follow the order of computation.
            return Lesson(True, True, self.order.adopt(self.guess))
        return Lesson(True, changed)


def _least_apart(count: int) -> int:
    return max(2, min(LEAST_APART, count // 4))


MAX_CURSORS = 64
CURSOR_LIFE_NS = 5_000_000_000  # a reader without a touch for this long has ended
MAX_SUSPECTS = 16
PROOF_MOVES = 4  # steps that turn a suspect into a reader


@dataclass
class Cursor:
    """One sequential position; `steps` counts the latest moves in a row that were as short as a sequential reader's."""

    head: int
    moves: int
    last_ns: int
    steps: int = 0


class CursorTable:
    """The positions of readers in a visiting order of `count` ranks: the live cursors of one file, newest touch last.

    A touch up to `reach` ranks ahead moves the cursor, a touch up to `reach` ranks behind leaves it in place, and any other
    touch starts a new cursor. Threads finish in any order, so a miss behind a cursor only creates a *suspect*, which becomes
    a cursor if it advances step by step. Cursors at most `near` ranks behind another one merge with it into one convoy.
    """

    def __init__(self, count: int, reach: int, loops: bool) -> None:
        self.count = count
        self.reach = max(1, min(reach, count // 3))
        self.near = self.reach
        self.step = 4  # maximum ranks that a reader advances from one miss to the next
        self.loops = loops
        self.live: list[Cursor] = []
        self.suspects: list[Cursor] = []
        self.laggards = 0  # readers that fell out of a convoy, since `reset`

    def distance(self, start: int, end: int) -> int:
        """Return the ranks forward from `start` to `end`; without a loop, a backward distance is `count`."""
        if self.loops:
            return (end - start) % self.count
        return end - start if end >= start else self.count

    def record_access(self, rank: int, now_ns: int, missed: bool = False) -> Cursor:
        """Move the cursor that the touch of `rank` belongs to, and return it; `missed`: the extent was absent."""
        best = self._nearest(rank)
        if best is not None and missed and self.distance(best.head, rank) > self.reach:
            best = self._suspect(rank, now_ns) or best
        if best is None:
            best = Cursor(rank, 0, now_ns)
            self.live.append(best)
            if len(self.live) > MAX_CURSORS:
                self.live.remove(min(self.live, key=lambda cursor: cursor.last_ns))
        elif 0 < (distance := self.distance(best.head, rank)) <= self.reach:
            best.steps = best.steps + 1 if distance <= self.step else 0
            best.head = rank
            best.moves += 1
            self._merge(best)
        best.last_ns = now_ns
        return best

    def _nearest(self, rank: int) -> Cursor | None:
        best: Cursor | None = None
        best_step = self.reach + 1
        for cursor in self.live:
            ahead = self.distance(cursor.head, rank)
            step = ahead if ahead <= self.reach else self.distance(rank, cursor.head)
            if step < best_step:
                best, best_step = cursor, step
        return best

    def _suspect(self, rank: int, now_ns: int) -> Cursor | None:
        for suspect in self.suspects:
            if 0 < self.distance(suspect.head, rank) <= self.step:
                suspect.head, suspect.last_ns = rank, now_ns
                suspect.moves += 1
                if suspect.moves < PROOF_MOVES:
                    return None
                self.suspects.remove(suspect)
                self.live.append(suspect)
                self.laggards += 1
                return suspect
        self.suspects.append(Cursor(rank, 0, now_ns))
        del self.suspects[:-MAX_SUSPECTS]
        return None

    def reset(self) -> None:
        self.live.clear()
        self.suspects.clear()
        self.laggards = 0

    def _merge(self, moved: Cursor) -> None:
        for other in [cursor for cursor in self.live if cursor is not moved]:
            if self.distance(other.head, moved.head) <= self.near:
                self.live.remove(other)
            elif self.distance(moved.head, other.head) <= self.near:
                moved.head = other.head
                self.live.remove(other)

    def trailing_first(self) -> list[Cursor]:
        """Return the cursors, the leader last: serving them in this order brings a convoy together."""
        ring = sorted(self.live, key=lambda cursor: cursor.head)
        if len(ring) < 2 or not self.loops:
            return ring
        gaps = [self.distance(cursor.head, ring[(index + 1) % len(ring)].head) for index, cursor in enumerate(ring)]
        leader = gaps.index(max(gaps))
        return ring[leader + 1 :] + ring[: leader + 1]

    def moving(self, since_ns: int) -> int:
        return sum(cursor.moves > PROOF_MOVES and cursor.last_ns >= since_ns for cursor in self.live)

    def expire(self, before_ns: int) -> None:
        self.live = [cursor for cursor in self.live if cursor.last_ns >= before_ns]
