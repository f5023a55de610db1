"""Mixtures of experts: of those that a token uses, the missing come in whole, and who is used least leaves.

A miss in one slice names the expert, and with it the slices that will be read next: all come in at once, and none that is
there. Dense tensors loop and have the budget first (`planner.py`): a byte there saves a read per token. What is left is the
experts' room. Who was used is told by misses, and by samples of what is there: of accessed bits in place, of requests for a
page that was taken out over FUSE.

Extents that are dense in part belong to the loop, with what they hold of slices.

Every method of `MixtureCache` expects the engine's lock.
"""

from __future__ import annotations

import itertools
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmcache.cache.hotset import HotSet
from llmcache.fs.engine.group import ABSENT, LOADING, SINGLE, TOUCHED
from llmcache.units import PAGE_BYTES

if TYPE_CHECKING:
    from llmcache.fs.backends.base import BufferFetch
    from llmcache.fs.engine.group import Group, Member
    from llmcache.fs.engine.state import CacheState
    from llmcache.fs.layout.tensors import Experts

HEADROOM_BYTES = 2 << 20
LEAST_ROOM_BYTES = 16 << 20  # so many experts are in use at a time
SWEEP = 3  # times as many experts as a token uses, missed in one visit of a layer: a prompt, that uses nearly all of them
UNTOLD_SHARE, UNTOLD_LEAST = 4, 8  # where the header does not say how many that are: a quarter of all is a prompt
AHEAD = 4  # experts that are brought ahead of a prompt
STRAY_NS = 5_000_000  # what the kernel reads around a fault is there by then
STRAYS_MAX = 1024
WINDOW_BYTES = 128 << 10  # by which the kernel reads ahead over FUSE, or twice that: POSIX_FADV_SEQUENTIAL, as llama.cpp
COMING_NS, AGAIN_NS = 10_000_000, 100_000_000  # after a slice has come; after what the kernel has read of itself
_IS_THERE = bytes(state == TOUCHED for state in range(256))
AHEAD_REACHES = 4  # a fault near the end of a slice has the kernel read on by up to twice what it reads around one


@dataclass(eq=False)
class ExpertLoad:
    """An expert on its way over FUSE: its pieces, (offset, bytes), that nobody has begun to read, and fetches of others."""

    waiting: list[tuple[int, int]]
    loading: list[BufferFetch] = field(default_factory=list)
    failed: bool = False


