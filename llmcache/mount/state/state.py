"""The state that readers, loaders, evictor and planner share, and the locks around it.

Locks, in the order in which a thread takes them:
1. `Files.turn` (mode inplace): changes of the table of files.
2. `Grouping._parsing`: parsing of one header at a time.
3. `Files.lock` (mode inplace): the programs that map files, while the kernel is given advice on their memory.
4. `CacheState.lock`: all fields in this file, and every method of `Spaces`, `LoopSpace`, `Accounting` and `ExpertCache`.
   Threads never hold it during I/O, a notification to the kernel, an mlock or a wait for a fetch. Its conditions: `work`
   wakes loaders, `room` wakes the evictor, `ended` wakes threads that wait for the end of loads or STOREs.

Waits over FUSE: the kernel locks the pages of a READ or WRITE until the daemon replies. STORE, INVAL and mlock wait for
locked pages, and a READ may be queued behind as many other requests as the daemon has threads. So a thread that owes the
kernel a reply may wait only for the following:
- READ: the fetch of its extent. A loader sets `Fetch.done` before it begins its STORE, so a fetch depends on storage alone.
  The READ that loads a piece of an expert slice also waits for the STORE of that piece, at most `fuse.STORE_WAIT_S`.
- RELEASE, the last one of a file: reads of the file (`SpaceFile.loads`), at most `LOADS_S`.
- OPEN, and truncation by name: STOREs of the previous content of the path, which would overwrite new data with old. At most
  `engine.WAITERS` requests wait, so that other threads can answer the READs that those STOREs wait for. Each waits at most
  `engine.WAIT_S`, because libfuse blocks other requests for a path while it is opened. After that time, clients may read old
  data until it is dropped.

There is no deadlock, because each of these waits ends when storage replies, or at its time limit. Loaders, the evictor, the
pin service and the thread that invalidates pages wait for the kernel without a limit. But apart from the waits above, no
thread that owes a reply waits for them, and meanwhile they hold neither a lock nor an unfinished fetch. A writer only queues
the ranges to invalidate; until they are invalidated, opens clear `keep_cache` (`operations.py`). At unmount,
`libfuse.Notifier.close` rejects further notifications and waits for those under way while requests are still served.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from llmcache.cache.arbitration import MIN_WINDOW_BYTES, WINDOW_ALLOWANCE_BYTES
from llmcache.cache.shadow import Shadow
from llmcache.cache.steering import HIT, MISS, Event, Spaces, Steering
from llmcache.mount.services import Services
from llmcache.mount.source.backing import Backing
from llmcache.mount.state.accounting import Accounting, Counters
from llmcache.mount.state.buffers import BufferPool, MemoryRegion
from llmcache.mount.state.experts import ExpertCache
from llmcache.mount.state.space import Fetch, LoopSpace, SpaceFile, SpaceIndex
from llmcache.units import BLOCK_BYTES, PAGE_BYTES

BOUNDS_NS = tuple(number * 10**power for power in range(5, 10) for number in (1, 3))
"""Upper bounds of the histogram's classes, inclusive, from 0.1 ms to 3 s; one more class counts longer waits."""


