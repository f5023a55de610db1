"""Experts of MoE models: missing experts are loaded whole, and the least used ones are evicted.

A miss in one slice identifies the expert, and so the other slices that the client reads next: all of them are loaded at
once. Dense tensors loop and take the budget first (`planner.py`), because each byte of them saves a read for every token;
experts share what remains. Uses are counted by misses and, for resident experts, by samples: of accessed bits in place, and
over FUSE of requests for a page that was dropped on purpose (a tripwire). An extent that contains a dense tensor belongs to
the loop, with the slices in it.

Every method of `ExpertCache` expects the engine's lock.
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
from llmcache.mount.engine.space import ABSENT, LOADING, SINGLE, TOUCHED
from llmcache.units import PAGE_BYTES

if TYPE_CHECKING:
    from llmcache.model.tensors import Experts
    from llmcache.mount.backends.base import BufferFetch
    from llmcache.mount.engine.space import LoopSpace, SpaceFile
    from llmcache.mount.engine.state import CacheState

HEADROOM_BYTES = 2 << 20
LEAST_ROOM_BYTES = 16 << 20  # least room: about the experts that are in use at a time
SWEEP = 3  # a visit of a layer that misses more than this multiple of a token's experts belongs to a prompt
UNKNOWN_SHARE, UNKNOWN_LEAST = 4, 8  # if that number is unknown: a quarter of the layer's experts, but at least 8
AHEAD = 4  # experts that are loaded ahead of a prompt
STRAY_NS = 5_000_000  # after this time, the kernel has read the pages around a fault
STRAYS_MAX = 1024
WINDOW_BYTES = 128 << 10  # readahead of the kernel over FUSE; twice that after POSIX_FADV_SEQUENTIAL (llama.cpp)
# Readahead behind a slice may arrive until COMING_NS after the slice. If it has requested a range, another request for the
# range within AGAIN_NS comes from a client.
COMING_NS, AGAIN_NS = 10_000_000, 100_000_000
_RESIDENT = bytes(state == TOUCHED for state in range(256))
AHEAD_REACHES = 4  # a fault near the end of a slice makes the kernel read ahead up to this multiple of its reach


@dataclass(eq=False)
class ExpertLoad:
    """A load of one expert over FUSE. `waiting`: pieces, (offset, bytes), to read; `loading`: fetches of the others."""

    waiting: list[tuple[int, int]]
    loading: list[BufferFetch] = field(default_factory=list)
    failed: bool = False


class MoeFile:
    """The experts of one open file, each ABSENT, LOADING or TOUCHED. Expert n has the key `first` + n in `ExpertCache`.

    - `alone`: the experts are left to the kernel; all are ABSENT.
    - `fresh`: experts just loaded or requested; the next sample shows the same use again, and does not count.
    - `loads`: over FUSE, loads of the experts that are LOADING.
    - `trips`: over FUSE, resident experts with a dropped page, and the (round, layer) in which their next use is due.
    - `pages`: over FUSE, the content of that page, for the reply.
    - `came_ns`: when a resident expert had been loaded.
    - `read_on`: slices that kernel readahead has requested: (time, first byte, end).
    """

    def __init__(self, space: LoopSpace, member: SpaceFile, layout: Experts, first: int) -> None:
        self.space, self.member, self.layout, self.first = space, member, layout, first
        self.states = bytearray(layout.count)
        self.probes, self.sizes = array("Q"), array("Q")  # by expert: offset of the sampled page, and bytes of `ranges`
        for ranges in map(self.ranges, range(layout.count)):
            # In the middle of a slice: the kernel maps pages around a fault in the next slice, but not this far.
            offset, length = ranges[0] if ranges else (0, 0)
            self.probes.append((offset + length // 2) // PAGE_BYTES * PAGE_BYTES)
            self.sizes.append(sum(length for _, length in ranges))
        self.layer = (0, 0)  # the experts of the layer being computed: first, and end
        self.rounds = 0  # how often the first layers were computed again: an estimate of the tokens
        self.seen, self.caught_up = 0, 0  # uses counted since the last `catch_up`, and the round of that call
        self.visit, self.last = 0, 0  # misses in this visit of the layer, and the last expert missed
        self.sweeping = False  # a prompt is being computed
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
        """The experts that are resident."""
        return list(itertools.compress(range(len(self.states)), self.states.translate(_RESIDENT)))

    def sweeps(self, expert: int) -> bool:
        """Record a miss; return True if this visit of the layer has missed enough experts to be a prompt."""
        self.reach(expert)
        count = self.layer[1] - self.layer[0]
        self.visit, self.last = 1 if expert < self.last else self.visit + 1, expert
        most = SWEEP * self.layout.used if self.layout.used else max(UNKNOWN_LEAST, count // UNKNOWN_SHARE)
        self.sweeping = self.visit > min(most, count - 1)
        return self.sweeping

    def reach(self, expert: int) -> None:
        """Record that the layer of an expert is being computed."""
        _, first, count = self.layout.layer_of(expert)
        if self.layer != (first, first + count):
            self.rounds += first < self.layer[0]
            self.layer, self.visit = (first, first + count), 0

    def trip(self, expert: int) -> None:
        """Record that a page of a resident expert is dropped, so that its next use sends a request."""
        first = self.layout.layer_of(expert)[1]
        self.trips[expert] = self.rounds + (first <= self.layer[0]), first

    def unused(self) -> Iterator[int]:
        """Yield the experts whose layer was computed again without a request for their dropped page."""
        now = self.rounds, self.layer[0]
        return (expert for expert, then in self.trips.items() if then < now and not self.computes(expert))

    def computes(self, expert: int) -> bool:
        """Return True for experts of the layer being computed; during a prompt, for those that it has not passed."""
        return (self.last if self.sweeping else self.layer[0]) <= expert < self.layer[1]

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the slices of an expert in whole pages, without extents of the loop."""
        return [self._pages(start, start + size) for start, size in self.layout.ranges(expert)]

    def own(self, expert: int) -> list[tuple[int, int]]:
        """Return `ranges` without pages shared with other data; pages shared with another absent expert stay in."""
        parts: list[tuple[int, int]] = []
        for number in self.layout.slices[expert]:
            start = self.layout.starts[number]
            end = start + self.layout.sizes[number]
            low = start if self._is_absent(number - 1, start) else -(-start // PAGE_BYTES) * PAGE_BYTES
            high = end if self._is_absent(number + 1, end) else end // PAGE_BYTES * PAGE_BYTES
            offset, length = self._pages(low, high) if low < high else (low, 0)
            parts += [(offset, length)] if length else []
        return parts

    def _is_absent(self, number: int, edge: int) -> bool:
        """Return True if the slice begins or ends at the byte `edge`, and its expert is absent."""
        if not 0 <= number < len(self.layout.starts):
            return False
        start, size = self.layout.starts[number], self.layout.sizes[number]
        return size >= PAGE_BYTES and edge in (start, start + size) and self.states[self.layout.expert_of[number]] == ABSENT

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        size, base = self.space.extent_bytes, self.member.base
        start = start // PAGE_BYTES * PAGE_BYTES
        if self.space.state(base + start // size) != SINGLE:
            start = (start // size + 1) * size
        if end % size and self.space.state(base + end // size) != SINGLE:
            end = end // size * size
        return start, max(0, -(-end // PAGE_BYTES) * PAGE_BYTES - start)

    def slice_at(self, offset: int) -> int | None:
        """Return the number of the slice that contains a byte; None if it is in no slice, or in the loop."""
        number = bisect_right(self.layout.starts, offset) - 1
        if number < 0 or offset >= self.layout.starts[number] + self.layout.sizes[number]:
            return None
        return number if self.space.state(self.member.base + offset // self.space.extent_bytes) == SINGLE else None

    def reads_on(self, number: int, offset: int, size: int, now_ns: int) -> bool:
        """Return True if a request at the beginning of a slice is kernel readahead that has crossed the slice's border.

        While a slice is loaded, the kernel reads ahead, up to a window beyond its end. Kernel readahead requests a range
        once; a second request, or one that continues behind it, comes from a client.
        """
        if size > WINDOW_BYTES:
            self.window = 2 * WINDOW_BYTES
        previous = self.layout.expert_of[number - 1] if number else number
        coming = self.states[previous] == LOADING or now_ns - self.came_ns.get(previous, 0) < COMING_NS
        begins = offset - self.layout.starts[number] < min(self.window, self.layout.sizes[number] // 2)
        since_ns, first, end = self.read_on.pop(number, (0, offset, offset))
        if now_ns - since_ns > AGAIN_NS:
            first = end = offset
        if not number or self.sweeping or not coming or not begins or first <= offset < end:
            return False
        self.read_on[number] = now_ns, min(first, offset), max(end, offset + size)
        return True

    def neighbours(self, number: int, reach: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of absent experts that the kernel reads around faults on a slice.

        The kernel reads `reach` bytes before the slice, and behind it as far as it reads ahead at the slice's end.
        """
        layout = self.layout
        start, end = layout.starts[number], layout.starts[number] + layout.sizes[number]
        parts: list[tuple[int, int]] = []
        for first, last in ((start - reach, start), (end, end + AHEAD_REACHES * reach)):
            at = max(0, bisect_right(layout.starts, max(0, first)) - 1)
            while at < len(layout.starts) and layout.starts[at] < last:
                if self.states[layout.expert_of[at]] == ABSENT:
                    parts += self.inner(at, first, last)
                at += 1
        return parts

    def inner(self, number: int, first: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the part of a slice between two bytes, if there is one.

        Pages shared with other data are left out, because that may be in use.
        """
        start = self.layout.starts[number]
        low = -(-max(first, start) // PAGE_BYTES) * PAGE_BYTES
        high = min(end, start + self.layout.sizes[number]) // PAGE_BYTES * PAGE_BYTES
        offset, length = self._pages(low, high) if low < high else (low, 0)
        return [(offset, length)] if length else []

    def pages_of(self, number: int) -> tuple[int, int]:
        """Return (offset, bytes) of a slice in whole pages, without extents of the loop."""
        start = self.layout.starts[number]
        return self._pages(start, start + self.layout.sizes[number])

    def end_of(self, number: int) -> int:
        """Return where the pages of a slice end, or an extent of the loop begins."""
        return sum(self.pages_of(number))

    def facts(self) -> dict[str, Any]:
        """Return the state of the experts, as `llmcache stats --json` prints it."""
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


class ExpertCache:
    """All MoE files of a mount, and the room that their experts share."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.hot = HotSet()
        self.room_bytes = LEAST_ROOM_BYTES
        self.used_bytes = 0
        self.left = 0  # experts evicted for others
        self.moe_files: list[MoeFile] = []  # in order of their keys
        self._next = 0
        # Faults on absent slices: when, in which slice, and how far the kernel reads around the fault.
        self._strays: deque[tuple[int, MoeFile, int, int]] = deque(maxlen=STRAYS_MAX)

    def begin(self, space: LoopSpace, member: SpaceFile, layout: Experts) -> None:
        """Begin to steer the experts of a file."""
        member.moe = MoeFile(space, member, layout, self._next)
        self.moe_files.append(member.moe)
        self._next += layout.count
        self.hot.token_uses += layout.token_uses
        self.state.set_limit(self.state.pin_limit_bytes)

    def end(self, space: LoopSpace) -> list[tuple[int, int, int, int]]:
        """Forget the files of `space`; return (node, offset, bytes, charged) of experts that may be resident."""
        debts: list[tuple[int, int, int, int]] = []
        for moe in [moe for moe in self.moe_files if moe.space is space]:
            self.moe_files.remove(moe)
            self.hot.token_uses -= moe.layout.token_uses
            moe.member.moe = None
            for load in moe.loads.values():
                load.waiting.clear()
                for fetch in load.loading:
                    fetch.stale = True
            node, kept = moe.member.node or 0, moe.kept
            self.used_bytes -= sum(map(moe.sizes.__getitem__, kept))
            debts += [(node, offset, length, length) for expert in kept for offset, length in moe.ranges(expert)]
            debts += [(node, offset, length, 0) for expert in moe.loads for offset, length in moe.ranges(expert)]
            self.hot.forget(range(moe.first, moe.first + moe.layout.count))
        self.state.set_limit(self.state.pin_limit_bytes)
        return debts

    def used(self, moe: MoeFile, expert: int) -> None:
        """Count a use of a resident expert that a sample has shown."""
        self._count(moe, expert)
        self._shadow(moe, expert)
        self.state.counters.hit_bytes += moe.sizes[expert]

    def missed(self, moe: MoeFile, expert: int) -> list[int]:
        """Record a use of an expert that is absent, or resident only in part.

        Return the experts to load, now LOADING: this one, and during a prompt the next ones. For each, the caller calls
        `arrived` when it is loaded.
        """
        sweeps = moe.sweeps(expert)
        self._shadow(moe, expert)
        if not sweeps:  # a prompt says little about the experts that the tokens after it use
            self._count(moe, expert)
        self.state.counters.miss_bytes += moe.sizes[expert]
        if not moe.member.reachable:
            return []
        if moe.states[expert] == TOUCHED:
            self.lost(moe, expert)
        experts = [expert]
        if sweeps:
            next_ones = (each for each in range(expert + 1, moe.layer[1]) if moe.states[each] == ABSENT)
            experts += itertools.islice(next_ones, AHEAD)
        for each in experts:
            moe.states[each] = LOADING
        return experts

    def _shadow(self, moe: MoeFile, expert: int) -> None:
        """Record a use in the shadow LRU cache."""
        size = moe.sizes[expert]
        if not self.state.shadow.touch(moe.first + expert, size):
            moe.space.evidence.lru_bytes += size

    def _count(self, moe: MoeFile, expert: int) -> None:
        self.hot.use(moe.first + expert)
        moe.seen += 1

    def catch_up(self, moe: MoeFile) -> None:
        """Count unobserved uses as well, so that experts age with the number of tokens, not of misses."""
        if rounds := moe.rounds - moe.caught_up:
            self.hot.skip(max(0, rounds * moe.layout.token_uses - moe.seen))
            moe.seen, moe.caught_up = 0, moe.rounds

    def lost(self, moe: MoeFile, expert: int) -> None:
        """Make an expert absent after the kernel has reclaimed pages of it."""
        self._remove(moe, expert)
        self.state.resident_bytes -= moe.sizes[expert]

    def arrived(self, moe: MoeFile, expert: int, done: bool) -> None:
        """Make a LOADING expert resident; absent if it could not be read (not `done`)."""
        if moe.member.moe is not moe:
            return
        done = done and not moe.alone
        moe.states[expert] = TOUCHED if done else ABSENT
        if done:
            self.hot.keep(moe.first + expert)
            moe.came_ns[expert] = time.monotonic_ns()
            self.used_bytes += moe.sizes[expert]
            self.state.resident_bytes += moe.sizes[expert]
        if self.excess_bytes > 0:
            self.state.room.notify()

    def turn(self, moe: MoeFile, alone: bool) -> None:
        """Leave experts to the kernel as they are, or steer them again."""
        moe.alone = alone
        for expert in moe.kept if alone else ():
            self.lost(moe, expert)

    def found(self, moe: MoeFile, experts: Iterable[int]) -> None:
        """Take over experts that were found in the page cache."""
        for expert in experts:
            if moe.states[expert] == ABSENT:
                self.arrived(moe, expert, done=True)

    @property
    def excess_bytes(self) -> int:
        """Bytes of experts to evict: the excess over their room, if the mount as a whole is full."""
        together = self.state.used_bytes + HEADROOM_BYTES - self.state.room_bytes
        return min(together, self.used_bytes + HEADROOM_BYTES - max(self.room_bytes, LEAST_ROOM_BYTES))

    def faulted(self, moe: MoeFile, number: int, reach: int, now_ns: int) -> None:
        """Record a client's fault on an absent slice: the kernel reads `reach` bytes around it on each side."""
        self._strays.append((now_ns, moe, number, reach))

    def _read_around(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the ranges of absent experts that the kernel has read around faults."""
        now_ns = time.monotonic_ns()
        while self._strays and now_ns - self._strays[0][0] > STRAY_NS:
            _, moe, number, reach = self._strays.popleft()
            if (node := moe.member.node) is not None and moe.member.moe is moe and not moe.alone:
                yield from ((node, offset, length, 0) for offset, length in moe.neighbours(number, reach))

    def victims(self) -> list[tuple[int, int, int, int]]:
        """Evict experts, least used first, until there is room; return (node, offset, bytes, charged) to invalidate."""
        excess = self.excess_bytes
        debts = list(self._read_around()) if excess > 0 else []
        keys = self._eviction_order() if excess > 0 else iter(())
        while excess > 0 and (key := next(keys, None)) is not None:
            moe, expert = self.of(key)
            size = moe.sizes[expert]
            self._remove(moe, expert)
            self.left += 1
            excess -= size
            self.state.resident_bytes -= size
            if (node := moe.member.node) is not None:
                own = moe.own(expert)
                debts += [(node, offset, length, length) for offset, length in own]
                self.state.resident_bytes += sum(length for _, length in own)  # until it is invalidated
        return debts

    def _eviction_order(self) -> Iterator[int]:
        """Yield the keys of experts to evict; the caller evicts each before it requests the next.

        Experts of the layer being computed are never evicted, because the client would miss the other slices of experts that
        it has begun to read. Experts whose tripwire was not touched in their layer come first; others may have been used
        unobserved.
        """
        untouched = (moe.first + expert for moe in self.moe_files for expert in moe.unused())
        yield from sorted(untouched, key=self.hot.value)
        while (key := self.hot.least(self._is_computed)) is not None:
            yield key

    def _is_computed(self, key: int) -> bool:
        moe, expert = self.of(key)
        return moe.computes(expert)

    def of(self, key: int) -> tuple[MoeFile, int]:
        """Return the MoE file and the number of the expert with `key`."""
        moe = self.moe_files[bisect_right(self.moe_files, key, key=lambda each: each.first) - 1]
        return moe, key - moe.first

    def _remove(self, moe: MoeFile, expert: int) -> None:
        self.hot.drop(moe.first + expert)
        moe.states[expert] = ABSENT
        moe.trips.pop(expert, None)
        moe.pages.pop(expert, None)
        moe.fresh.discard(expert)
        moe.refaults.pop(expert, None)
        moe.came_ns.pop(expert, None)
        self.used_bytes -= moe.sizes[expert]
