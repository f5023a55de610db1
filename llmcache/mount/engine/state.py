"""The state that readers, loaders, evictor and planner share, and the locks around it.

Locks: a thread that takes several of them takes them in this order.
1. `Files.turn` (mode inplace): changes of the table of files.
2. `Grouping._parsing`: parsing of one header at a time.
3. `Files.lock` (mode inplace): the programs that map files, while the kernel is given advice on their memory.
4. `CacheState.lock`: all fields in this file, and every method of `LoopSpace` and `ExpertCache`. Threads hold it only to
   compute, never during I/O, a notification to the kernel, an mlock or a wait for a fetch. Its conditions: `work` wakes
   loaders, `room` wakes the evictor, `ended` wakes threads that wait for the end of loads or STOREs.

Waits over FUSE: the kernel locks the pages of a READ or WRITE until the daemon replies. STORE, INVAL and mlock wait for
locked pages, and a READ may be queued behind as many other requests as the daemon has threads. So a thread that owes the
kernel a reply may wait only for the following:
- READ: the fetch of its extent. A fetch depends on storage alone: a loader sets `Fetch.done` before it begins its STORE. The
  READ that loads a piece of an expert slice also waits for the STORE of that piece, at most `fuse.STORE_WAIT_S`.
- RELEASE, the last one of a file: reads of the file (`SpaceFile.loads`), which end before their STOREs begin. At most
  `LOADS_S`.
- OPEN, and truncation by name: STOREs of the previous content of the path, which would overwrite new data with old. At most
  `engine.WAITERS` requests wait, so that other threads can answer the READs that those STOREs wait for. Each waits at most
  `engine.WAIT_S`, because libfuse blocks other requests for a path while it is opened. After an OPEN that did not wait that
  long, clients may read old data until it is dropped.

Why there is no deadlock: each of these waits ends when storage replies, or at its time limit. Loaders, the evictor, the pin
service and the thread that invalidates pages wait for the kernel without a limit. But apart from the waits above, no thread
that owes a reply waits for them, and while they wait, they hold neither a lock nor an unfinished fetch. A writer only queues
the ranges to invalidate; until they are invalidated, opens clear `keep_cache` (`operations.py`). At unmount,
`libfuse.Notifier.close` rejects further notifications and waits for those under way while requests are still served; ranges
that are still queued are not invalidated.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmcache.cache.arbitration import MIN_WINDOW_BYTES, WINDOW_ALLOWANCE_BYTES
from llmcache.cache.shadow import Shadow
from llmcache.cache.steering import HIT, MISS, Steering
from llmcache.mount.backends.base import BufferPool
from llmcache.mount.engine.experts import ExpertCache
from llmcache.mount.engine.space import Fetch, LoopSpace, SpaceFile
from llmcache.mount.services import Services
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.mount.daemon.accesslog import AccessLog
    from llmcache.mount.vfs.backing import Backing


BOUNDS_NS = tuple(number * 10**power for power in range(5, 10) for number in (1, 3))
"""Upper bounds of the histogram's classes, inclusive, from 0.1 ms to 3 s; one more class counts longer waits."""


