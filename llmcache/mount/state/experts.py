"""Experts of MoE models: missing experts are loaded whole, and the least used ones are evicted.

Dense tensors get the budget first (`planner.py`), because each byte of them saves a read for every token. Uses are counted
by misses and, for resident experts, by samples: of accessed bits in place, and of requests for a tripwire over FUSE.

Every method of `ExpertCache` expects the engine's lock.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from llmcache.cache.hotset import HotSet
from llmcache.cache.shadow import Shadow
from llmcache.model.tensors import Experts
from llmcache.mount.state.accounting import Accounting, Counters, Invalidation
from llmcache.mount.state.space import ABSENT, LOADING, TOUCHED, LoopSpace, MoeFile, SpaceFile

HEADROOM_BYTES = 2 << 20
LEAST_ROOM_BYTES = 16 << 20  # least room: about the experts that are in use at a time
AHEAD = 4  # experts that are loaded ahead of a prompt
AROUND_NS = 5_000_000  # after this time, the kernel has read the pages around a fault
FAULTS_MAX = 1024


class ExpertCache:
    """All MoE files of a mount. `on_files()` is called when a file is added or removed."""

    def __init__(self, memory: Accounting, counters: Counters, shadow: Shadow, on_files: Callable[[], None]) -> None:
        self.memory, self.counters, self.shadow, self._on_files = memory, counters, shadow, on_files
        self.hot = HotSet()
        self.room_bytes = LEAST_ROOM_BYTES
        self.loading_bytes = 0  # of experts being loaded; room is made for them meanwhile
        self.left = 0  # experts evicted for others
        self.moe_files: list[MoeFile] = []  # in order of their keys
        self._next = 0
        # Faults on absent slices: when, in which slice, and how far the kernel reads around the fault.
        self._faults: deque[tuple[int, MoeFile, int, int]] = deque(maxlen=FAULTS_MAX)

    def begin(self, space: LoopSpace, member: SpaceFile, layout: Experts) -> None:
        member.moe = MoeFile(space, member, layout, self._next)
        self.moe_files.append(member.moe)
        self._next += layout.count
        self.hot.token_uses += layout.token_uses
        self._on_files()

    def end(self, space: LoopSpace) -> list[Invalidation]:
        ranges: list[Invalidation] = []
        for moe in [moe for moe in self.moe_files if moe.space is space]:
            self.moe_files.remove(moe)
            self.hot.token_uses -= moe.layout.token_uses
            moe.member.moe = None
            for load in moe.loads.values():
                load.waiting.clear()
                for fetch in load.loading:
                    fetch.stale = True
            self.loading_bytes -= sum(moe.sizes[expert] for expert, state in enumerate(moe.states) if state == LOADING)
            node, kept = moe.member.node or 0, moe.kept
            self.memory.add_expert(-sum(map(moe.sizes.__getitem__, kept)))
            ranges += [self.memory.pend(node, *part, part[1]) for expert in kept for part in moe.ranges(expert)]
            ranges += [self.memory.pend(node, *part, 0) for expert in moe.loads for part in moe.ranges(expert)]
            self.hot.forget(range(moe.first, moe.first + moe.layout.count))
        self._on_files()
        return ranges

    def used(self, moe: MoeFile, expert: int) -> None:
        self._count(moe, expert)
        self._shadow(moe, expert)
        self.counters.hit_bytes += moe.sizes[expert]

    def missed(self, moe: MoeFile, expert: int) -> list[int]:
        """Record a use of an expert that is not fully resident; return the experts to load.

        They are now LOADING, and the caller calls `arrived` for each of them.
        """
        sweeps = moe.sweeps(expert)
        self._shadow(moe, expert)
        if not sweeps:  # a prompt says little about the experts that the tokens after it use
            self._count(moe, expert)
        self.counters.miss_bytes += moe.sizes[expert]
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
            self.loading_bytes += moe.sizes[each]
        if self.excess_bytes > 0:
            self.memory.on_full()
        return experts

    def _shadow(self, moe: MoeFile, expert: int) -> None:
        size = moe.sizes[expert]
        if not self.shadow.touch(moe.first + expert, size):
            moe.space.evidence.lru_bytes += size

    def _count(self, moe: MoeFile, expert: int) -> None:
        self.hot.use(moe.first + expert)
        moe.seen += 1

    def catch_up(self, moe: MoeFile) -> None:
        """Count unobserved uses, so that experts age with the number of tokens, not of misses."""
        if rounds := moe.rounds - moe.caught_up:
            self.hot.skip(max(0, rounds * moe.layout.token_uses - moe.seen))
            moe.seen, moe.caught_up = 0, moe.rounds

    def sampled(self, moe: MoeFile, is_observed: bool) -> None:
        """Record the end of a sample of all resident experts; not `is_observed`: their uses could not be observed."""
        keys = range(moe.first, moe.first + moe.layout.count)
        if is_observed:
            self.hot.retire(keys)
        else:
            self.hot.unobserved(keys)

    def lost(self, moe: MoeFile, expert: int) -> None:
        self._remove(moe, expert)

    def arrived(self, moe: MoeFile, expert: int, done: bool) -> None:
        if moe.member.moe is not moe:
            return
        if moe.states[expert] == LOADING:
            self.loading_bytes -= moe.sizes[expert]
        done = done and not moe.alone
        moe.states[expert] = TOUCHED if done else ABSENT
        if done:
            self.hot.keep(moe.first + expert)
            moe.came_ns[expert] = time.monotonic_ns()
            self.memory.add_expert(moe.sizes[expert])
        if self.excess_bytes > 0:
            self.memory.on_full()

    def turn(self, moe: MoeFile, alone: bool) -> None:
        moe.alone = alone
        for expert in moe.kept if alone else ():
            self.lost(moe, expert)

    def found(self, moe: MoeFile, experts: Iterable[int]) -> None:
        for expert in experts:
            if moe.states[expert] == ABSENT:
                self.arrived(moe, expert, done=True)

    @property
    def excess_bytes(self) -> int:
        wanted = self.loading_bytes + HEADROOM_BYTES
        together = self.memory.used_bytes + wanted - self.memory.room_bytes
        return min(together, self.memory.experts_bytes + wanted - max(self.room_bytes, LEAST_ROOM_BYTES))

    def faulted(self, moe: MoeFile, number: int, reach: int, now_ns: int) -> None:
        self._faults.append((now_ns, moe, number, reach))

    def _read_around(self) -> Iterator[Invalidation]:
        now_ns = time.monotonic_ns()
        while self._faults and now_ns - self._faults[0][0] > AROUND_NS:
            _, moe, number, reach = self._faults.popleft()
            if (node := moe.member.node) is not None and moe.member.moe is moe and not moe.alone:
                yield from (self.memory.pend(node, *part, 0) for part in moe.neighbours(number, reach))

    def victims(self) -> list[Invalidation]:
        """Evict experts until there is room; return the ranges to invalidate."""
        excess = self.excess_bytes
        ranges = list(self._read_around()) if excess > 0 else []
        keys = self._eviction_order() if excess > 0 else iter(())
        while excess > 0 and (key := next(keys, None)) is not None:
            moe, expert = self.of(key)
            self._remove(moe, expert)
            self.left += 1
            excess -= moe.sizes[expert]
            if (node := moe.member.node) is not None:
                ranges += [self.memory.pend(node, *part, part[1]) for part in moe.own(expert)]
        return ranges

    def _eviction_order(self) -> Iterator[int]:
        """Yield the keys of experts to evict; the caller evicts each before it requests the next.

        Experts of the layer being computed are never evicted. Experts whose tripwire was not touched in their layer come
        first.
        """
        untouched = (moe.first + expert for moe in self.moe_files for expert in moe.unused())
        yield from sorted(untouched, key=self.hot.value)
        while (key := self.hot.least(self._is_computed)) is not None:
            yield key

    def _is_computed(self, key: int) -> bool:
        moe, expert = self.of(key)
        return moe.computes(expert)

    def of(self, key: int) -> tuple[MoeFile, int]:
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
        self.memory.add_expert(-moe.sizes[expert])