class Mixture:
    """The experts of one file that is read: each ABSENT, LOADING or TOUCHED. Expert n has the key `first` + n.

    `alone`: they are left to the kernel, all are ABSENT.

    `fresh`: came for a use that is counted, and will be seen once more by a sample. Over FUSE: `loads` of experts that are
    LOADING, `trips`: experts of which a page was taken out, so that their next use is seen, each with the (round, layer) in
    which that comes, and `pages`: that page of each; `came_ns`: when an expert that is there had arrived, and `read_on`:
    slices that the kernel read of itself: when, from which offset and up to which.
    """

    def __init__(self, group: Group, member: Member, layout: Experts, first: int) -> None:
        self.group, self.member, self.layout, self.first = group, member, layout, first
        self.states = bytearray(layout.count)
        self.probes, self.sizes = array("Q"), array("Q")  # where each is looked at, and its bytes, as `ranges` has it
        for ranges in map(self.ranges, range(layout.count)):
            # In the middle of a slice: what the kernel maps around a fault in the next one does not reach so far.
            offset, length = ranges[0] if ranges else (0, 0)
            self.probes.append((offset + length // 2) // PAGE_BYTES * PAGE_BYTES)
            self.sizes.append(sum(length for _, length in ranges))
        self.layer = (0, 0)  # the experts of the layer that is computed: first, and behind the last
        self.rounds = 0  # how often that began again, as far as is known: tokens
        self.seen, self.caught_up = 0, 0  # uses that were, since the round until which the others have been counted
        self.visit, self.last = 0, 0  # of which so many were missed, in the order of their numbers until that one
        self.sweeping = False  # a prompt is computed
        self.window = WINDOW_BYTES
        self.loads: dict[int, ExpertLoad] = {}
        self.alone = False
        self.fresh: set[int] = set()
        self.trips: dict[int, tuple[int, int]] = {}
        self.pages: dict[int, bytes] = {}
        self.refaults: dict[int, int] = {}
        self.came_ns: dict[int, int] = {}
        self.read_on: dict[int, tuple[int, int, int]] = {}

    @property
    def kept(self) -> list[int]:
        """The experts that are there."""
        return list(itertools.compress(range(len(self.states)), self.states.translate(_IS_THERE)))

    def sweeps(self, expert: int) -> bool:
        """Notes a miss; True if so many are missed in this visit of the layer that it is a prompt that is computed."""
        self.reach(expert)
        count = self.layer[1] - self.layer[0]
        self.visit, self.last = 1 if expert < self.last else self.visit + 1, expert
        most = SWEEP * self.layout.used if self.layout.used else max(UNTOLD_LEAST, count // UNTOLD_SHARE)
        self.sweeping = self.visit > min(most, count - 1)
        return self.sweeping

    def reach(self, expert: int) -> None:
        """The layer of an expert is computed now."""
        _, first, count = self.layout.layer_of(expert)
        if self.layer != (first, first + count):
            self.rounds += first < self.layer[0]
            self.layer, self.visit = (first, first + count), 0

    def trip(self, expert: int) -> None:
        """A page of an expert that is there is taken out."""
        first = self.layout.layer_of(expert)[1]
        self.trips[expert] = self.rounds + (first <= self.layer[0]), first

    def unused(self) -> Iterator[int]:
        """The experts that would have been asked for since, if they were in use."""
        now = self.rounds, self.layer[0]
        return (expert for expert, then in self.trips.items() if then < now and not self.computes(expert))

    def computes(self, expert: int) -> bool:
        """True for experts of the layer that is computed: of a prompt, those that it has not left behind."""
        return (self.last if self.sweeping else self.layer[0]) <= expert < self.layer[1]

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the slices of an expert in whole pages, without what is in the loop."""
        return [self._pages(start, start + size) for start, size in self.layout.ranges(expert)]

    def own(self, expert: int) -> list[tuple[int, int]]:
        """The same, without pages of which a part is another's, unless that is an expert that is not there either."""
        found: list[tuple[int, int]] = []
        for number in self.layout.slices[expert]:
            start = self.layout.starts[number]
            end = start + self.layout.sizes[number]
            low = start if self._is_absent(number - 1, start) else -(-start // PAGE_BYTES) * PAGE_BYTES
            high = end if self._is_absent(number + 1, end) else end // PAGE_BYTES * PAGE_BYTES
            offset, length = self._pages(low, high) if low < high else (low, 0)
            found += [(offset, length)] if length else []
        return found

    def _is_absent(self, number: int, edge: int) -> bool:
        """True for a slice that begins or ends at `edge`, and that nobody keeps or brings."""
        if not 0 <= number < len(self.layout.starts):
            return False
        start, size = self.layout.starts[number], self.layout.sizes[number]
        return size >= PAGE_BYTES and edge in (start, start + size) and self.states[self.layout.expert_of[number]] == ABSENT

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        size, base = self.group.extent_bytes, self.member.base
        start = start // PAGE_BYTES * PAGE_BYTES
        if self.group.state(base + start // size) != SINGLE:
            start = (start // size + 1) * size
        if end % size and self.group.state(base + end // size) != SINGLE:
            end = end // size * size
        return start, max(0, -(-end // PAGE_BYTES) * PAGE_BYTES - start)

    def slice_at(self, offset: int) -> int | None:
        """The number of the slice that a byte is in; None for one that is no expert's, or in the loop."""
        number = bisect_right(self.layout.starts, offset) - 1
        if number < 0 or offset >= self.layout.starts[number] + self.layout.sizes[number]:
            return None
        return number if self.group.state(self.member.base + offset // self.group.extent_bytes) == SINGLE else None

    def reads_on(self, number: int, offset: int, size: int, now_ns: int) -> bool:
        """True if a request at the beginning of a slice is the kernel's own: behind a slice that comes in it reads ahead, a
        window beyond its end too. What it has read it asks for once: who asks for it again, or goes on, is a program.
        """
        if size > WINDOW_BYTES:
            self.window = 2 * WINDOW_BYTES
        before = self.layout.expert_of[number - 1] if number else number
        coming = self.states[before] == LOADING or now_ns - self.came_ns.get(before, 0) < COMING_NS
        begins = offset - self.layout.starts[number] < min(self.window, self.layout.sizes[number] // 2)
        since_ns, first, end = self.read_on.pop(number, (0, offset, offset))
        if now_ns - since_ns > AGAIN_NS:
            first = end = offset
        if not number or self.sweeping or not coming or not begins or first <= offset < end:
            return False
        self.read_on[number] = now_ns, min(first, offset), max(end, offset + size)
        return True

    def neighbours(self, number: int, reach: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what the kernel reads around faults on a slice, of experts that are not there: `reach` bytes
        before it, and behind it as far as it reads ahead at its end.
        """
        layout = self.layout
        start, end = layout.starts[number], layout.starts[number] + layout.sizes[number]
        found: list[tuple[int, int]] = []
        for first, last in ((start - reach, start), (end, end + AHEAD_REACHES * reach)):
            at = max(0, bisect_right(layout.starts, max(0, first)) - 1)
            while at < len(layout.starts) and layout.starts[at] < last:
                if self.states[layout.expert_of[at]] == ABSENT:
                    found += self.inner(at, first, last)
                at += 1
        return found

    def inner(self, number: int, first: int, end: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what a slice has between two bytes, if anything, without pages that are another's in part: that
        one may be in use.
        """
        start = self.layout.starts[number]
        low = -(-max(first, start) // PAGE_BYTES) * PAGE_BYTES
        high = min(end, start + self.layout.sizes[number]) // PAGE_BYTES * PAGE_BYTES
        offset, length = self._pages(low, high) if low < high else (low, 0)
        return [(offset, length)] if length else []

    def pages_of(self, number: int) -> tuple[int, int]:
        """(offset, bytes) of a slice in whole pages, without what is in the loop."""
        start = self.layout.starts[number]
        return self._pages(start, start + self.layout.sizes[number])

    def end_of(self, number: int) -> int:
        """Where the pages of a slice end, or what belongs to the loop begins."""
        return sum(self.pages_of(number))

    def facts(self) -> dict[str, Any]:
        """What is kept, as `llmcache stats --json` tells it."""
        kept = self.kept
        return {
            "count": self.layout.count,
            "kept": len(kept),
            "kept_bytes": sum(map(self.sizes.__getitem__, kept)),
            "bytes": sum(self.layout.sizes),
            "alone": self.alone,
            "token": None,  # no longer measured
            "token_alone": None,
        }


class MixtureCache:
    """All mixtures of a mount, and the room that they share."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.hot = HotSet()
        self.room_bytes = LEAST_ROOM_BYTES
        self.used_bytes = 0
        self.left = 0  # experts that were given up for others
        self.mixtures: list[Mixture] = []  # by their keys
        self._next = 0
        self._strays: deque[tuple[int, Mixture, int, int]] = deque(maxlen=STRAYS_MAX)  # when, of which slice, how far around

    def begin(self, group: Group, member: Member, layout: Experts) -> None:
        """A file with experts is read from now on."""
        member.mixture = Mixture(group, member, layout, self._next)
        self.mixtures.append(member.mixture)
        self._next += layout.count
        self.hot.token_uses += layout.token_uses
        self.state.set_limit(self.state.pin_limit_bytes)

    def end(self, group: Group) -> list[tuple[int, int, int, int]]:
        """Forgets the files of `group`; returns what may be left of their experts: (node, offset, bytes, charged)."""
        left: list[tuple[int, int, int, int]] = []
        for mixture in [mixture for mixture in self.mixtures if mixture.group is group]:
            self.mixtures.remove(mixture)
            self.hot.token_uses -= mixture.layout.token_uses
            mixture.member.mixture = None
            for load in mixture.loads.values():
                load.waiting.clear()
                for fetch in load.loading:
                    fetch.stale = True
            node, kept = mixture.member.node or 0, mixture.kept
            self.used_bytes -= sum(map(mixture.sizes.__getitem__, kept))
            left += [(node, offset, length, length) for expert in kept for offset, length in mixture.ranges(expert)]
            left += [(node, offset, length, 0) for expert in mixture.loads for offset, length in mixture.ranges(expert)]
            self.hot.forget(range(mixture.first, mixture.first + mixture.layout.count))
        self.state.set_limit(self.state.pin_limit_bytes)
        return left

    def used(self, mixture: Mixture, expert: int) -> None:
        """A sample says that an expert that is there was used."""
        self._count(mixture, expert)
        self._shadow(mixture, expert)
        self.state.counters.hit_bytes += mixture.sizes[expert]

    def missed(self, mixture: Mixture, expert: int) -> list[int]:
        """A program uses an expert that is not there, or not wholly.

        Returns the experts that are LOADING now, and have to have `arrived` soon: that one, and what a prompt uses next.
        """
        sweeps = mixture.sweeps(expert)
        self._shadow(mixture, expert)
        if not sweeps:  # what a prompt reads says little of what the tokens after it use
            self._count(mixture, expert)
        self.state.counters.miss_bytes += mixture.sizes[expert]
        if not mixture.member.reachable:
            return []
        if mixture.states[expert] == TOUCHED:
            self.lost(mixture, expert)
        found = [expert]
        if sweeps:
            behind = (each for each in range(expert + 1, mixture.layer[1]) if mixture.states[each] == ABSENT)
            found += itertools.islice(behind, AHEAD)
        for each in found:
            mixture.states[each] = LOADING
        return found

    def _shadow(self, mixture: Mixture, expert: int) -> None:
        """Records a use for the shadow of an LRU cache."""
        size = mixture.sizes[expert]
        if not self.state.shadow.touch(mixture.first + expert, size):
            mixture.group.evidence.lru_bytes += size

    def _count(self, mixture: Mixture, expert: int) -> None:
        self.hot.use(mixture.first + expert)
        mixture.seen += 1

    def catch_up(self, mixture: Mixture) -> None:
        """What tokens have used unseen counts too: else what was used long ago would stay the longer the less is missed."""
        if rounds := mixture.rounds - mixture.caught_up:
            self.hot.skip(max(0, rounds * mixture.layout.token_uses - mixture.seen))
            mixture.seen, mixture.caught_up = 0, mixture.rounds

    def lost(self, mixture: Mixture, expert: int) -> None:
        """The kernel has reclaimed some of an expert that was there."""
        self._give_up(mixture, expert)
        self.state.resident_bytes -= mixture.sizes[expert]

    def arrived(self, mixture: Mixture, expert: int, done: bool) -> None:
        """An expert that was LOADING is there, or could not be read."""
        if mixture.member.mixture is not mixture:
            return
        done = done and not mixture.alone
        mixture.states[expert] = TOUCHED if done else ABSENT
        if done:
            self.hot.keep(mixture.first + expert)
            mixture.came_ns[expert] = time.monotonic_ns()
            self.used_bytes += mixture.sizes[expert]
            self.state.resident_bytes += mixture.sizes[expert]
        if self.excess_bytes > 0:
            self.state.room.notify()

    def turn(self, mixture: Mixture, alone: bool) -> None:
        """Leave experts to the kernel, as they are, or steer them again."""
        mixture.alone = alone
        for expert in mixture.kept if alone else ():
            self.lost(mixture, expert)

    def found(self, mixture: Mixture, experts: Iterable[int]) -> None:
        """Take in experts that were found in the page cache."""
        for expert in experts:
            if mixture.states[expert] == ABSENT:
                self.arrived(mixture, expert, done=True)

    @property
    def excess_bytes(self) -> int:
        """What has to leave: beyond the experts' room, where all together take more than there is."""
        together = self.state.used_bytes + HEADROOM_BYTES - self.state.room_bytes
        return min(together, self.used_bytes + HEADROOM_BYTES - max(self.room_bytes, LEAST_ROOM_BYTES))

    def faulted(self, mixture: Mixture, number: int, reach: int, now_ns: int) -> None:
        """A program has faulted on a slice that was not there: the kernel reads around it, `reach` bytes to each side."""
        self._strays.append((now_ns, mixture, number, reach))

    def _read_around(self) -> Iterator[tuple[int, int, int, int]]:
        """What the kernel has read around faults, of experts that are not there."""
        now_ns = time.monotonic_ns()
        while self._strays and now_ns - self._strays[0][0] > STRAY_NS:
            _, mixture, number, reach = self._strays.popleft()
            if (node := mixture.member.node) is not None and mixture.member.mixture is mixture and not mixture.alone:
                yield from ((node, offset, length, 0) for offset, length in mixture.neighbours(number, reach))

    def victims(self) -> list[tuple[int, int, int, int]]:
        """Gives up experts, the least used first, until there is room: (node, offset, bytes, charged) to drop."""
        excess = self.excess_bytes
        debts = list(self._read_around()) if excess > 0 else []
        leaving = self._leaving() if excess > 0 else iter(())
        while excess > 0 and (key := next(leaving, None)) is not None:
            mixture, expert = self.of(key)
            size = mixture.sizes[expert]
            self._give_up(mixture, expert)
            self.left += 1
            excess -= size
            self.state.resident_bytes -= size
            if (node := mixture.member.node) is not None:
                own = mixture.own(expert)
                debts += [(node, offset, length, length) for offset, length in own]
                self.state.resident_bytes += sum(length for _, length in own)  # until it is dropped
        return debts

    def _leaving(self) -> Iterator[int]:
        """Keys, each to leave before the next is asked for.

        Of the layer that is computed nobody leaves: the rest of what a program has begun to use it would miss as well. First
        go those that are known to be out of use; others may have been used since that was last seen.
        """
        asked = (mixture.first + expert for mixture in self.mixtures for expert in mixture.unused())
        yield from sorted(asked, key=self.hot.value)
        while (key := self.hot.least(self._is_computed)) is not None:
            yield key

    def _is_computed(self, key: int) -> bool:
        mixture, expert = self.of(key)
        return mixture.computes(expert)

    def of(self, key: int) -> tuple[Mixture, int]:
        """The mixture and the expert that `key` means."""
        mixture = self.mixtures[bisect_right(self.mixtures, key, key=lambda one: one.first) - 1]
        return mixture, key - mixture.first

    def _give_up(self, mixture: Mixture, expert: int) -> None:
        self.hot.drop(mixture.first + expert)
        mixture.states[expert] = ABSENT
        mixture.trips.pop(expert, None)
        mixture.pages.pop(expert, None)
        mixture.fresh.discard(expert)
        mixture.refaults.pop(expert, None)
        mixture.came_ns.pop(expert, None)
        self.used_bytes -= mixture.sizes[expert]