class WaitHistogram:
    """Histogram of how long readers waited for one reason, since the mount began. Every method expects the engine's lock.

    Only waits are counted, not hits: counting takes a microsecond, a wait as long as a request to storage.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._total_ns = 0

    def add(self, waited_ns: int) -> None:
        """Count one wait."""
        self._counts[bisect_left(BOUNDS_NS, waited_ns)] += 1
        self._total_ns += waited_ns

    def as_dict(self) -> dict[str, Any]:
        """Return {"bounds_s", "counts" (by class, one more than bounds), "sum_s"}."""
        bounds = [bound / 1e9 for bound in BOUNDS_NS]
        return {"bounds_s": bounds, "counts": list(self._counts), "sum_s": self._total_ns / 1e9}


@dataclass
class Counters:
    """Bytes since the mount began."""

    requested_bytes: int = 0  # by READ requests
    hit_bytes: int = 0  # read by clients from memory: from pinned extents (counted once a pass), or from the arena
    miss_bytes: int = 0  # read by clients from storage
    backing_read_bytes: int = 0
    backing_write_bytes: int = 0
    prefetch_useful_bytes: int = 0
    prefetch_late_bytes: int = 0
    prefetch_wasted_bytes: int = 0
    stored_bytes: int = 0
    invalidated_bytes: int = 0
    refault_bytes: int = 0


LOADS_S = 30.0  # how long the last close of a file waits for reads of it under way
READ, WRITE = 0, 1  # the values of llmcache.trace.record, which the daemon must not import


class References:
    """Passes references to extents, and events, to the deterministic core and to the access log.

    Both receive the same sequence, so the decisions of a mount can be replayed from its log through
    `llmcache.cache.steering`, which defines the events. Mode steer has no core: clients read pinned extents without a
    request, so the daemon sees only some of the references, and its log contains those. Every method expects the engine's
    lock.
    """

    def __init__(self, core: Steering | None = None) -> None:
        self.core = core
        self.log: AccessLog | None = None
        self._files: dict[tuple[str, int, int, int], int] = {}
        self._paused_events: list[tuple[Any, ...]] | None = None  # None: the log is not paused

    def pause(self) -> None:
        """Stop logging events while the mount ends: a replay must not end with the evictions of an unmount."""
        self._paused_events = []

    def resume(self) -> None:
        """Log the events since `pause`, and log again: the mount continues."""
        paused_events, self._paused_events = self._paused_events or [], None
        for event in paused_events:
            if self.log is not None:
                self.log.event(event)

    def record_event(self, *event: Any) -> None:
        """Pass an event to the log and the core."""
        if self._paused_events is not None:
            self._paused_events.append(event)
        elif self.log is not None:
            self.log.event(event)
        if self.core is not None:
            self.core.apply(event)

    def joined(self, space: LoopSpace, member: SpaceFile, backing: Backing) -> None:
        """Log the identity of a member's file, which was opened."""
        if self.log is None:
            return
        identity = (backing.path, backing.dev, backing.ino, backing.generation)
        number = self._files.setdefault(identity, len(self._files))
        if number == member.file_id:
            return
        member.file_id = number
        self.log.file(member.file_id, *identity, backing.size)
        self.log.event(("file", member.file_id, space.key, space.members.index(member)))

    def guessed(self, space: LoopSpace, single: Iterable[int], hot: Iterable[int], order: Iterable[int]) -> None:
        """Report the first guess from a header: extents read by pages, the hot ones among them, and the loop's order."""
        self.record_event("guess", space.key, ranges(single), ranges(hot), ranges(order))

    def lost(self, space: LoopSpace, extent: int) -> None:
        """Report that an extent could not be read, if the core counts it as held."""
        if self.core is not None and self.core.holds(space.key, extent):
            self.record_event("lost", space.key, extent)

    def claimed(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int) -> int:
        """Report the fetch of a whole extent; return the core's verdict (MISS without a core)."""
        verdict = MISS if self.core is None else self.core.reference(space.key, extent)
        if self.log is not None:
            offset, length = space.offset_of(member, extent), space.length_of(member, extent)
            count = -(-length // BLOCK_BYTES)
            self.log.row(member.file_id, offset // BLOCK_BYTES, count, READ, int(verdict != HIT), pid)
        return verdict

    def slices(self, space: LoopSpace, member: SpaceFile, parts: Iterable[tuple[int, int]], pid: int) -> None:
        """Report a miss of an expert. `parts`: (offset, bytes) of its slices, in whole pages."""
        for offset, length in parts:
            self.pages(space, member, offset, length, READ, pid)

    def pages(self, space: LoopSpace, member: SpaceFile, offset: int, length: int, op: int, pid: int) -> None:
        """Report pages of single-page extents that were read from storage, or written to it."""
        if length <= 0:
            return
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        if self.core is not None:
            self.core.page(space.key, member.base + offset // space.extent_bytes, end - first)
        if self.log is not None:
            self.log.row(member.file_id, first, end - first, op, 1, pid)


def ranges(extents: Iterable[int]) -> list[tuple[int, int]]:
    """Return `extents` as (first, end) of runs of consecutive numbers; keeps their order."""
    runs: list[tuple[int, int]] = []
    for extent in extents:
        if runs and runs[-1][1] == extent:
            runs[-1] = (runs[-1][0], extent + 1)
        else:
            runs.append((extent, extent + 1))
    return runs


Job = Callable[[], None]


@dataclass(eq=False)
class CacheState:
    """Budget, spaces and counters of one mount."""

    budget_bytes: int
    pool: BufferPool
    allowance_bytes: int = WINDOW_ALLOWANCE_BYTES
    experts_allowance_bytes: int = 0  # added while MoE models are read
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    late_waits: WaitHistogram = field(
        default_factory=WaitHistogram
    )  # for extents that a loader was fetching ahead of the reader
    demand_waits: WaitHistogram = field(default_factory=WaitHistogram)  # for extents that no loader had fetched ahead
    began_ns: int = field(default_factory=time.monotonic_ns)
    references: References = field(default_factory=References)
    services: Services = field(default_factory=Services)
    spaces: dict[str, LoopSpace] = field(default_factory=dict)
    places: dict[str, list[tuple[LoopSpace, SpaceFile]]] = field(
        default_factory=dict
    )  # by path; a shard may be in two spaces
    owners: dict[Backing, tuple[LoopSpace, SpaceFile]] = field(default_factory=dict)
    opens: dict[Backing, int] = field(default_factory=dict)  # open handles of clients
    pending_invalidations: list[tuple[int, int, int, int]] = field(
        default_factory=list
    )  # (node, offset, length, charged) to invalidate
    jobs: deque[Job] = field(default_factory=deque)  # loaders run these before they claim extents
    storing: list[tuple[LoopSpace, SpaceFile]] = field(default_factory=list)  # STOREs under way
    resident_bytes: int = 0  # upper bound of this mount's bytes in the page cache
    asked_bytes: int = 0  # room that a warm-up waits for
    held_bytes: int = 0  # arena only: bytes in the daemon's own memory
    least_window_bytes: int = MIN_WINDOW_BYTES  # of a loop that does not fit
    opportunistic_bytes: int = 0  # in place only: opportunistic bytes beyond the limit, in memory that nothing else needs
    is_calm: bool = True  # available memory has not shrunk for a while
    crowded: bool = False  # a thread that waits on `work` needs room
    running: bool = True

    def __post_init__(self) -> None:
        self.pin_limit_bytes = self.budget_bytes
        self.limit_bytes = self.budget_bytes + self.allowance_bytes
        self.expert_cache = ExpertCache(self)
        self.shadow = Shadow(self.limit_bytes)
        self.work = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.ended = threading.Condition(self.lock)

    def set_limit(self, limit_bytes: int) -> None:
        """Set the bytes that memory pressure leaves of the budget: the limit of pins. Windows may add the allowance."""
        if limit_bytes != self.pin_limit_bytes:
            self.references.record_event("limit", limit_bytes)
        self.pin_limit_bytes = limit_bytes
        experts_bytes = self.experts_allowance_bytes if self.expert_cache.moe_files else 0
        self.limit_bytes = limit_bytes + self.allowance_bytes + experts_bytes

    def set_opportunistic(self, free_bytes: int) -> None:
        """Set the bytes that may be used beyond the limit. `free_bytes`: unneeded memory; negative: memory is short."""
        opportunistic_bytes = max(0, self.used_bytes + free_bytes - self.limit_bytes)
        if opportunistic_bytes < self.opportunistic_bytes:
            self.room.notify()
        self.opportunistic_bytes = opportunistic_bytes

    def ask_room(self) -> None:
        """Wake the evictor, which wakes threads that wait on `work` once there is room."""
        self.crowded = True
        self.room.notify()

    @property
    def room_bytes(self) -> int:
        """Bytes that may be used before extents are evicted."""
        return self.limit_bytes + self.opportunistic_bytes

    @property
    def used_bytes(self) -> int:
        """Kernel and arena bytes that count against the budget."""
        return self.resident_bytes + self.held_bytes

    def stores_old(self, path: str) -> bool:
        """Return True while a STORE to `path` of a space that has ended is under way."""
        return any(member.path == path and not space.alive for space, member in self.storing)

    def load_ended(self, member: SpaceFile) -> None:
        """Count the end of a fetch's read of the file."""
        member.loads -= 1
        self.ended.notify_all()

    def store_ended(self, space: LoopSpace, member: SpaceFile) -> None:
        """Remove a STORE that has ended from `storing`."""
        self.storing.remove((space, member))
        self.ended.notify_all()

    def opens_of(self, space: LoopSpace) -> int:
        """Return the number of client handles on all files of `space`, which is alive."""
        return sum(self.opens.get(member.backing, 0) for member in space.members if member.backing is not None)

    def programs_of(self, space: LoopSpace) -> int:
        """Return the largest number of client handles on one file of `space`."""
        return max((self.opens.get(member.backing, 0) for member in space.members if member.backing is not None), default=0)

    def place(self, space: LoopSpace, member: SpaceFile) -> None:
        """Register a member at its path."""
        self.places.setdefault(member.path, []).append((space, member))

    def displace(self, space: LoopSpace, member: SpaceFile) -> None:
        """Remove a member from its path."""
        members = self.places[member.path]
        members.remove((space, member))
        if not members:
            del self.places[member.path]

    def account(self, space: LoopSpace, extent: int, length: int) -> None:
        """Account `length` more bytes of `extent`, in whole pages, to the page cache; at most the whole extent."""
        if not space.alive or space.member_of(extent).node is None:
            return  # until the node is known, nothing is accounted; then all pages are dropped
        before = space.accounted_bytes[extent]
        after = min(space.extent_bytes, before + -(-length // BLOCK_BYTES) * BLOCK_BYTES)
        space.accounted_bytes[extent] = after
        self.resident_bytes += after - before
        if self.used_bytes > self.room_bytes:
            self.room.notify()

    def consumed(self, length: int, hit: bool) -> None:
        """Count bytes that a client has read."""
        if hit:
            self.counters.hit_bytes += length
        else:
            self.counters.miss_bytes += length

    def finish(self, fetch: Fetch) -> None:
        """Remove one user of `fetch`; the last one returns its buffer to the pool."""
        fetch.users -= 1
        if fetch.users == 0 and fetch.buffer is not None:
            self.pool.give(fetch.buffer)
            self.work.notify()

    def ranges(self, space: LoopSpace, extents: list[int]) -> list[tuple[SpaceFile, int, int]]:
        """Return (member, offset, length) of `extents`, consecutive ones merged."""
        merged: list[tuple[SpaceFile, int, int]] = []
        for extent in sorted(extents):
            member = space.member_of(extent)
            offset, length = space.offset_of(member, extent), space.length_of(member, extent)
            if merged and merged[-1][0] is member and merged[-1][1] + merged[-1][2] == offset:
                merged[-1] = (member, merged[-1][1], merged[-1][2] + length)
            else:
                merged.append((member, offset, length))
        return merged

    def pinned_bytes(self) -> int:
        """Return the bytes that are pinned in the page cache (steer, in place) or in the arena."""
        return sum(space.pinned_bytes for space in self.spaces.values())

    def window_bytes(self) -> int:
        """Return the accounted bytes that are not pinned: windows, hot pages and pages that are not invalidated yet."""
        return max(0, self.used_bytes - self.pinned_bytes())
