"""Answers READ requests. A reply waits for the bytes it needs and for nothing else.

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
import os
import time
from typing import TYPE_CHECKING

from llmcache.fs.backends.buffers import BOUNCE_BYTES
from llmcache.fs.backends.fuse import BufferFetch, FuseBackend, copy
from llmcache.fs.engine.group import (
    ABSENT,
    LOADING,
    PAGE,
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
from llmcache.fs.engine.references import READ

if TYPE_CHECKING:
    from llmcache.fs.engine.engine import Engine
    from llmcache.fs.vfs.backing import Backing

REFAULTS_MAX = 2
WAIT_S = 5.0


class Reader:
    """Serves reads of all files, and has the engine told when a pass over a group has ended."""

    def __init__(self, engine: Engine, backend: FuseBackend) -> None:
        self.engine = engine
        self.backend = backend
        self.state = backend.state

    def read(self, backing: Backing, address: int, size: int, offset: int, pid: int) -> int:
        """Fills memory at `address`; returns the bytes read, short only at the end of the file. Raises OSError.

        The pin helper's faults say nothing about readers.
        """
        pid = 0 if pid == self.engine.pins.pid else pid
        if pid and backing not in self.state.owners and self.state.running and not backing.hidden:
            self.engine.adopt(backing)
        size = max(0, min(size, backing.size - offset))
        owner = self.state.owners.get(backing)
        if owner is None or offset + size > owner[1].size_bytes:
            return self.uncached(backing, address, size, offset, pid)
        group, member = owner
        done = 0
        while done < size:
            index, start = divmod(offset + done, group.extent_bytes)
            length = min(size - done, group.extent_bytes - start)
            count = self._segment(group, member, backing, address + done, member.base + index, start, length, pid)
            done += count
            if count < length:  # shrunk behind the mount
                break
        if pid:
            with self.state.lock:
                self.state.counters.requested_bytes += done
        return done

    def _segment(
        self,
        group: Group,
        member: Member,
        backing: Backing,
        address: int,
        extent: int,
        start: int,
        length: int,
        pid: int,
    ) -> int:
        trip: Tripwire | None = None
        mine: BufferFetch | None = None
        theirs: BufferFetch | None = None
        with self.state.lock:
            state = group.state(extent)
            if pid:
                group.last_pid = pid
                self._note(group, extent, state)
            if state == READY:
                trip = group.trips.get(extent)
                self._arrived(group, member, extent, trip)
            elif state == LOADING:
                theirs = self.backend.under_way(group, extent)
                theirs.users += 1
                theirs.joined = theirs.joined or pid != 0
            elif state in (ABSENT, SPARSE) and member.reachable and group.alive:
                mine = self.backend.claim(group, member, extent, ahead=False, pid=pid)
            elif state in (TOUCHED, PINNED):
                self._refault(group, extent, length)
            if trip is None and mine is None and theirs is None:
                self._stray(group, extent, length)
                if state == SINGLE and group.alive:
                    self.state.references.pages(group, member, group.offset_of(member, extent) + start, length, READ, pid)
        if trip is not None and start == 0 and length <= len(trip.page):
            ctypes.memmove(address, trip.page, length)
            return length
        if mine is not None:
            return self._answer_mine(group, member, backing, mine, address, start, length, pid)
        if theirs is not None:
            return self._answer_theirs(group, member, backing, theirs, address, start, length, pid)
        return self.direct(backing, address, length, group.offset_of(member, extent) + start)

    def _note(self, group: Group, extent: int, state: int) -> None:
        if state == SINGLE:
            group.last_ns = group.seen_ns[extent] = time.monotonic_ns()
            return
        done = group.note(extent, time.monotonic_ns(), state in (ABSENT, SPARSE))
        if done is not None:
            self.engine.pass_ended(group, done)
        self.state.work.notify()

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
        self.state.charge(group, extent, -(-length // PAGE) * PAGE)
        self.state.consumed(length, False)
        if group.state(extent) in (SINGLE, ABSENT, SPARSE):
            group.strays.pop(extent, None)
            group.strays[extent] = time.monotonic_ns()

    def _answer_mine(
        self,
        group: Group,
        member: Member,
        backing: Backing,
        fetch: BufferFetch,
        address: int,
        start: int,
        length: int,
        pid: int,
    ) -> int:
        began_ns = time.monotonic_ns()
        self.backend.load(group, member, fetch)
        waited_ns = time.monotonic_ns() - began_ns
        if fetch.error is None:
            copy(address, fetch.region, start, length)
            fetch.replied = (start // PAGE * PAGE, start + length)
        with self.state.lock:
            if pid and not fetch.held:
                self.state.demand_waits.add(waited_ns)
            self.state.jobs.append(functools.partial(self.backend.store, group, member, fetch))
            self.state.work.notify()
        if fetch.error is not None:
            return self.direct(backing, address, length, group.offset_of(member, fetch.extent) + start)
        return length

    def _answer_theirs(
        self,
        group: Group,
        member: Member,
        backing: Backing,
        fetch: BufferFetch,
        address: int,
        start: int,
        length: int,
        pid: int,
    ) -> int:
        waited = not fetch.done.is_set()
        began_ns = time.monotonic_ns()
        while not fetch.done.wait(WAIT_S):
            if not self.state.running:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        waited_ns = time.monotonic_ns() - began_ns
        usable = fetch.error is None and not fetch.stale
        if usable:
            copy(address, fetch.region, start, length)
        with self.state.lock:
            if pid:
                self._judge(fetch, waited, waited_ns)
            self.state.finish(fetch)
        if not usable:
            return self.direct(backing, address, length, group.offset_of(member, fetch.extent) + start)
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

    def uncached(self, backing: Backing, address: int, size: int, offset: int, pid: int) -> int:
        """Serves a read of which nothing is kept, such as one with O_DIRECT: all that it gives comes from storage."""
        done = self.direct(backing, address, max(0, min(size, backing.size - offset)), offset)
        if pid:
            with self.state.lock:
                self.state.counters.requested_bytes += done
                self.state.consumed(done, False)
        return done

    def direct(self, backing: Backing, address: int, size: int, offset: int) -> int:
        """Reads exactly this range, through this thread's aligned buffer; returns the bytes read."""
        bounce = self.state.pool.bounce()
        done = 0
        while done < size:
            first = (offset + done) // PAGE * PAGE
            skip = offset + done - first
            length = min(size - done, BOUNCE_BYTES - skip)
            count = backing.read_into(bounce.address, -(-(skip + length) // PAGE) * PAGE, first) - skip
            if count <= 0:
                break
            count = min(count, length)
            copy(address + done, bounce, skip, count)
            done += count
            if count < length:
                break
        with self.state.lock:
            self.state.counters.backing_read_bytes += done
        return done
