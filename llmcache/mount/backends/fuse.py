"""The FUSE back end: answers READ requests, reads extents in one large I/O, and stores them in the page cache.

A reader, or a loader that runs ahead of one, claims the fetch of an extent under the lock. Every reader can use the data
once `done` is set; the STORE follows. The state of an extent decides how a request is answered:
- absent: fetch the whole extent;
- loading: wait for that fetch;
- ready: reply from memory; all pages except the first, the tripwire, are stored;
- touched or pinned: read the pages that the kernel lacks;
- single: read only the requested bytes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmcache.cache.space import LARGE_EXTENT
from llmcache.cache.steering import HIT, KEPT, MISS
from llmcache.mount.backends.samples import FilePrograms, Samples
from llmcache.mount.source.backing import Backing
from llmcache.mount.state.buffers import BOUNCE_BYTES, BUFFER_BYTES, MemoryRegion
from llmcache.mount.state.interfaces import EngineCalls, KernelNotifier, PinStore
from llmcache.mount.state.space import (
    ABSENT,
    LOADING,
    PINNED,
    READY,
    SINGLE,
    SPARSE,
    TOUCHED,
    BufferFetch,
    ExpertLoad,
    Fetch,
    LoopSpace,
    MoeFile,
    SpaceFile,
    Tripwire,
)
from llmcache.mount.state.state import READ, CacheState, Job, read_whole
from llmcache.procfs import Mount, MountWatch
from llmcache.units import PAGE_BYTES

log = logging.getLogger(__name__)


class FuseBackend:
    """Claims, loads, stores and drops extents."""

    in_place, large_extent = False, LARGE_EXTENT

    def __init__(
        self, state: CacheState, pin_store: PinStore, find: Callable[[str], Mount | None] = lambda _mountpoint: None
    ) -> None:
        self.state = state
        self.pin_store = pin_store
        self._find = find
        self.notifier: KernelNotifier | None = None
        self.slices = SliceReader(self)
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._entry: MountWatch[Mount | None] | None = None  # this mount's entry in the mount table

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Call it before the first request, so that clients do not hang if this process is killed."""
        self.notifier = notifier
        self._entry = MountWatch(lambda: self._find(mountpoint))
        entry = self._entry.current()
        self._guard(entry)
        self.slices.start(entry.dev if entry is not None else 0)

    def stop(self) -> None:
        """Extents that wait for a STORE are not stored."""
        self.slices.stop()

    def close(self) -> None:
        if self._entry is not None:
            self._entry.close()
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
            self._sentinel = None

    def guards(self, mountpoint: str) -> bool:
        assert self._entry is not None
        return self._guard(self._entry.current())

    def _guard(self, entry: Mount | None) -> bool:
        if entry is None:
            return False
        if self._sentinel is None or self._sentinel.poll() is not None:
            self._sentinel = start_sentinel(entry)
        return True

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        if self.notifier is not None:
            for offset, length in parts:
                self.notifier.invalidate(node, offset, length)

    def claim(self, space: LoopSpace, member: SpaceFile, extent: int, ahead: bool, pid: int = 0) -> BufferFetch | None:
        """The caller must load the fetch. None if there is no buffer. The caller holds the lock."""
        has_region = self.pin_store.has_region(space, extent)
        buffer = None if has_region else self.state.pool.take(space.extent_bytes, ahead)
        if buffer is None and not has_region:
            return None
        verdict = self.state.references.claimed(space, member, extent, pid)
        try:
            pinned_region = self.pin_store.region(space, extent, verdict)
            region = pinned_region or buffer or MemoryRegion(space.extent_bytes)
        except OSError:  # no memory: the extent is streamed, or read by pages
            self.state.references.lost(space, extent)
            pinned_region, verdict = None, MISS
            buffer = buffer or self.state.pool.take(space.extent_bytes, ahead)
            if buffer is None:
                return None
            region = buffer
        if pinned_region is not None and buffer is not None:  # this reference has changed the core's plan
            self.state.pool.give(buffer)
            buffer = None
        offset, length = space.offset_of(member, extent), space.length_of(member, extent)
        charged = space.accounted_bytes[extent]
        fetch = BufferFetch(extent, length, ahead, member.backing, charged, buffer=buffer, region=region, offset=offset)
        fetch.keep = verdict == KEPT
        space.begin_load(fetch)
        self.state.memory.account(space, extent, length)
        if verdict == HIT:
            fetch.held = True
            fetch.done.set()
        else:
            member.loads += 1
        if not ahead and space.missed.get(extent, 0) > 0:
            space.missed[extent] -= 1
        return fetch

    def follows(self, space: LoopSpace) -> bool:
        return not space.left

    def keys(self, space: LoopSpace) -> set[tuple[int, int]]:
        return {(self.slices.dev, member.node) for member in space.members if member.node is not None}

    def read_bytes(self, space: LoopSpace) -> int:
        return space.read_bytes

    def client_reads(self) -> None:
        """This process makes every read from storage."""

    def faults(self) -> dict[str, int]:
        return {}

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        return [extent for extent in extents if not space.accounted_bytes[extent]]

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        with self.state.lock:
            places = [(extent, *self._first_page(space, extent)) for extent in extents if space.state(extent) == PINNED]
        for _, _, node, offset in places:
            if node is not None:
                self.drop(node, [(offset, PAGE_BYTES)])
        return [extent for extent, _, node, _ in places if node is not None]

    def conclude(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        with self.state.lock:
            self.pin_store.lock_again(space, [extent for extent in extents if space.state(extent) == PINNED])
        return ()

    def find_experts(self, moe: MoeFile) -> None:
        """Experts are never left to the kernel over FUSE."""

    @staticmethod
    def _first_page(space: LoopSpace, extent: int) -> tuple[SpaceFile, int | None, int]:
        member = space.member_of(extent)
        return member, member.node, space.offset_of(member, extent)

    def ahead(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int = 0) -> Job | None:
        fetch = self.claim(space, member, extent, ahead=True, pid=pid)
        return None if fetch is None else functools.partial(self._load_and_store, space, member, fetch)

    def _load_and_store(self, space: LoopSpace, member: SpaceFile, fetch: BufferFetch) -> None:
        self.load(space, member, fetch)
        self.store(space, member, fetch)

    def load(self, space: LoopSpace, member: SpaceFile, fetch: BufferFetch) -> None:
        """It sets `done`, with data or with `error`."""
        if fetch.done.is_set():
            return
        backing = fetch.backing
        try:
            if backing is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            # Whole pages, so that O_DIRECT also works at the end of the file.
            wanted = -(-fetch.length // PAGE_BYTES) * PAGE_BYTES
            count = backing.read_into(fetch.region.address, wanted, fetch.offset)
            if count < fetch.length:
                raise OSError(errno.EIO, f"{member.path}: {count} of {fetch.length} bytes at {fetch.offset}")
        except OSError as error:
            fetch.error = error
        with self.state.lock:
            self.state.load_ended(member)
            if fetch.error is None:
                self.state.counters.backing_read_bytes += fetch.length
                space.read_bytes += fetch.length
                if fetch.keep and space.alive and not fetch.stale:
                    self.pin_store.keep(space, fetch.extent, fetch.region)
            elif fetch.load is None:
                self._fail(space, fetch)
        fetch.done.set()

    def _fail(self, space: LoopSpace, fetch: Fetch) -> None:
        """Readers get the error from their own read. The caller holds the lock."""
        extent = fetch.extent
        if fetch.keep and space.alive:
            self.state.references.lost(space, extent)
        if space.loading.get(extent) is fetch:
            self.state.memory.correct(space, extent, fetch.charged)
            space.fail_load(extent, time.monotonic_ns(), for_good=True)

    def store(self, space: LoopSpace, member: SpaceFile, fetch: BufferFetch) -> None:
        with self.state.lock:
            usable = fetch.error is None and self._current(space, fetch)
            self.state.storing.append((space, member))
            trip = (
                fetch.load is None
                and fetch.ahead
                and not fetch.joined
                and not self.pin_store.skips_trip(space, fetch.extent)
            )
        failed = -errno.EIO
        try:
            parts = [(PAGE_BYTES, fetch.length)] if trip else [(0, fetch.replied[0]), (fetch.replied[1], fetch.length)]
            failed = next(filter(None, (self._put(member, fetch, *part) for part in parts if usable)), 0)
        finally:
            self._put_ended(space, member, fetch, trip, usable, failed)

    def _put_ended(
        self, space: LoopSpace, member: SpaceFile, fetch: BufferFetch, trip: bool, usable: bool, failed: int
    ) -> None:
        with self.state.lock:
            self.state.store_ended(space, member)
            current = self._current(space, fetch)
            if current and fetch.load is not None and member.moe is not None:
                self.slices.ended(member.moe, fetch, usable and not failed)
            elif current and usable:
                self._stored(space, member, fetch, trip, failed)
            elif usable and member.node is not None:
                # The space has ended since: data stored after its pages were invalidated must be invalidated as well.
                self.state.invalidate(member.node, fetch.offset, fetch.length)
            self.state.finish(fetch)
        fetch.stored.set()

    def _current(self, space: LoopSpace, fetch: BufferFetch) -> bool:
        return not fetch.stale and (fetch.load is not None or space.loading.get(fetch.extent) is fetch)

    def _put(self, member: SpaceFile, fetch: BufferFetch, start: int, end: int) -> int:
        if self.notifier is None or member.node is None:
            return -errno.ENOTCONN
        # Rounded up to whole pages: a page that the reply covers in part is left to the next request.
        start = -(-start // PAGE_BYTES) * PAGE_BYTES if start else 0
        if end <= start:
            return 0
        return self.notifier.store(member.node, fetch.offset + start, fetch.region.address + start, end - start)

    def _stored(self, space: LoopSpace, member: SpaceFile, fetch: BufferFetch, trip: bool, failed: int) -> None:
        extent = fetch.extent
        if failed:
            log.debug("store of %s extent %d: errno %d", member.path, extent, -failed)
            space.fail_load(extent, time.monotonic_ns(), for_good=False)
            return
        self.state.counters.stored_bytes += fetch.length
        if trip and not fetch.joined and fetch.length > PAGE_BYTES:
            page = ctypes.string_at(fetch.region.address, PAGE_BYTES)
            space.make_ready(extent, time.monotonic_ns(), Tripwire(page, fetch.held))
        else:
            space.touch(extent, time.monotonic_ns())
            if fetch.joined or not fetch.ahead:
                self.state.consumed(fetch.length, fetch.held)
        self.pin_store.stored(space, fetch)

    def fill(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> bool:
        state, notifier = self.state, self.notifier
        try:
            region = MemoryRegion(space.extent_bytes)
        except OSError:  # no memory
            return False
        offset, length = space.offset_of(member, extent), space.length_of(member, extent)
        with state.lock:
            node = member.node
            state.storing.append((space, member))
            member.loads += 1
        complete = read_whole(state, backing, region, offset, length)
        with state.lock:
            state.load_ended(member)  # a close of the file waits for reads, and not for the STORE
        stored = False
        if complete and notifier is not None and node is not None:
            stored = notifier.store(node, offset, region.address, length) == 0
        with state.lock:
            state.store_ended(space, member)
            state.counters.stored_bytes += length if stored else 0
        return stored

    def under_way(self, space: LoopSpace, extent: int) -> BufferFetch:
        fetch = space.loading[extent]
        assert isinstance(fetch, BufferFetch)
        return fetch


def start_sentinel(entry: Mount) -> subprocess.Popen[bytes]:
    """Start the sentinel process of a mount."""
    script = str(Path(__file__).with_name("sentinel.py"))
    minor = str(os.minor(entry.dev))
    return subprocess.Popen([sys.executable, "-I", "-S", script, str(os.getpid()), minor], cwd="/")


def copy(target: int, region: MemoryRegion, start: int, length: int) -> None:
    """Copy a part of `region` to an address, without the GIL."""
    ctypes.memmove(target, region.address + start, length)


PIECE_BYTES = BUFFER_BYTES
TRIPS = 4  # tripwires set for each expert that was evicted
SORT_SHARE = 8  # inverted: share of the resident experts that are evicted or get a tripwire before they are sorted again
LOOK_S, IDLE_S, UNUSED_S = 0.005, 0.01, 1.0


class SliceReader:
    """Loads experts for the requests that miss them, and observes which resident experts are used.

    Loaders and requests read the slices of a missing expert in pieces, so that no reply waits for data that it does not
    need.

    Uses of resident experts send no request. So a page of each expert to be evicted next is dropped, as a tripwire; if page
    tables can be read (by root), accessed bits show the other uses. The kernel requests the pages around a page fault, too,
    so a request counts only for the slice in which it begins, or for the next one if it covers nothing of the first.
    """

    def __init__(self, backend: FuseBackend) -> None:
        self.backend = backend
        self.state = backend.state
        self._unwanted: list[tuple[MoeFile, int, int, int]] = []  # (file, expert, offset, bytes) to drop if it stays absent
        self._left = 0  # `ExpertCache.left` when `_due` was last increased
        self._due = 0  # tripwires to set
        self._coldest: Iterator[int] = iter(())  # keys of the experts that get the next tripwires
        self._sorted = 0  # `ExpertCache.left` when `_coldest` was made
        self.dev = 0  # device number of the mount
        self._programs = FilePrograms()
        self._over = threading.Event()
        self._samples: Samples | None = None
        self._threads: list[threading.Thread] = []

    def start(self, dev: int) -> None:
        """`dev`: device number of the mount. May follow `stop`."""
        self.dev = self._programs.dev = dev
        self._over.clear()
        self._samples = Samples(self.state, self._programs, logging.INFO)
        self._threads = [
            self.state.services.thread("trips", self._look),
            self.state.services.thread("sample", self._samples.run),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._samples is not None:
            self._samples.stop()
        for thread in self._threads:
            thread.join(timeout=10)
        self._programs.close()

    def wanted(self, moe: MoeFile, offset: int, size: int) -> int | None:
        """Return None for kernel readahead from the slice before. The caller holds the engine's lock."""
        first = moe.slice_at(offset)
        if first is None or moe.states[moe.layout.expert_of[first]] != ABSENT:
            return first
        if moe.reads_on(first, offset, size, time.monotonic_ns()):
            return None
        end = moe.end_of(first) // PAGE_BYTES * PAGE_BYTES
        return first if offset + size < end - PAGE_BYTES else moe.slice_at(end) if offset + size > end else None

    def claim(
        self, moe: MoeFile, number: int, offset: int, length: int, wanted: bool, pid: int, by_client: bool = True
    ) -> tuple[BufferFetch | None, bool]:
        """Return the fetch, and whether the caller must load it. The caller holds the lock.

        None: the caller reads only the requested bytes.
        """
        expert = moe.layout.expert_of[number]
        if pid:
            self._programs.request(moe.member.node or 0, pid)
        if by_client and moe.states[expert] == TOUCHED:
            self._came_back(moe, expert, length)
        if moe.states[expert] == ABSENT:
            experts = self.state.expert_cache.missed(moe, expert) if wanted and by_client else []
            moe.fresh.update(experts[:1])
            if not experts:
                self._unwanted += [(moe, expert, *part) for part in moe.inner(number, offset, offset + length)]
                return None, False
            for each in experts:
                self._begin(moe, each, offset)
                self.state.references.slices(moe.space, moe.member, moe.ranges(each), pid)
        return self._piece(moe, expert, offset)

    def _came_back(self, moe: MoeFile, expert: int, length: int) -> None:
        if expert in moe.trips:
            del moe.trips[expert]
            moe.reach(expert)
            self.state.expert_cache.used(moe, expert)
            moe.fresh.add(expert)
            return
        self.state.counters.refault_bytes += length
        count = moe.refaults[expert] = moe.refaults.get(expert, 0) + 1
        if count >= REFAULTS_MAX:
            self.state.expert_cache.lost(moe, expert)

    def _begin(self, moe: MoeFile, expert: int, offset: int) -> None:
        behind: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for start, length in moe.ranges(expert):
            pieces = [(at, min(PIECE_BYTES, start + length - at)) for at in range(start, start + length, PIECE_BYTES)]
            is_requested = start <= offset < start + length
            behind += [piece for piece in pieces if is_requested and piece[0] + piece[1] > offset]
            others += [piece for piece in pieces if not (is_requested and piece[0] + piece[1] > offset)]
        moe.loads[expert] = load = ExpertLoad(behind + others)
        job = functools.partial(self._load_next, moe, expert, load)
        self.state.jobs.extend([job] * len(load.waiting))
        self.state.work.notify(len(load.waiting))
        self._finish(moe, expert, load)  # done already, if all of the expert is in extents of the loop

    def _piece(self, moe: MoeFile, expert: int, offset: int) -> tuple[BufferFetch | None, bool]:
        load = moe.loads.get(expert)
        if load is None:
            return None, False
        for fetch in load.loading:
            if fetch.offset <= offset < fetch.offset + fetch.length:
                fetch.users += 1
                fetch.joined = True
                return fetch, False
        for piece in load.waiting:
            if piece[0] <= offset < piece[0] + piece[1]:
                return self._take(moe, expert, load, piece, ahead=False), True
        return None, False

    def _take(self, moe: MoeFile, expert: int, load: ExpertLoad, piece: tuple[int, int], ahead: bool) -> BufferFetch | None:
        offset, length = piece
        buffer = self.state.pool.take(length, ahead)
        try:
            region = buffer or MemoryRegion(PIECE_BYTES)
        except OSError:  # no memory: the piece is read by pages
            load.failed = True
            load.waiting.clear()
            self._finish(moe, expert, load)
            return None
        load.waiting.remove(piece)
        moe.member.loads += 1
        backing = moe.member.backing
        fetch = BufferFetch(expert, length, ahead, backing, buffer=buffer, region=region, offset=offset, load=load)
        load.loading.append(fetch)
        return fetch

    def _load_next(self, moe: MoeFile, expert: int, load: ExpertLoad) -> None:
        with self.state.lock:
            fetch = self._take(moe, expert, load, load.waiting[0], ahead=True) if load.waiting else None
        if fetch is not None:
            self.backend.load(moe.space, moe.member, fetch)
            self.backend.store(moe.space, moe.member, fetch)

    def ended(self, moe: MoeFile, fetch: BufferFetch, stored: bool) -> None:
        load, expert = fetch.load, fetch.extent
        assert load is not None
        load.loading.remove(fetch)
        load.failed = load.failed or not stored
        if stored:
            self.state.counters.stored_bytes += fetch.length
            if 0 <= (start := moe.probes[expert] - fetch.offset) < fetch.length:
                moe.pages[expert] = ctypes.string_at(fetch.region.address + start, PAGE_BYTES)
        self._finish(moe, expert, load)

    def _finish(self, moe: MoeFile, expert: int, load: ExpertLoad) -> None:
        if not load.waiting and not load.loading and moe.loads.get(expert) is load:
            del moe.loads[expert]
            if load.failed:  # drop the pieces that were stored
                self._unwanted += [(moe, expert, offset, length) for offset, length in moe.own(expert)]
            self.state.expert_cache.arrived(moe, expert, not load.failed)

    # The thread

    def _look(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            with self.state.lock:
                places = self._unwanted_places() + self._trip_places()
            for node, offset, length in places:
                self.backend.drop(node, [(offset, length)])
            pause_s = LOOK_S if places else IDLE_S if self.state.expert_cache.moe_files else UNUSED_S

    def _unwanted_places(self) -> list[tuple[int, int, int]]:
        unwanted, self._unwanted = self._unwanted, []
        absent = [part for part in unwanted if part[0].states[part[1]] == ABSENT]
        return [(part[0].member.node, *part[2:]) for part in absent if part[0].member.node is not None]

    def _trip_places(self) -> list[tuple[int, int, int]]:
        """Return (node, offset, bytes) of pages to drop. The caller holds the lock."""
        cache = self.state.expert_cache
        for moe in cache.moe_files:
            cache.catch_up(moe)
        self._due += TRIPS * (cache.left - self._left)
        self._left = cache.left
        tripwires = sum(len(moe.trips) for moe in cache.moe_files)
        self._due = min(self._due, len(cache.hot) - tripwires)
        places: list[tuple[int, int, int]] = []
        if SORT_SHARE * TRIPS * (cache.left - self._sorted) > len(cache.hot):
            # For many tripwires at a time; an expert that was used since gets one more than needed.
            many = tripwires + max(self._due, len(cache.hot) // SORT_SHARE)
            self._coldest, self._sorted = iter(cache.hot.coldest(many)), cache.left
        while len(places) < self._due and (key := next(self._coldest, None)) is not None:
            if key not in cache.hot:
                continue
            moe, expert = cache.of(key)
            if expert in moe.trips or moe.computes(expert):  # a use in the current layer is counted already
                continue
            if moe.member.node is not None:
                moe.trip(expert)
                places.append((moe.member.node, moe.probes[expert], PAGE_BYTES))
        self._due -= len(places)
        return places


REFAULTS_MAX = 2
WAIT_S = 5.0
UNKNOWN = "its supplementary groups do not count, and uses of experts that it maps are observed only by requests"
STORE_WAIT_S = 0.005  # for a slice: without this wait, kernel readahead requests pages that are being stored, and more


@dataclass(slots=True)
class PendingRead:
    """The unanswered part of a read: `size` bytes at `offset` of a file, into memory at `address`.

    `pid`: 0 for pin helpers, and outside this PID namespace.
    """

    space: LoopSpace
    member: SpaceFile
    backing: Backing
    address: int
    offset: int
    size: int
    pid: int
    first_byte: int
    by_client: bool


class Reader:
    """Serves reads of all files."""

    def __init__(self, engine: EngineCalls, backend: FuseBackend) -> None:
        self.engine = engine
        self.backend = backend
        self.state = backend.state
        self._warned = False

    def read(self, backing: Backing, address: int, size: int, offset: int, pid: int) -> int:
        """Return the bytes read, fewer only at the end of the file. OSError."""
        by_client = pid not in self.engine.pins.pids
        pid = pid if by_client else 0
        if by_client and not pid and not self._warned:
            self._warned = True
            log.warning("a client outside this PID namespace reads files: %s", UNKNOWN)
        is_deleted = backing.hidden or backing.deleted
        if by_client and backing not in self.state.owners and self.state.running and not is_deleted:
            self.engine.adopt(backing)
        size = max(0, min(size, backing.size - offset))
        owner = self.state.owners.get(backing)
        if owner is None or offset + size > owner[1].size_bytes:
            return self.uncached(backing, address, size, offset, by_client)
        rest, wanted = PendingRead(*owner, backing, address, offset, size, pid, offset, by_client), None
        if rest.member.moe is not None:
            with self.state.lock:
                wanted = self.backend.slices.wanted(rest.member.moe, offset, size)
        while rest.size:
            part = None if rest.member.moe is None else self._slice(rest, wanted)
            length, count = self._segment(rest) if part is None else part
            rest.address, rest.offset, rest.size = rest.address + count, rest.offset + count, rest.size - count
            if count < length:  # the file was truncated outside the mount
                break
        done = size - rest.size
        if by_client:
            with self.state.lock:
                rest.space.request_ends.append((rest.member, offset + done))
                self.state.counters.requested_bytes += done
        return done

    def _slice(self, rest: PendingRead, wanted: int | None) -> tuple[int, int] | None:
        """Return (bytes answered, bytes read), or None."""
        space, member, offset = rest.space, rest.member, rest.offset
        with self.state.lock:
            moe = member.moe
            number = None if moe is None else moe.slice_at(offset)
            if moe is None or number is None:
                return None
            space.last_ns, space.last_pid = time.monotonic_ns(), rest.pid or space.last_pid
            length = min(rest.size, moe.end_of(number) - offset)
            slices, is_wanted = self.backend.slices, number == wanted
            fetch, mine = slices.claim(moe, number, offset, length, is_wanted, rest.pid, rest.by_client)
            expert = moe.layout.expert_of[number]
            page = moe.pages.get(expert) if offset == moe.probes[expert] and length <= PAGE_BYTES else None
        if fetch is None and page is not None:
            ctypes.memmove(rest.address, page, length)
            return length, length
        if fetch is None:
            return length, self.direct(rest.backing, rest.address, length, offset)
        start = offset - fetch.offset
        length = min(length, fetch.length - start)
        return length, self._answer(rest, fetch, mine, start, length)

    def _segment(self, rest: PendingRead) -> tuple[int, int]:
        space, member, pid = rest.space, rest.member, rest.pid
        index, start = divmod(rest.offset, space.extent_bytes)
        extent, length = member.base + index, min(rest.size, space.extent_bytes - start)
        trip: Tripwire | None = None
        fetch: BufferFetch | None = None
        with self.state.lock:
            state = space.state(extent)
            if rest.by_client:
                space.last_pid = pid
                self._record_touch(space, extent, state, pid)
                state = space.state(extent)  # the end of a pass may have changed it
            if state == READY:
                trip = space.trips.get(extent)
                self._arrived(space, member, extent, trip)
            elif state == LOADING:
                fetch = self.backend.under_way(space, extent)
                fetch.users += 1
                fetch.joined = fetch.joined or rest.by_client
            elif state in (ABSENT, SPARSE) and member.reachable and space.alive and self._is_sequential(rest, state):
                fetch = self.backend.claim(space, member, extent, ahead=False, pid=pid)
            elif state == TOUCHED or (state == PINNED and extent not in space.evidence.exposed):
                self._refault(space, extent, length)
            if trip is None and fetch is None:
                self._account_pages(space, extent, length)
                if state == SINGLE and space.alive:
                    self.state.references.pages(space, member, rest.offset, length, READ, pid)
        if trip is not None and start == 0 and length <= len(trip.page):
            ctypes.memmove(rest.address, trip.page, length)
            return length, length
        if fetch is not None:
            return length, self._answer(rest, fetch, state != LOADING, start, length)
        return length, self.direct(rest.backing, rest.address, length, rest.offset)

    def _record_touch(self, space: LoopSpace, extent: int, state: int, pid: int) -> None:
        if state == SINGLE:
            space.record_pages(extent, time.monotonic_ns())
            self.engine.judge.touched_pages(space, extent, space.accounted_bytes[extent])
            return
        done = space.record_access(extent, time.monotonic_ns(), state in (ABSENT, SPARSE), pid)
        if done is not None:
            self.engine.pass_ended(space, done)
        self.engine.judge.touched(space, extent)
        self.state.work.notify()

    @staticmethod
    def _is_sequential(rest: PendingRead, state: int) -> bool:
        """Any other request may be for a row of a table."""
        is_sequential = rest.first_byte == 0 or (rest.member, rest.first_byte) in rest.space.request_ends
        if is_sequential:
            rest.space.sequential_ns = time.monotonic_ns()
        return is_sequential or (rest.space.looping and state == ABSENT)

    def _arrived(self, space: LoopSpace, member: SpaceFile, extent: int, trip: Tripwire | None) -> None:
        space.touch(extent, time.monotonic_ns())
        space.missed.pop(extent, None)
        length = space.length_of(member, extent)
        self.state.consumed(length, trip is not None and trip.held)
        if trip is not None and not trip.held:
            self.state.counters.prefetch_useful_bytes += length

    def _refault(self, space: LoopSpace, extent: int, length: int) -> None:
        self.state.counters.refault_bytes += length
        if space.state(extent) == TOUCHED:
            count = space.refaults[extent] = space.refaults.get(extent, 0) + 1
            if count >= REFAULTS_MAX:
                space.reclaimed(extent, time.monotonic_ns())

    def _account_pages(self, space: LoopSpace, extent: int, length: int) -> None:
        self.state.memory.account(space, extent, -(-length // PAGE_BYTES) * PAGE_BYTES)
        self.state.consumed(length, False)
        if space.state(extent) in (SINGLE, ABSENT, SPARSE):
            space.make_partial(extent, time.monotonic_ns())

    def _answer(self, rest: PendingRead, fetch: BufferFetch, mine: bool, start: int, length: int) -> int:
        """`mine`: this thread loads the fetch and queues its STORE."""
        waited, began_ns = not fetch.done.is_set(), time.monotonic_ns()
        if mine:
            self.backend.load(rest.space, rest.member, fetch)
        else:
            while not fetch.done.wait(WAIT_S):
                if not self.state.running:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        waited_ns = time.monotonic_ns() - began_ns
        usable = fetch.error is None and (mine or not fetch.stale)
        if usable:
            copy(rest.address, fetch.region, start, length)
        with self.state.lock:
            if not mine:
                if rest.by_client:
                    self._judge(fetch, waited, waited_ns)
                self.state.finish(fetch)
            else:
                if usable:  # all pages of the request are left out: a STORE of them would wait for this reply
                    first = max(0, rest.first_byte - fetch.offset)
                    fetch.replied = (first // PAGE_BYTES * PAGE_BYTES, start + length)
                if rest.by_client and not fetch.held:
                    self.state.demand_waits.add(waited_ns)
                self.state.jobs.appendleft(functools.partial(self.backend.store, rest.space, rest.member, fetch))
                self.state.work.notify()
        if not usable:
            return self.direct(rest.backing, rest.address, length, fetch.offset + start)
        if mine and fetch.load is not None:
            fetch.stored.wait(STORE_WAIT_S)
        return length

    def _judge(self, fetch: Fetch, waited: bool, waited_ns: int) -> None:
        """The caller holds the engine's lock."""
        counters = self.state.counters
        if waited:
            (self.state.late_waits if fetch.ahead else self.state.demand_waits).add(waited_ns)
        if fetch.ahead and not fetch.judged and not fetch.held and fetch.error is None:
            fetch.judged = True
            if waited:
                counters.prefetch_late_bytes += fetch.length
            else:
                counters.prefetch_useful_bytes += fetch.length

    def uncached(self, backing: Backing, address: int, size: int, offset: int, by_client: bool = True) -> int:
        done = self.direct(backing, address, max(0, min(size, backing.size - offset)), offset)
        if by_client:
            with self.state.lock:
                self.state.counters.requested_bytes += done
                self.state.consumed(done, False)
        return done

    def direct(self, backing: Backing, address: int, size: int, offset: int) -> int:
        bounce = self.state.pool.bounce()
        done = 0
        while done < size:
            first = (offset + done) // PAGE_BYTES * PAGE_BYTES
            skip = offset + done - first
            length = min(size - done, BOUNCE_BYTES - skip)
            count = backing.read_into(bounce.address, -(-(skip + length) // PAGE_BYTES) * PAGE_BYTES, first) - skip
            if count <= 0:
                break
            count = min(count, length)
            copy(address + done, bounce, skip, count)
            done += count
            if count < length:
                break
        with self.state.lock:
            self.state.counters.backing_read_bytes += done
            if (owner := self.state.owners.get(backing)) is not None:
                owner[0].read_bytes += done
        return done
