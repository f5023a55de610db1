"""Loader threads fetch extents ahead of the readers; the evictor thread keeps the mount's page cache below the limit.

A loader first runs queued jobs, such as the STORE of a fetched extent. It claims an extent only if there is room, and never
holds a claimed extent while it waits for an invalidation.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from collections.abc import Iterator

from llmcache.cache.loops import CURSOR_LIFE_NS
from llmcache.mount.engine.planner import ABANDONED_NS, LAG_NS, LAST_LAG_NS, choose_victims, excess_bytes
from llmcache.mount.state.accounting import Invalidation
from llmcache.mount.state.interfaces import Backend
from llmcache.mount.state.space import ABSENT, READY, Fetch, LoopSpace
from llmcache.mount.state.state import CacheState, Job

log = logging.getLogger(__name__)

LOADERS = 4
IDLE_S = 0.5
AHEAD_SHARE, AHEAD_SHARE_ALONE = 0.5, 0.75  # share of a window ahead of each of several readers, or of the only one
SPAN_SHARE = 0.75  # share of a loop within which a loader looks ahead, unless the loop is pinned whole
UNSEEN_WINDOW_BYTES = 16 << 20  # window of a file that is not known to loop


class Loader:
    """The loader threads and the evictor thread."""

    def __init__(self, state: CacheState, backend: Backend) -> None:
        self.state = state
        self.backend = backend
        self._threads = [state.services.thread(f"load-{number}", self._load) for number in range(LOADERS)]
        self._threads.append(state.services.thread("evict", self._evict))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10)

    def _load(self) -> None:
        state = self.state
        while state.running:
            with state.lock:
                job = state.jobs.popleft() if state.jobs else self._claim()
                if job is None:
                    state.work.wait(IDLE_S)
                elif state.jobs or self._soonest() is not None:
                    state.work.notify()
            if job is not None:
                try:
                    job()
                except Exception:
                    self._fail(job)
                    raise

    def _fail(self, job: Job) -> None:
        arguments = getattr(job, "args", ())
        for fetch in [each for each in arguments if isinstance(each, Fetch)]:
            fetch.error = fetch.error or OSError(errno.EIO, os.strerror(errno.EIO))
            with self.state.lock:
                for space in [each for each in arguments if isinstance(each, LoopSpace)]:
                    if space.loading.get(fetch.extent) is fetch:
                        space.cancel(fetch.extent)
                        self.state.finish(fetch)
            fetch.done.set()

    def _claim(self) -> Job | None:
        soonest = self._soonest()
        if soonest is None:
            return None
        space, extent = soonest
        return self.backend.ahead(space, space.member_of(extent), extent, space.last_pid)

    def _soonest(self) -> tuple[LoopSpace, int] | None:
        """The caller holds the engine's lock."""
        best: tuple[tuple[int, int], LoopSpace, int] | None = None
        for space in self.state.index.read:
            if not space.cursors.live or ABSENT not in space.status or not self.backend.follows(space):
                continue
            for urgency, extent in self._candidates(space):
                if best is None or urgency < best[0]:
                    best = (urgency, space, extent)
        if best is None:
            return None
        _, space, extent = best
        if self.state.memory.used_bytes + space.extent_bytes > self.state.memory.room_bytes:
            self.state.request_room()
            return None
        return space, extent

    def _candidates(self, space: LoopSpace) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield (urgency, extent to fetch) for each reader; the smallest urgency comes first.

        Urgency: the place in the convoy, the last reader first; then the bytes already fetched ahead.
        """
        # Only readers that move: the extents ahead of a reader that pauses would be evicted and fetched again and again.
        # If the whole loop fits, nothing is evicted.
        since_ns = space.last_ns - CURSOR_LIFE_NS
        if not space.kept_whole:
            since_ns = max(since_ns, time.monotonic_ns() - ABANDONED_NS)
        is_sequential = space.looping or space.sequential_ns > since_ns  # otherwise its extents may be read in any order
        readers = [
            cursor
            for cursor in space.cursors.trailing_first()
            if is_sequential and (cursor.steps > 0 or space.looping) and cursor.last_ns > since_ns
        ]
        # If only one reader moves, it may use more of the window.
        share = AHEAD_SHARE if len(readers) > 1 else AHEAD_SHARE_ALONE
        ahead = int(share * (space.plan.window_bytes or UNSEEN_WINDOW_BYTES))
        span = int(space.count * SPAN_SHARE) if space.looping and not space.kept_whole else space.count
        for place, cursor in enumerate(readers):
            extent = space.next_absent(cursor.head, span)
            if extent is None or not space.member_of(extent).reachable:
                continue
            waiting = space.waiting(cursor.head, space.order.rank_of[extent]) * space.extent_bytes
            if waiting < ahead:
                yield (place, waiting), extent

    def _evict(self) -> None:
        state = self.state
        while state.running:
            with state.lock:
                ranges, state.memory.pending = state.memory.pending, []
                ranges = ranges or state.expert_cache.victims()
                ranges = ranges or [self._evict_extent(*victim) for victim in choose_victims(state, time.monotonic_ns())]
                if not ranges:
                    state.room.wait(self._rest_s())
                    continue
            self._drop(ranges)

    def _rest_s(self) -> float:
        """The caller holds the engine's lock."""
        if excess_bytes(self.state) <= 0:
            return IDLE_S
        recent_ns = time.monotonic_ns() - LAST_LAG_NS - LAG_NS
        reading = any(space.touched and space.last_ns > recent_ns for space in self.state.index.read)
        return LAG_NS / 1e9 if reading else IDLE_S

    def _evict_extent(self, space: LoopSpace, extent: int) -> Invalidation:
        is_unread = space.state(extent) == READY
        evicted = self.state.memory.evict(space, extent)
        if is_unread:
            self.state.counters.prefetch_wasted_bytes += evicted.length
        return evicted

    def _drop(self, ranges: list[Invalidation]) -> None:
        state = self.state
        for node, ranges_of_node in itertools.groupby(ranges, key=lambda each: each.node):
            self.backend.drop(node, [(each.offset, each.length) for each in ranges_of_node])
        with state.lock:
            state.memory.invalidated(ranges)
            state.counters.invalidated_bytes += sum(each.length for each in ranges)
            if state.crowded:  # otherwise loaders have nothing to do, and would only take time from other threads
                state.crowded = False
                state.work.notify(len(ranges))
