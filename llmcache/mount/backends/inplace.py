"""The in-place back end steers the page cache of SOURCE's files; clients access their file system directly.

No client ever waits for this process. Touches that BPF programs report (`touches.py`) take the place of READ requests.

To fetch an extent, this process faults on the first page of each huge page, and the file system reads it into one folio
(measured: 0.02 CPU seconds per GB; readahead in single pages takes 0.13 to 0.2). Readahead fetches huge pages that are
resident in part, and all pages on file systems without large folios. Pages are dropped through the mappings of clients
(`files.py`). Only loops and experts of MoE models are fetched and dropped. Locks: `files.py`, `state.py`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from llmcache.cache.arbitration import LEAST_WINDOW_MAX_BYTES, least_window
from llmcache.cache.space import HUGE_BYTES
from llmcache.mount import syscalls
from llmcache.mount.backends.files import CHECK_S, FAILURES_MAX, File, Files, MappedFile, read_ahead
from llmcache.mount.backends.samples import Samples
from llmcache.mount.backends.touches import MISS, Touch, Touches
from llmcache.mount.source.backing import Backing
from llmcache.mount.state.interfaces import ClientReads, EngineCalls, KernelNotifier
from llmcache.mount.state.space import (
    ABSENT,
    LOADING,
    PINNED,
    READY,
    SINGLE,
    SPARSE,
    TOUCHED,
    Fetch,
    LoopSpace,
    MoeFile,
    SpaceFile,
)
from llmcache.mount.state.state import Job
from llmcache.storage import cached_blocks
from llmcache.units import BLOCK_BYTES

log = logging.getLogger(__name__)

AGAIN_NS = 100_000_000  # touches of an extent within this time count as one
STILL_NS = 300_000_000  # without a touch for this time, a first pass has ended or pauses
SOON_S, ACTIVE_S = 0.02, 0.1  # how often hits are collected, for ACTIVE_S after the last touch
REACH_MAX_BYTES = 1 << 20  # the kernel reads at most this much before a fault, and behind it
MEASURED_BYTES, WIDER = 128 << 20, 1.5  # bytes fetched before the window is adapted; factor by which it is widened
FAST_BPS = 700e6  # more than a SATA disk delivers
RENEWAL_SHARE, RENEWAL_TURN_S = 0.2, 0.1  # most of the time since the loop was pinned whole; most in one turn
RENEWAL_EXTENTS, PINS_S = 4, 1.0  # extents at a time; time to wait for their unlock
RENEWAL_BPS, RENEWAL_LEAST_BYTES = 100e6, 32 << 20  # no renewal if storage is slower than this over these bytes


class InPlaceBackend:
    """Fetches and drops extents of SOURCE's files, and reports touches."""

    in_place, large_extent = True, HUGE_BYTES

    def __init__(self, engine: EngineCalls) -> None:
        self.engine = engine
        self.state = engine.state
        self.touches = Touches()
        self.files = Files(self.touches, engine)
        services = self.state.services
        self._observing = services.thread("touches", self._observe)
        self._tending = services.thread("files", self.files.run)
        self._renewing = services.thread("renew", self._look_after)
        self.samples = Samples(self.state, self.files, logging.WARNING)
        self._sampling = services.thread("sample", self.samples.run)
        self._closed = False
        self._busy = 0  # reads under way
        self._busy_ns = 0  # since when `_busy` is not 0, or the end of the last read
        # Recent sums: halved each time that MEASURED_BYTES were requested.
        self._requested_bytes, self._read_bytes, self._read_s = 0, 0, 0.0
        self._judged_ns = time.monotonic_ns()

    def start(self, _notifier: KernelNotifier | None, _mountpoint: str) -> None:
        if not self._observing.is_alive():
            self._observing.start()
            self._tending.start()
            self._renewing.start()
            self._sampling.start()

    def stop(self) -> None:
        while self.state.jobs:
            self.state.jobs.popleft()()

    def close(self) -> None:
        self._closed = True
        if self._observing.is_alive():
            self.files.stop()
            self.files.has_opened.set()
            self.samples.stop()
            self._tending.join(timeout=10)
            self._observing.join(timeout=10)
            self._renewing.join(timeout=10)
            self._sampling.join(timeout=10)
        self.touches.close()

    def guards(self, _mountpoint: str) -> bool:
        """No client hangs if this process is killed."""
        return True

    # Fetching

    def follows(self, space: LoopSpace) -> bool:
        """Return True for loops; kernel readahead serves other reads for less CPU time. The caller holds the lock.

        False in a first pass over a loop that will be pinned whole, if the kernel reads ahead in huge pages: if both read,
        it continues in small pages.
        """
        is_kernels = not space.touches.passes and self.files.window >= HUGE_BYTES and space.kept_whole
        return space.looping and not space.left and not (is_kernels and time.monotonic_ns() - space.last_ns <= STILL_NS)

    def keys(self, space: LoopSpace) -> set[tuple[int, int]]:
        return {(member.identity.dev, member.identity.ino) for member in space.members if member.identity is not None}

    def read_bytes(self, space: LoopSpace) -> int:
        files = (self.files.of_node(member.node) for member in space.members)
        reads = [self.touches.reads(file.number) for file in files if file is not None]
        return sum(map(sum, reads))

    def client_reads(self) -> ClientReads:
        return self.touches.all_reads()

    def faults(self) -> dict[str, int]:
        return {"lost_touches": self.touches.lost, "refused_advice": self.files.refused}

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        absent: list[int] = []
        for extent in extents:
            member = space.member_of(extent)
            if member.backing is not None:
                length = space.length_of(member, extent)
                pages = cached_blocks(member.backing.fd, space.offset_of(member, extent), length)
                absent += [extent] if 2 * pages * BLOCK_BYTES < length else []
        return absent

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        for file in filter(None, [self.files.of_node(member.node) for member in space.members]):
            if 0 in file.programs:  # a client outside this PID namespace, whose page tables cannot be read
                return ()
            with self.files.lock:
                for program in file.readers:
                    program.look(again=True)
                pids = [program.pid for program in file.readers if program.maps(*file.key)]
            if pids and not self.samples.can_read():
                return ()
            for pid in pids:
                try:
                    Path(f"/proc/{pid}/clear_refs").write_text("3")
                except FileNotFoundError:  # the process has ended, or the kernel has no CONFIG_PROC_PAGE_MONITOR
                    if os.path.exists(f"/proc/{pid}"):
                        return ()
                except OSError as error:
                    log.debug("cannot clear the accessed bits of process %d: %s", pid, error.strerror)
                    return ()
        return extents

    def conclude(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        touched: list[int] = []
        for member in space.members:
            in_member = [extent for extent in extents if member.base <= extent < member.base + member.count]
            file = self.files.of_node(member.node)
            if in_member and file is not None:
                parts = [(space.offset_of(member, extent), space.length_of(member, extent)) for extent in in_member]
                touched += itertools.compress(in_member, self.samples.touched(file, parts))
        return touched

    def find_experts(self, moe: MoeFile) -> None:
        whole: list[int] = []
        partly: list[tuple[int, int]] = []
        file = self.files.of_node(moe.member.node)
        if file is None:
            return
        with contextlib.suppress(OSError), self.files.opened(file) as fd:
            for expert in range(moe.layout.count):
                pages = sum(cached_blocks(fd, *part) for part in moe.ranges(expert))
                if pages * BLOCK_BYTES >= moe.sizes[expert] > 0:
                    whole.append(expert)
                elif pages:
                    partly += moe.own(expert)
        with self.state.lock:
            if moe.member.moe is moe and not moe.alone:
                self.state.expert_cache.found(moe, whole)
                for part in partly:
                    self.state.invalidate(moe.member.node or 0, *part)

    def ahead(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int = 0) -> Job | None:
        return self._claim(space, member, extent, ahead=True)

    def _demand(self, space: LoopSpace, member: SpaceFile, extent: int) -> None:
        if member.reachable and extent not in space.loading:
            self.state.queue(self._claim(space, member, extent, ahead=False))

    def _claim(self, space: LoopSpace, member: SpaceFile, extent: int, ahead: bool) -> Job:
        length = space.length_of(member, extent)
        fetch = Fetch(extent, length, ahead, member.backing, space.accounted_bytes[extent])
        space.begin_load(fetch)
        self.state.memory.account(space, extent, length)
        member.loads += 1
        return functools.partial(self._fetch, space, member, fetch)

    def _fetch(self, space: LoopSpace, member: SpaceFile, fetch: Fetch) -> None:
        read, mapping = 0, None if fetch.stale else self._begin(member, fetch.backing)
        if mapping is None:
            fetch.error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        else:
            try:
                read = mapping.populate(space.offset_of(member, fetch.extent), fetch.length)
            except OSError as error:
                fetch.error = error
        with self.state.lock:
            if mapping is not None:
                self._end(mapping, fetch.length, read)
            self.state.load_ended(member)
            if space.loading.get(fetch.extent) is fetch:
                self._arrived(space, fetch)

    def fill(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> bool:
        mapping, read = self._begin(member, backing), -1
        if mapping is None:
            return False
        with contextlib.suppress(OSError):
            read = mapping.populate(space.offset_of(member, extent), space.length_of(member, extent))
        with self.state.lock:
            self._end(mapping, space.length_of(member, extent), max(read, 0))
        return read >= 0

    def _fetch_expert(self, moe: MoeFile, expert: int, number: int) -> None:
        """Load an expert; slice `number`, on which the client waits if it belongs to this expert, comes first."""
        file, read, done = self.files.of_node(moe.member.node), 0, False
        start = moe.layout.starts[number]
        ranges = sorted(moe.ranges(expert), key=lambda part: not part[0] <= start < part[0] + part[1])
        if file is not None:
            with contextlib.suppress(OSError), self.files.opened(file) as fd:
                read = read_ahead(fd, ranges, self.files.window)
                done = True
        with self.state.lock:
            self.state.counters.backing_read_bytes += read
            self.state.counters.stored_bytes += read
            self.state.load_ended(moe.member)
            self.state.expert_cache.arrived(moe, expert, done)

    def _begin(self, member: SpaceFile, backing: Backing | None) -> MappedFile | None:
        """Return None if the open file is no longer `backing`."""
        file = self.files.of_node(member.node)
        with self.state.lock:
            mapping = None if file is None else file.mapping
            if mapping is None or mapping.backing is not backing:
                return None
            mapping.reads += 1
            if not self._busy:
                self._busy_ns = time.monotonic_ns()
            self._busy += 1
            return mapping

    def _end(self, mapping: MappedFile, requested_bytes: int, read_bytes: int) -> None:
        """Record the end of a read, and adapt the least window. The caller holds the lock.

        A wider window keeps fetches ahead of clients, but leaves less room for pins, which costs more on slow storage.
        """
        mapping.reads -= 1
        self.state.ended.notify_all()
        self.state.counters.backing_read_bytes += read_bytes
        self.state.counters.stored_bytes += read_bytes
        self._busy -= 1
        self._requested_bytes += requested_bytes
        self._read_bytes += read_bytes
        now_ns = time.monotonic_ns()
        self._read_s += (now_ns - self._busy_ns) / 1e9
        self._busy_ns = now_ns
        if self._requested_bytes < MEASURED_BYTES:
            return
        window = least_window(self._read_bytes / self._read_s)
        flow_bps = MEASURED_BYTES // 2 * 1e9 / (now_ns - self._judged_ns)
        self._judged_ns = now_ns
        if self._read_bytes < self._requested_bytes // 2 and flow_bps > FAST_BPS:
            window = min(LEAST_WINDOW_MAX_BYTES, max(window, int(WIDER * self.state.least_window_bytes)))
        self._requested_bytes, self._read_bytes, self._read_s = (
            self._requested_bytes // 2,
            self._read_bytes // 2,
            self._read_s / 2,
        )
        if not 0.8 < window / self.state.least_window_bytes < 1.25:
            self.state.least_window_bytes = window
            self.engine.replan()

    def _arrived(self, space: LoopSpace, fetch: Fetch) -> None:
        extent, now_ns = fetch.extent, time.monotonic_ns()
        if fetch.error is not None:
            space.fail_load(extent, now_ns, for_good=fetch.error.errno != errno.ESTALE)
        elif fetch.ahead and not fetch.joined:
            space.make_ready(extent, now_ns)
        else:
            space.touch(extent, now_ns)
            self.state.consumed(self.engine.judge.used_bytes(space, extent), False)
        if fetch.error is None:
            self.engine.pin_store.stored(space, fetch)

    # Dropping

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        file = self.files.of_node(node)
        if file is None:
            return
        size = file.status.st_size
        parts = [(offset, length or max(0, size - offset)) for offset, length in parts]
        with self.files.lock:
            advice = syscalls.MADV_COLD if file.mappers > 1 else syscalls.MADV_PAGEOUT
            for program in file.readers:
                program.advise(*file.key, parts, advice)
        with contextlib.suppress(OSError), self.files.opened(file) as fd:
            if written:
                os.fdatasync(fd)
            for part in parts:
                os.posix_fadvise(fd, *part, os.POSIX_FADV_DONTNEED)

    # The observing thread

    def _observe(self) -> None:
        active_until = 0.0
        while not self._closed:
            touches = self.touches.wait(SOON_S if time.monotonic() < active_until else CHECK_S)
            if touches:
                active_until = time.monotonic() + ACTIVE_S
            if not self.state.running:
                continue
            if touches:
                with self.state.lock:
                    if any([self._touched(touch) for touch in touches]):
                        self.state.work.notify()

    def _touched(self, touch: Touch) -> bool:
        file = self.files.by_number.get(touch.file)
        if file is None:
            return False
        mapping = file.mapping
        owner = self.state.owners.get(mapping.backing) if mapping is not None else None
        is_unknown = owner is None or (owner[0] is not file.space and not file.unplaced)
        if is_unknown or touch.pid not in file.programs:
            self.files.request(file, touch.pid)
        if owner is None or owner[0] is not file.space:
            return False
        space, member = owner
        if touch.extent >= member.count:
            if member.moe is not None:
                self._slice_touched(member.moe, touch.extent - member.count, touch)
            return False
        if space.alive:
            self._record_touch(space, member, file, member.base + touch.extent, touch)
        return space.alive

    def _slice_touched(self, moe: MoeFile, number: int, touch: Touch) -> None:
        if moe.alone:
            return
        expert = moe.layout.expert_of[number]
        state = moe.states[expert]
        if state == ABSENT or (state == LOADING and touch.flags & MISS):
            self.state.expert_cache.faulted(moe, number, min(REACH_MAX_BYTES, self.files.window // 2), touch.t_ns)
        if state == LOADING or (state == TOUCHED and not (touch.flags & MISS and self._lacks(moe, number))):
            return  # counted when its load was requested, or by the next sample
        experts = self.state.expert_cache.missed(moe, expert)
        moe.fresh.update(experts[:1])
        for each in experts:
            self.state.references.slices(moe.space, moe.member, moe.ranges(each), touch.pid)
            moe.member.loads += 1
            self.state.queue(functools.partial(self._fetch_expert, moe, each, number))

    def _lacks(self, moe: MoeFile, number: int) -> bool:
        """A miss alone may be of a page that is being read."""
        file = self.files.of_node(moe.member.node)
        if file is None or file.mapping is None:
            return False
        offset, length = moe.pages_of(number)
        return cached_blocks(file.mapping.backing.fd, offset, length) < length // BLOCK_BYTES

    def _record_touch(self, space: LoopSpace, member: SpaceFile, file: File, extent: int, touch: Touch) -> None:
        state, now_ns = space.state(extent), touch.t_ns
        length = space.length_of(member, extent)
        space.last_pid = touch.pid
        if state == SINGLE:
            space.record_pages(extent, now_ns)
            if file.mapping is not None:
                pages = cached_blocks(file.mapping.backing.fd, space.offset_of(member, extent), length)
                self.engine.judge.touched_pages(space, extent, pages * BLOCK_BYTES)
            return
        self.state.counters.requested_bytes += length
        done = space.record_access(extent, now_ns, bool(touch.flags & MISS) and state in (ABSENT, SPARSE), touch.pid)
        if done is not None:
            self.engine.pass_ended(space, done)
            state = space.state(extent)
        self.engine.judge.touched(space, extent)
        if not space.looping or space.left:
            return
        if state not in (TOUCHED, PINNED):
            self.state.references.claimed(space, member, extent, touch.pid)
        if state == ABSENT or (state == SPARSE and space.continues(extent)):
            self._demand(space, member, extent)
        elif state == LOADING:
            fetch = space.loading[extent]
            if fetch.ahead and not fetch.joined:
                self.state.counters.prefetch_late_bytes += length
            fetch.joined = True
        elif state == READY:
            space.touch(extent, now_ns)
            space.missed.pop(extent, None)
            used_bytes = self.engine.judge.used_bytes(space, extent)
            self.state.consumed(used_bytes, False)
            self.state.counters.prefetch_useful_bytes += used_bytes
        elif state == TOUCHED:
            self._came_back(space, member, file, extent, touch, length)

    def _came_back(self, space: LoopSpace, member: SpaceFile, file: File, extent: int, touch: Touch, length: int) -> None:
        """Count a hit or a miss. The caller holds the lock."""
        if touch.flags & MISS and file.mapping is not None:
            offset = space.offset_of(member, extent)
            if cached_blocks(file.mapping.backing.fd, offset, length) < length // BLOCK_BYTES // 2:
                self.state.counters.refault_bytes += length
                self._demand(space, member, extent)
                return
        is_same_visit = touch.t_ns - space.touched.get(extent, 0) < AGAIN_NS
        space.touch(extent, touch.t_ns)
        if not is_same_visit:
            self.state.consumed(self.engine.judge.used_bytes(space, extent), True)

    # The renewing thread

    def _look_after(self) -> None:
        while not self._closed:
            self.files.has_opened.clear()
            if not (self.files.in_use or self._closed):
                self.files.has_opened.wait()
            time.sleep(CHECK_S)
            for file in list(self.files.in_use.values()) if self.state.running else []:
                self._renew(file)

    def _renew(self, file: File) -> None:
        """Read pinned extents in small pages again as huge pages, once the loop is pinned whole.

        Clients take up to a quarter less time then. It needs fast storage, and at most one client that maps the file.
        """
        turn_s, more = 0.0, True
        with self.files.mapped(file) as mapping:
            while more and mapping is not None and mapping.whole_ns and turn_s < RENEWAL_TURN_S:
                whole_s = (time.monotonic_ns() - mapping.whole_ns) / 1e9
                is_slow = RENEWAL_LEAST_BYTES < self._read_bytes < RENEWAL_BPS * self._read_s
                if is_slow or mapping.renewal_s > RENEWAL_SHARE * whole_s or mapping.failures >= FAILURES_MAX:
                    return
                if self.state.is_near:  # the new pages take memory before the old ones are freed
                    return
                with self.files.lock:
                    if file.mappers > 1:
                        return
                began = time.monotonic()
                try:
                    more = self._renew_next(file, mapping)
                except OSError as error:  # the kernel does not report huge pages
                    log.debug("inode %d is not renewed: %s", file.status.st_ino, error.strerror)
                    return
                took_s = time.monotonic() - began
                mapping.renewal_s += took_s
                turn_s += took_s

    def _renew_next(self, file: File, mapping: MappedFile) -> bool:
        state = self.state
        with state.lock:
            owner = state.owners.get(mapping.backing)
            if owner is None or owner[0] is not file.space or mapping.renewed >= owner[1].count:
                return False
            space, member = owner
            extents = range(member.base + mapping.renewed, member.base + member.count)[:RENEWAL_EXTENTS]
            mapping.renewed += len(extents)
            small = [extent for extent in extents if space.state(extent) == PINNED]
        parts = {extent: (space.offset_of(member, extent), space.length_of(member, extent)) for extent in small}
        small = [extent for extent in small if not mapping.is_huge(*parts[extent])]
        if not small:
            return True
        with state.lock:
            if state.owners.get(mapping.backing) is not owner or not member.reachable:
                return False
            small = [extent for extent in small if space.state(extent) == PINNED]
            self.engine.pin_store.release(space, small)
            state.memory.forget(space, small)
            jobs = [self._claim(space, member, extent, ahead=True) for extent in small]
        self.engine.pin_store.settle(PINS_S)
        for extent in small:
            self.drop(file.status.st_ino, [parts[extent]])
        for job in jobs:
            job()
        return True
