"""Over FUSE: READ requests are answered, and extents read in one large I/O and stored into the page cache of the mount.

A fetch is claimed under the lock, either by a reader that needs the extent (`ahead=False`) or by a loader that runs ahead of
one. Its data is available to every reader from `done` on; storing comes after, and nobody waits for it. A reply waits for
the bytes it needs and for nothing else.

What a request on an extent means, by the extent's state:
- absent: fetch the extent whole in one large I/O, answer from it, store the rest afterwards;
- loading: wait for that fetch, answer from it;
- ready: the tripwire; answer the first page from memory and note that a reader has arrived;
- touched or pinned: the kernel has dropped pages (memory pressure) or lacks the few that a reply left out; read these;
- single: read just what is asked for.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcache.cache.steering import HIT, KEPT, LARGE_EXTENT, MISS
from llmcache.fs.backends.base import BOUNCE_BYTES, BUFFER_BYTES, BufferFetch, MemoryRegion
from llmcache.fs.backends.samples import FilePrograms, Samples
from llmcache.fs.client.mountpoint import find
from llmcache.fs.engine.experts import ExpertLoad
from llmcache.fs.engine.group import (
    ABSENT,
    LOADING,
    PINNED,
    READY,
    SINGLE,
    SPARSE,
    TOUCHED,
    Fetch,
    Group,
    Member,
    Tripwire,
)
from llmcache.fs.engine.state import READ
from llmcache.procfs import Mount, MountWatch
from llmcache.units import PAGE_BYTES

if TYPE_CHECKING:
    from llmcache.fs.backends.base import Holder, KernelNotifier
    from llmcache.fs.engine.engine import Engine
    from llmcache.fs.engine.experts import Mixture
    from llmcache.fs.engine.state import CacheState, Job
    from llmcache.fs.vfs.backing import Backing


FAILED = 1 << 20  # misses of an extent that could not be read: never fetched ahead again

log = logging.getLogger(__name__)


class FuseBackend:
    """Claims, loads, stores and drops extents."""

    in_place, large_extent = False, LARGE_EXTENT

    def __init__(self, state: CacheState, holder: Holder) -> None:
        self.state = state
        self.holder = holder
        self.notifier: KernelNotifier | None = None
        self.slices = SliceReader(self)
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._entry: MountWatch[Mount | None] | None = None  # of this mount

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Before the first request: whoever sends one may hang if this process is killed."""
        self.notifier = notifier
        self._entry = MountWatch(lambda: find(mountpoint))
        entry = self._entry.current()
        self._guard(entry)
        self.slices.start(entry.dev if entry is not None else 0)

    def stop(self) -> None:
        """What is left to be stored is not."""
        self.slices.stop()

    def close(self) -> None:
        """Ends the process that watches this one."""
        if self._entry is not None:
            self._entry.close()
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
            self._sentinel = None

    def guards(self, mountpoint: str) -> bool:
        """Has a sentinel abort the connection of `mountpoint` when this process is killed; False if there is no mount."""
        assert self._entry is not None
        return self._guard(self._entry.current())

    def _guard(self, entry: Mount | None) -> bool:
        if entry is None:
            return False
        if self._sentinel is None or self._sentinel.poll() is not None:
            self._sentinel = start_sentinel(entry)
        return True

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        """Has the kernel give up what it has there; waits for those who read it."""
        if self.notifier is not None:
            for offset, length in parts:
                self.notifier.invalidate(node, offset, length)

    def claim(self, group: Group, member: Member, extent: int, ahead: bool, pid: int = 0) -> BufferFetch | None:
        """Returns a fetch of an absent extent for `pid`, or None when there is no buffer for it. Lock held.

        This is a reference to the extent: from here on it must be fetched.
        """
        brought = self.holder.brings_region(group, extent)
        buffer = None if brought else self.state.pool.take(group.extent_bytes, ahead)
        if buffer is None and not brought:
            return None
        verdict = self.state.references.claimed(group, member, extent, pid)
        try:
            own = self.holder.region(group, extent, verdict)
            region = own or buffer or MemoryRegion(group.extent_bytes)
        except OSError:  # no memory: it is streamed, or read by pages
            self.state.references.lost(group, extent)
            own, verdict = None, MISS
            buffer = buffer or self.state.pool.take(group.extent_bytes, ahead)
            if buffer is None:
                return None
            region = buffer
        if own is not None and buffer is not None:  # the plan has changed with this very reference
            self.state.pool.give(buffer)
            buffer = None
        offset, length = group.offset_of(member, extent), group.length_of(member, extent)
        charged = group.charge[extent]
        fetch = BufferFetch(extent, length, ahead, member.backing, charged, buffer=buffer, region=region, offset=offset)
        fetch.keep = verdict == KEPT
        group.loading[extent] = fetch
        group.strays.pop(extent, None)
        group.set_state(extent, LOADING)
        self.state.charge(group, extent, length)
        if verdict == HIT:
            fetch.held = True
            fetch.done.set()
        else:
            member.loads += 1
        if not ahead and group.missed.get(extent, 0) > 0:
            group.missed[extent] -= 1
        return fetch

    def follows(self, group: Group) -> bool:
        """Return True unless the space is left: any reader that moves may be one that reads in order."""
        return not group.left

    def keys(self, group: Group) -> set[tuple[int, int]]:
        """Return the mount's device and the nodes of the group's files."""
        return {(self.slices.dev, member.node) for member in group.members if member.node is not None}

    def read_bytes(self, group: Group) -> int:
        """Return the bytes of `group` that were read from SOURCE so far."""
        return group.read_bytes

    def client_reads(self) -> None:
        """Return None: every read from storage is made by this process."""

    def faults(self) -> dict[str, int]:
        """Return an empty mapping: no request is lost, and no program's memory is advised."""
        return {}

    def absent(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """Return the extents of which nothing is charged."""
        return [extent for extent in extents if not group.charge[extent]]

    def expose(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """Drop the first page of pinned extents, so that the next touch sends a request."""
        with self.state.lock:
            places = [(extent, *self._first_page(group, extent)) for extent in extents if group.state(extent) == PINNED]
        for _, _, node, offset in places:
            if node is not None:
                self.drop(node, [(offset, PAGE_BYTES)])
        return [extent for extent, _, node, _ in places if node is not None]

    def conclude(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """Lock the pages again that were dropped; requests have shown all touches."""
        with self.state.lock:
            self.holder.lock_again(group, [extent for extent in extents if group.state(extent) == PINNED])
        return ()

    def find_experts(self, mixture: Mixture) -> None:
        """Do nothing: experts are never left to the kernel over FUSE."""

    @staticmethod
    def _first_page(group: Group, extent: int) -> tuple[Member, int | None, int]:
        member = group.member_of(extent)
        return member, member.node, group.offset_of(member, extent)

    def ahead(self, group: Group, member: Member, extent: int, pid: int = 0) -> Job | None:
        """Claims an extent that nobody waits for; what it returns brings it in. None without a buffer. Lock held."""
        fetch = self.claim(group, member, extent, ahead=True, pid=pid)
        return None if fetch is None else functools.partial(self._bring, group, member, fetch)

    def _bring(self, group: Group, member: Member, fetch: BufferFetch) -> None:
        self.load(group, member, fetch)
        self.store(group, member, fetch)

    def load(self, group: Group, member: Member, fetch: BufferFetch) -> None:
        """Reads the extent, unless the arena had it; afterwards `done` is set, with data or with `error`."""
        if fetch.done.is_set():
            return
        backing = fetch.backing
        try:
            if backing is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            # Whole pages, so that O_DIRECT is possible at the end of the file too.
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
                group.read_bytes += fetch.length
                if fetch.keep and group.alive and not fetch.stale:
                    self.holder.keep(group, fetch.extent, fetch.region)
            elif fetch.load is None:
                self._fail(group, fetch)
        fetch.done.set()

    def _fail(self, group: Group, fetch: Fetch) -> None:
        """The extent stays absent, and is not fetched ahead again; readers find out themselves. Lock held."""
        extent = fetch.extent
        if fetch.keep and group.alive:
            self.state.references.lost(group, extent)
        if group.loading.get(extent) is fetch:
            del group.loading[extent]
            group.missed[extent] = FAILED
            group.set_state(extent, SPARSE)
            self.state.resident_bytes -= group.charge[extent] - fetch.charged
            group.charge[extent] = fetch.charged
            if fetch.charged:
                group.strays[extent] = time.monotonic_ns()

    def store(self, group: Group, member: Member, fetch: BufferFetch) -> None:
        """Puts the loaded extent into the page cache and finishes the fetch."""
        with self.state.lock:
            usable = fetch.error is None and self._current(group, fetch)
            self.state.storing.append((group, member))
            trip = (
                fetch.load is None and fetch.ahead and not fetch.joined and not self.holder.skips_trip(group, fetch.extent)
            )
        failed = -errno.EIO
        try:
            parts = [(PAGE_BYTES, fetch.length)] if trip else [(0, fetch.replied[0]), (fetch.replied[1], fetch.length)]
            failed = next(filter(None, (self._put(member, fetch, *part) for part in parts if usable)), 0)
        finally:
            self._put_ended(group, member, fetch, trip, usable, failed)

    def _put_ended(self, group: Group, member: Member, fetch: BufferFetch, trip: bool, usable: bool, failed: int) -> None:
        with self.state.lock:
            self.state.store_ended(group, member)
            current = self._current(group, fetch)
            if current and fetch.load is not None and member.mixture is not None:
                self.slices.ended(member.mixture, fetch, usable and not failed)
            elif current and usable:
                self._stored(group, member, fetch, trip, failed)
            elif usable and member.node is not None:
                # The group ended meanwhile: what was stored after its pages were dropped has to go as well.
                self.state.debts.append((member.node, fetch.offset, fetch.length, 0))
                self.state.room.notify()
            self.state.finish(fetch)
        fetch.stored.set()

    def _current(self, group: Group, fetch: BufferFetch) -> bool:
        """False once its group has ended, or the file has changed. Lock held."""
        return not fetch.stale and (fetch.load is not None or group.loading.get(fetch.extent) is fetch)

    def _put(self, member: Member, fetch: BufferFetch, start: int, end: int) -> int:
        if self.notifier is None or member.node is None:
            return -errno.ENOTCONN
        # Page-aligned: a page that the reply covers in part is complete in the kernel only with its neighbour.
        start = -(-start // PAGE_BYTES) * PAGE_BYTES if start else 0
        if end <= start:
            return 0
        return self.notifier.store(member.node, fetch.offset + start, fetch.region.address + start, end - start)

    def _stored(self, group: Group, member: Member, fetch: BufferFetch, trip: bool, failed: int) -> None:
        """Lock held."""
        extent = fetch.extent
        del group.loading[extent]
        if failed:
            log.debug("store of %s extent %d: errno %d", member.path, extent, -failed)
            group.set_state(extent, SPARSE if group.missed.get(extent, 0) else ABSENT)
            group.strays[extent] = time.monotonic_ns()  # what did get in has to go one day
            return
        self.state.counters.stored_bytes += fetch.length
        if trip and not fetch.joined and fetch.length > PAGE_BYTES:
            group.set_state(extent, READY)
            group.ready[extent] = time.monotonic_ns()
            group.trips[extent] = Tripwire(ctypes.string_at(fetch.region.address, PAGE_BYTES), fetch.held)
        else:
            group.touch(extent, time.monotonic_ns())
            if fetch.joined or not fetch.ahead:
                self.state.consumed(fetch.length, fetch.held)
        self.holder.stored(group, fetch)

    def fill(self, group: Group, member: Member, extent: int, backing: Backing) -> bool:
        """Stores a whole extent that is else read page by page; False if it cannot be read, or not stored."""
        state, notifier = self.state, self.notifier
        try:
            region = MemoryRegion(group.extent_bytes)
        except OSError:  # no memory
            return False
        offset, length = group.offset_of(member, extent), group.length_of(member, extent)
        with state.lock:
            node = member.node
            state.storing.append((group, member))
            member.loads += 1
        complete = read_whole(state, backing, region, offset, length)
        with state.lock:
            state.load_ended(member)  # who closes the file waits for this, and not for the kernel
        stored = False
        if complete and notifier is not None and node is not None:
            stored = notifier.store(node, offset, region.address, length) == 0
        with state.lock:
            state.store_ended(group, member)
            state.counters.stored_bytes += length if stored else 0
        return stored

    def under_way(self, group: Group, extent: int) -> BufferFetch:
        """The fetch of an extent that is loading. Lock held."""
        fetch = group.loading[extent]
        assert isinstance(fetch, BufferFetch)
        return fetch


def start_sentinel(entry: Mount) -> subprocess.Popen[bytes]:
    """Starts the process that aborts the connection of a mount when this one is killed."""
    script = str(Path(__file__).parents[1] / "daemon" / "sentinel.py")
    minor = str(os.minor(entry.dev))
    return subprocess.Popen([sys.executable, "-I", "-S", script, str(os.getpid()), minor], cwd="/")


def read_whole(state: CacheState, backing: Backing, region: MemoryRegion, offset: int, length: int) -> bool:
    """True if the whole of it was read; what cannot be read is left to its readers, who are told why."""
    try:
        count = backing.read_into(region.address, -(-length // PAGE_BYTES) * PAGE_BYTES, offset)
    except OSError:
        return False
    with state.lock:
        state.counters.backing_read_bytes += count
    return count >= length


def copy(target: int, region: MemoryRegion, start: int, length: int) -> None:
    """Copies `length` bytes at `start` of `region` to the address `target`, without the GIL."""
    ctypes.memmove(target, region.address + start, length)


PIECE_BYTES = BUFFER_BYTES
TRIPS = 4  # pages taken out for each expert that leaves
SORT_SHARE = 8  # of the experts, asked before it is found again who would leave next
LOOK_S, IDLE_S, UNUSED_S = 0.005, 0.01, 1.0


class SliceReader:
    """Brings experts in for those who read them, and sees which of those that are there are used.

    A request for one that is not there has all of its slices read and stored, in pieces.

    The request takes its own piece itself, loaders take the others: behind it in its slice, then before it, then the
    other slices'. A request for a piece that nobody has begun begins it, so that a reply never waits for what it does
    not need.

    Uses of what is there send no request. So a page is taken out of each of the experts that would leave next: who is
    used all the same shows it by a request for that page, and stays (as with the reference bit of CLOCK, asked for where
    it is about to matter). The more leave, the more are looked at; where all stay nobody is asked. Where page tables can be
    read (by root), accessed bits tell of the others.

    A mapping's fault brings requests for what lies around it, of other experts too: only the slice in which a request
    begins is wanted, or the next, where nothing of the first is used. The rest is answered, and dropped again.
    """

    def __init__(self, backend: FuseBackend) -> None:
        self.backend = backend
        self.state = backend.state
        self._strays: list[tuple[Mixture, int, int, int]] = []
        self._left = 0  # experts, as far as pages were taken out for that
        self._due = 0  # pages to be taken out
        self._coldest: Iterator[int] = iter(())  # of whom next
        self._sorted = 0  # experts that had left when that was found
        self.dev = 0  # of the mount
        self._programs = FilePrograms()
        self._over = threading.Event()
        self._samples: Samples | None = None
        self._threads: list[threading.Thread] = []

    def start(self, dev: int) -> None:
        """The threads that look begin; `dev` is the mount's. May follow `stop`."""
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
        """And end."""
        self._over.set()
        if self._samples is not None:
            self._samples.stop()
        for thread in self._threads:
            thread.join(timeout=10)
        self._programs.close()

    def wanted(self, mixture: Mixture, offset: int, size: int) -> int | None:
        """The slice for which a request was sent; None if that was for something before it. Lock held."""
        first = mixture.slice_at(offset)
        if first is None or mixture.states[mixture.layout.expert_of[first]] != ABSENT:
            return first
        if mixture.reads_on(first, offset, size, time.monotonic_ns()):
            return None
        end = mixture.end_of(first) // PAGE_BYTES * PAGE_BYTES
        return first if offset + size < end - PAGE_BYTES else mixture.slice_at(end) if offset + size > end else None

    def claim(
        self, mixture: Mixture, number: int, offset: int, length: int, wanted: bool, pid: int, by_client: bool = True
    ) -> tuple[BufferFetch | None, bool]:
        """The fetch that will have a part of a slice, and whether it is the caller's to load. Lock held.

        None: it is read by itself.
        """
        expert = mixture.layout.expert_of[number]
        if pid:
            self._programs.ask(mixture.member.node or 0, pid)
        if by_client and mixture.states[expert] == TOUCHED:
            self._came_back(mixture, expert, length)
        if mixture.states[expert] == ABSENT:
            found = self.state.mixtures.missed(mixture, expert) if wanted and by_client else []
            mixture.fresh.update(found[:1])
            if not found:
                self._strays += [(mixture, expert, *part) for part in mixture.inner(number, offset, offset + length)]
                return None, False
            for each in found:
                self._begin(mixture, each, offset)
                self.state.references.slices(mixture.group, mixture.member, mixture.ranges(each), pid)
        return self._piece(mixture, expert, offset)

    def _came_back(self, mixture: Mixture, expert: int, length: int) -> None:
        """Pages of an expert that is there are asked for: that of its tripwire, or the kernel has reclaimed some."""
        if expert in mixture.trips:
            del mixture.trips[expert]
            mixture.reach(expert)
            self.state.mixtures.used(mixture, expert)
            mixture.fresh.add(expert)
            return
        self.state.counters.refault_bytes += length
        count = mixture.refaults[expert] = mixture.refaults.get(expert, 0) + 1
        if count >= REFAULTS_MAX:
            self.state.mixtures.lost(mixture, expert)

    def _begin(self, mixture: Mixture, expert: int, offset: int) -> None:
        """Has loaders bring an expert in, from `offset` on. Lock held."""
        behind: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for start, length in mixture.ranges(expert):
            pieces = [(at, min(PIECE_BYTES, start + length - at)) for at in range(start, start + length, PIECE_BYTES)]
            mine = start <= offset < start + length
            behind += [piece for piece in pieces if mine and piece[0] + piece[1] > offset]
            others += [piece for piece in pieces if not (mine and piece[0] + piece[1] > offset)]
        mixture.loads[expert] = load = ExpertLoad(behind + others)
        job = functools.partial(self._bring_next, mixture, expert, load)
        self.state.jobs.extend([job] * len(load.waiting))
        self.state.work.notify(len(load.waiting))
        self._finish(mixture, expert, load)  # all of it is in the loop

    def _piece(self, mixture: Mixture, expert: int, offset: int) -> tuple[BufferFetch | None, bool]:
        load = mixture.loads.get(expert)
        if load is None:
            return None, False
        for fetch in load.loading:
            if fetch.offset <= offset < fetch.offset + fetch.length:
                fetch.users += 1
                fetch.joined = True
                return fetch, False
        for piece in load.waiting:
            if piece[0] <= offset < piece[0] + piece[1]:
                return self._take(mixture, expert, load, piece, ahead=False), True
        return None, False

    def _take(
        self, mixture: Mixture, expert: int, load: ExpertLoad, piece: tuple[int, int], ahead: bool
    ) -> BufferFetch | None:
        """Begins to read a piece; None without memory for it. Lock held."""
        offset, length = piece
        buffer = self.state.pool.take(length, ahead)
        try:
            region = buffer or MemoryRegion(PIECE_BYTES)
        except OSError:  # no memory: it is read by pages
            load.failed = True
            load.waiting.clear()
            self._finish(mixture, expert, load)
            return None
        load.waiting.remove(piece)
        mixture.member.loads += 1
        backing = mixture.member.backing
        fetch = BufferFetch(expert, length, ahead, backing, buffer=buffer, region=region, offset=offset, load=load)
        load.loading.append(fetch)
        return fetch

    def _bring_next(self, mixture: Mixture, expert: int, load: ExpertLoad) -> None:
        """A loader's work: the next piece that nobody has begun, if there still is one."""
        with self.state.lock:
            fetch = self._take(mixture, expert, load, load.waiting[0], ahead=True) if load.waiting else None
        if fetch is not None:
            self.backend.load(mixture.group, mixture.member, fetch)
            self.backend.store(mixture.group, mixture.member, fetch)

    def ended(self, mixture: Mixture, fetch: BufferFetch, stored: bool) -> None:
        """A piece is in the page cache, or could not be brought there. Lock held."""
        load, expert = fetch.load, fetch.extent
        assert load is not None
        load.loading.remove(fetch)
        load.failed = load.failed or not stored
        if stored:
            self.state.counters.stored_bytes += fetch.length
            if 0 <= (start := mixture.probes[expert] - fetch.offset) < fetch.length:
                mixture.pages[expert] = ctypes.string_at(fetch.region.address + start, PAGE_BYTES)
        self._finish(mixture, expert, load)

    def _finish(self, mixture: Mixture, expert: int, load: ExpertLoad) -> None:
        if not load.waiting and not load.loading and mixture.loads.get(expert) is load:
            del mixture.loads[expert]
            if load.failed:  # what did get in has to go
                self._strays += [(mixture, expert, offset, length) for offset, length in mixture.own(expert)]
            self.state.mixtures.arrived(mixture, expert, not load.failed)

    # The thread

    def _look(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            with self.state.lock:
                places = self._stray_places() + self._trip_places()
            for node, offset, length in places:
                self.backend.drop(node, [(offset, length)])
            pause_s = LOOK_S if places else IDLE_S if self.state.mixtures.mixtures else UNUSED_S

    def _stray_places(self) -> list[tuple[int, int, int]]:
        strays, self._strays = self._strays, []
        absent = [stray for stray in strays if stray[0].states[stray[1]] == ABSENT]
        return [(stray[0].member.node, *stray[2:]) for stray in absent if stray[0].member.node is not None]

    def _trip_places(self) -> list[tuple[int, int, int]]:
        """A page of each of those that would leave next, if it is not out yet."""
        mixtures = self.state.mixtures
        for mixture in mixtures.mixtures:
            mixtures.catch_up(mixture)
        self._due += TRIPS * (mixtures.left - self._left)
        self._left = mixtures.left
        out = sum(len(mixture.trips) for mixture in mixtures.mixtures)
        self._due = min(self._due, len(mixtures.hot) - out)
        found: list[tuple[int, int, int]] = []
        if SORT_SHARE * TRIPS * (mixtures.left - self._sorted) > len(mixtures.hot):
            # For many at a time: who is used meanwhile is asked once more than is needed.
            many = out + max(self._due, len(mixtures.hot) // SORT_SHARE)
            self._coldest, self._sorted = iter(mixtures.hot.coldest(many)), mixtures.left
        while len(found) < self._due and (key := next(self._coldest, None)) is not None:
            if key not in mixtures.hot:
                continue
            mixture, expert = mixtures.of(key)
            if expert in mixture.trips or mixture.computes(expert):  # what is in use now has been counted
                continue
            if mixture.member.node is not None:
                mixture.trip(expert)
                found.append((mixture.member.node, mixture.probes[expert], PAGE_BYTES))
        self._due -= len(found)
        return found


REFAULTS_MAX = 2
WAIT_S = 5.0
UNKNOWN = "its supplementary groups do not count, and uses of experts that it maps are observed only by requests"
STORE_WAIT_S = 0.005  # of a slice: else the kernel reads ahead, beyond its end too, while the rest is being stored


@dataclass(slots=True)
class Rest:
    """The unanswered part of a read by `pid`: `size` bytes from `offset` of a member's file, to `address`.

    `pid` is 0 for a process that has no number in this pid namespace, and for helpers, whose reads are not `by_client`.
    `first_byte`: of the whole request.
    """

    group: Group
    member: Member
    backing: Backing
    address: int
    offset: int
    size: int
    pid: int
    first_byte: int
    by_client: bool


class Reader:
    """Serves reads of all files, and has the engine told when a pass over a group has ended."""

    def __init__(self, engine: Engine, backend: FuseBackend) -> None:
        self.engine = engine
        self.backend = backend
        self.state = backend.state
        self._warned = False

    def read(self, backing: Backing, address: int, size: int, offset: int, pid: int) -> int:
        """Fill memory at `address`; returns the bytes read, short only at the end of the file. Raises OSError.

        Faults of the pin helpers say nothing about clients.
        """
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
        rest, wanted = Rest(*owner, backing, address, offset, size, pid, offset, by_client), None
        if rest.member.mixture is not None:
            with self.state.lock:
                wanted = self.backend.slices.wanted(rest.member.mixture, offset, size)
        while rest.size:
            part = None if rest.member.mixture is None else self._slice(rest, wanted)
            length, count = self._segment(rest) if part is None else part
            rest.address, rest.offset, rest.size = rest.address + count, rest.offset + count, rest.size - count
            if count < length:  # shrunk behind the mount
                break
        done = size - rest.size
        if by_client:
            with self.state.lock:
                rest.group.request_ends.append((rest.member, offset + done))
                self.state.counters.requested_bytes += done
        return done

    def _slice(self, rest: Rest, wanted: int | None) -> tuple[int, int] | None:
        """Answers the first part of `rest` if it is for a slice; returns the bytes of that, and those that were read."""
        group, member, offset = rest.group, rest.member, rest.offset
        with self.state.lock:
            mixture = member.mixture
            number = None if mixture is None else mixture.slice_at(offset)
            if mixture is None or number is None:
                return None
            group.last_ns, group.last_pid = time.monotonic_ns(), rest.pid or group.last_pid
            length = min(rest.size, mixture.end_of(number) - offset)
            slices, is_wanted = self.backend.slices, number == wanted
            fetch, mine = slices.claim(mixture, number, offset, length, is_wanted, rest.pid, rest.by_client)
            expert = mixture.layout.expert_of[number]
            page = mixture.pages.get(expert) if offset == mixture.probes[expert] and length <= PAGE_BYTES else None
        if fetch is None and page is not None:
            ctypes.memmove(rest.address, page, length)
            return length, length
        if fetch is None:
            return length, self.direct(rest.backing, rest.address, length, offset)
        start = offset - fetch.offset
        length = min(length, fetch.length - start)
        return length, self._answer(rest, fetch, mine, start, length)

    def _segment(self, rest: Rest) -> tuple[int, int]:
        """Answers the first part of `rest`, up to the end of its extent; returns as `_slice`."""
        group, member, pid = rest.group, rest.member, rest.pid
        index, start = divmod(rest.offset, group.extent_bytes)
        extent, length = member.base + index, min(rest.size, group.extent_bytes - start)
        trip: Tripwire | None = None
        fetch: BufferFetch | None = None
        with self.state.lock:
            state = group.state(extent)
            if rest.by_client:
                group.last_pid = pid
                self._note(group, extent, state, pid)
                state = group.state(extent)  # where a pass has ended, it may be another one
            if state == READY:
                trip = group.trips.get(extent)
                self._arrived(group, member, extent, trip)
            elif state == LOADING:
                fetch = self.backend.under_way(group, extent)
                fetch.users += 1
                fetch.joined = fetch.joined or rest.by_client
            elif state in (ABSENT, SPARSE) and member.reachable and group.alive and self._is_sequential(rest, state):
                fetch = self.backend.claim(group, member, extent, ahead=False, pid=pid)
            elif state == TOUCHED or (state == PINNED and extent not in group.evidence.exposed):
                self._refault(group, extent, length)
            if trip is None and fetch is None:
                self._stray(group, extent, length)
                if state == SINGLE and group.alive:
                    self.state.references.pages(group, member, rest.offset, length, READ, pid)
        if trip is not None and start == 0 and length <= len(trip.page):
            ctypes.memmove(rest.address, trip.page, length)
            return length, length
        if fetch is not None:
            return length, self._answer(rest, fetch, state != LOADING, start, length)
        return length, self.direct(rest.backing, rest.address, length, rest.offset)

    def _note(self, group: Group, extent: int, state: int, pid: int) -> None:
        if state == SINGLE:
            group.last_ns = group.seen_ns[extent] = time.monotonic_ns()
            self.engine.judge.touched_pages(group, extent, group.charge[extent])
            return
        done = group.note(extent, time.monotonic_ns(), state in (ABSENT, SPARSE), pid)
        if done is not None:
            self.engine.pass_ended(group, done)
        self.engine.judge.touched(group, extent)
        self.state.work.notify()

    @staticmethod
    def _is_sequential(rest: Rest, state: int) -> bool:
        """Return True if an absent extent is worth fetching whole: part of a loop, or the next one of a reader.

        Anything else may be a row of a table: it is read as requested.
        """
        goes_on = rest.first_byte == 0 or (rest.member, rest.first_byte) in rest.group.request_ends
        if goes_on:
            rest.group.sequential_ns = time.monotonic_ns()
        return goes_on or (rest.group.looping and state == ABSENT)

    def _arrived(self, group: Group, member: Member, extent: int, trip: Tripwire | None) -> None:
        """A reader has reached an extent that was fetched ahead of it."""
        group.touch(extent, time.monotonic_ns())
        group.missed.pop(extent, None)
        length = group.length_of(member, extent)
        self.state.consumed(length, trip is not None and trip.held)
        if trip is not None and not trip.held:
            self.state.counters.prefetch_useful_bytes += length

    def _refault(self, group: Group, extent: int, length: int) -> None:
        self.state.counters.refault_bytes += length
        if group.state(extent) == TOUCHED:
            count = group.refaults[extent] = group.refaults.get(extent, 0) + 1
            if count >= REFAULTS_MAX:
                # The kernel has reclaimed it: the next request fetches the extent whole.
                del group.refaults[extent]
                group.touched.pop(extent, None)
                group.set_state(extent, ABSENT)
                group.strays[extent] = time.monotonic_ns()

    def _stray(self, group: Group, extent: int, length: int) -> None:
        """Counts pages that enter the page cache outside of a fetch."""
        self.state.charge(group, extent, -(-length // PAGE_BYTES) * PAGE_BYTES)
        self.state.consumed(length, False)
        if group.state(extent) in (SINGLE, ABSENT, SPARSE):
            group.strays.pop(extent, None)
            group.strays[extent] = time.monotonic_ns()

    def _answer(self, rest: Rest, fetch: BufferFetch, mine: bool, start: int, length: int) -> int:
        """Answers `length` bytes from `start` of a fetch: this thread's to load, with its rest stored then, or another's."""
        waited, began_ns = not fetch.done.is_set(), time.monotonic_ns()
        if mine:
            self.backend.load(rest.group, rest.member, fetch)
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
                if usable:  # all pages of the request: no STORE is to wait for the reply, which may wait for that
                    first = max(0, rest.first_byte - fetch.offset)
                    fetch.replied = (first // PAGE_BYTES * PAGE_BYTES, start + length)
                if rest.by_client and not fetch.held:
                    self.state.demand_waits.add(waited_ns)
                self.state.jobs.appendleft(functools.partial(self.backend.store, rest.group, rest.member, fetch))
                self.state.work.notify()
        if not usable:
            return self.direct(rest.backing, rest.address, length, fetch.offset + start)
        if mine and fetch.load is not None:
            fetch.stored.wait(STORE_WAIT_S)
        return length

    def _judge(self, fetch: Fetch, waited: bool, waited_ns: int) -> None:
        """A reader got an extent that was on its way; prefetched bytes count once, as in time or late. Lock held."""
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
        """Serves a read of which nothing is kept, such as one with O_DIRECT: all that it gives comes from storage."""
        done = self.direct(backing, address, max(0, min(size, backing.size - offset)), offset)
        if by_client:
            with self.state.lock:
                self.state.counters.requested_bytes += done
                self.state.consumed(done, False)
        return done

    def direct(self, backing: Backing, address: int, size: int, offset: int) -> int:
        """Reads exactly this range, through this thread's aligned buffer; returns the bytes read."""
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