class WaitHistogram:
    """Histogram of how long readers waited for one reason. The caller holds the lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._total_ns = 0

    def add(self, waited_ns: int) -> None:
        self._counts[bisect_left(BOUNDS_NS, waited_ns)] += 1
        self._total_ns += waited_ns

    def as_dict(self) -> dict[str, Any]:
        """Return {"bounds_s", "counts" (one more than bounds), "sum_s"}."""
        bounds = [bound / 1e9 for bound in BOUNDS_NS]
        return {"bounds_s": bounds, "counts": list(self._counts), "sum_s": self._total_ns / 1e9}


LOADS_S = 30.0  # how long the last close of a file waits for reads of it under way
READ, WRITE = 0, 1  # the values of llmcache.trace.record, which the daemon must not import


class Log(Protocol):
    """The access log, as the engine uses it (`daemon.accesslog.AccessLog`)."""

    path: str
    rows: int
    lost: int

    def row(self, file: int, first: int, count: int, op: int, miss: int, pid: int) -> None: ...

    def event(self, event: Sequence[Any]) -> None:
        """Append an event before the next row."""

    def file(self, number: int, path: str, dev: int, inode: int, generation: int, size_bytes: int) -> None: ...


class References:
    """Passes references to extents to the steering of mode arena, and references and events to the access log.

    Both receive the same sequence, so `llmcache.cache.steering` can replay a mount's decisions from its log. In the other
    modes, clients read pinned extents without a request. Every method expects the engine's lock.
    """

    def __init__(self, steering: Spaces) -> None:
        self.core = steering if isinstance(steering, Steering) else None
        self.log: Log | None = None
        self._files: dict[tuple[str, int, int, int], int] = {}
        self._paused_events: list[Event] | None = None  # None: the log is not paused
        steering.journal = self._record

    def pause(self) -> None:
        """Stop logging events, because a replay must not end with the evictions of an unmount."""
        self._paused_events = []

    def resume(self) -> None:
        paused_events, self._paused_events = self._paused_events or [], None
        for event in paused_events:
            self._record(event)

    def _record(self, event: Event) -> None:
        if self._paused_events is not None:
            self._paused_events.append(event)
        elif self.log is not None:
            self.log.event(event)

    def joined(self, space: LoopSpace, member: SpaceFile, backing: Backing) -> None:
        if self.log is None:
            return
        identity = (backing.path, backing.dev, backing.ino, backing.generation)
        number = self._files.setdefault(identity, len(self._files))
        if number == member.file_id:
            return
        member.file_id = number
        self.log.file(member.file_id, *identity, backing.size)
        self.log.event(("file", member.file_id, space.key, space.members.index(member)))

    def lost(self, space: LoopSpace, extent: int) -> None:
        if self.core is not None and extent in space.held:
            self.core.lost(space.key, extent)

    def claimed(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int) -> int:
        """Return the core's verdict (MISS without a core)."""
        verdict = MISS if self.core is None else self.core.reference(space.key, extent)
        if self.log is not None:
            offset, length = space.offset_of(member, extent), space.length_of(member, extent)
            count = -(-length // BLOCK_BYTES)
            self.log.row(member.file_id, offset // BLOCK_BYTES, count, READ, int(verdict != HIT), pid)
        return verdict

    def slices(self, space: LoopSpace, member: SpaceFile, parts: Iterable[tuple[int, int]], pid: int) -> None:
        for offset, length in parts:
            self.pages(space, member, offset, length, READ, pid)

    def pages(self, space: LoopSpace, member: SpaceFile, offset: int, length: int, op: int, pid: int) -> None:
        if length <= 0:
            return
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        if self.core is not None:
            self.core.page(space.key, member.base + offset // space.extent_bytes, end - first)
        if self.log is not None:
            self.log.row(member.file_id, first, end - first, op, 1, pid)


def ranges(extents: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers as (first, end)."""
    runs: list[tuple[int, int]] = []
    for extent in extents:
        if runs and runs[-1][1] == extent:
            runs[-1] = (runs[-1][0], extent + 1)
        else:
            runs.append((extent, extent + 1))
    return runs


Job = Callable[[], None]


class CacheState:
    """Memory, spaces and counters of one mount."""

    def __init__(
        self,
        budget_bytes: int,
        pool: BufferPool,
        steering: Spaces | None = None,
        *,
        allowance_bytes: int = WINDOW_ALLOWANCE_BYTES,
        experts_allowance_bytes: int = 0,
        least_window_bytes: int = MIN_WINDOW_BYTES,
    ) -> None:
        self.pool = pool
        self.steering = steering or Spaces(budget_bytes)
        self.references = References(self.steering)
        self.lock = threading.Lock()
        self.work, self.room, self.ended = (threading.Condition(self.lock) for _ in range(3))
        self.memory = Accounting(budget_bytes, allowance_bytes, experts_allowance_bytes, self.room.notify)
        self.least_window_bytes = least_window_bytes  # of a loop that does not fit
        self.counters = Counters()
        self.late_waits = WaitHistogram()  # for extents that a loader was fetching ahead of the reader
        self.demand_waits = WaitHistogram()  # for extents that no loader had fetched ahead
        self.began_ns = time.monotonic_ns()
        self.services = Services()
        self.spaces: dict[str, LoopSpace] = {}
        self.extents = 0  # of all spaces
        self.places: dict[str, list[tuple[LoopSpace, SpaceFile]]] = {}  # by path; a shard may be in two spaces
        self.owners: dict[Backing, tuple[LoopSpace, SpaceFile]] = {}
        self.opens: dict[Backing, int] = {}  # open handles of clients
        self.jobs: deque[Job] = deque()  # loaders run these before they claim extents
        self.storing: list[tuple[LoopSpace, SpaceFile]] = []  # STOREs under way
        self.is_calm = True  # available memory has not shrunk for a while
        self.is_near = False  # little memory is available
        self.crowded = False  # a thread that waits on `work` needs room
        self.running = True
        self.shadow = Shadow(self.memory.limit_bytes)
        self.expert_cache = ExpertCache(self.memory, self.counters, self.shadow, self._experts_changed)

    @property
    def index(self) -> SpaceIndex:
        return self.memory.index

    def set_limit(self, limit_bytes: int) -> None:
        if limit_bytes != self.memory.pin_limit_bytes:
            self.steering.limit(limit_bytes)
        self.memory.set_limit(limit_bytes, has_experts=bool(self.expert_cache.moe_files))

    def _experts_changed(self) -> None:
        self.set_limit(self.memory.pin_limit_bytes)

    def add(self, space: LoopSpace) -> None:
        self.spaces[space.key] = space
        self.extents += space.count
        for member in space.members:
            self.place(space, member)
        self.steering.add(space)

    def remove(self, space: LoopSpace) -> None:
        if self.spaces.pop(space.key, None) is not None:
            self.extents -= space.count
            for member in space.members:
                self.displace(space, member)

    def request_room(self) -> None:
        self.crowded = True
        self.room.notify()

    def queue(self, job: Job) -> None:
        self.jobs.append(job)
        self.work.notify()

    def invalidate(self, node: int, offset: int, length: int) -> None:
        """Queue a range of which nothing is accounted."""
        self.memory.pending.append(self.memory.pend(node, offset, length, 0))
        self.room.notify()

    def stores_old(self, path: str) -> bool:
        return any(member.path == path and not space.alive for space, member in self.storing)

    def load_ended(self, member: SpaceFile) -> None:
        member.loads -= 1
        self.ended.notify_all()

    def store_ended(self, space: LoopSpace, member: SpaceFile) -> None:
        self.storing.remove((space, member))
        self.ended.notify_all()

    def opens_of(self, space: LoopSpace) -> int:
        return sum(self._handles(space))

    def programs_of(self, space: LoopSpace) -> int:
        return max(self._handles(space), default=0)

    def _handles(self, space: LoopSpace) -> list[int]:
        return [self.opens.get(member.backing, 0) for member in space.members if member.backing is not None]

    def place(self, space: LoopSpace, member: SpaceFile) -> None:
        self.places.setdefault(member.path, []).append((space, member))

    def displace(self, space: LoopSpace, member: SpaceFile) -> None:
        members = self.places[member.path]
        members.remove((space, member))
        if not members:
            del self.places[member.path]

    def consumed(self, length: int, hit: bool) -> None:
        if hit:
            self.counters.hit_bytes += length
        else:
            self.counters.miss_bytes += length

    def finish(self, fetch: Fetch) -> None:
        fetch.users -= 1
        if fetch.users == 0 and fetch.buffer is not None:
            self.pool.give(fetch.buffer)
            self.work.notify()


def read_whole(state: CacheState, backing: Backing, region: MemoryRegion, offset: int, length: int) -> bool:
    """Read a range; return False on an error, which readers then get from their own read."""
    try:
        count = backing.read_into(region.address, -(-length // PAGE_BYTES) * PAGE_BYTES, offset)
    except OSError:
        return False
    with state.lock:
        state.counters.backing_read_bytes += count
    return count >= length
