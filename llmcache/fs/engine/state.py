"""The state that reader, loader, evictor and planner share, and the one lock around it.

Locking, argued once: `lock` guards every field here and every method of `Group`. It is held for computing only, never
during I/O, a notification to the kernel, an mlock or a wait for a fetch. `work` wakes loaders, `room` the evictor, `ended`
those who wait for the end of loads and STOREs.

Who may wait for whom (a page of an unanswered READ or WRITE is locked in the kernel; STORE, INVAL and mlock wait for it,
and the READ may be queued behind as many other requests as the daemon has threads):
- a READ -> the fetch under way -> storage, and nothing else (what it has brought of a slice may be stored before it is
  answered, but for that it waits no longer than `fuse.STORE_WAIT_S`). Loaders set `done` before they STORE, and what is
  read for a STORE is no load any more (`Member.loads`) when that begins; evictor, pins and the dropping of pages have
  threads of their own, hold neither lock nor fetch while they wait for the kernel, and nobody waits for them: who changes
  a file leaves word of what has to be dropped, and opens say so until it is (`operations.py`).
- an open, or a truncation by name -> STOREs of what was there before, which would put old data over new; but only
  `engine.WAITERS` at a time, so that other threads answer the READs for which those STOREs wait, and only for
  `engine.WAIT_S`: libfuse keeps others from a path while it is opened, and they have threads too. An open that does not
  wait may be followed by old data until that is dropped.
So every request is answered however long the kernel takes.
At the end nobody waits for the kernel any more before requests are no longer taken (`libfuse.Notifier.close`); what is
left to be dropped then is not.
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
from llmcache.fs.backends.base import BufferPool
from llmcache.fs.engine.experts import MixtureCache
from llmcache.fs.engine.group import Fetch, Group, Member
from llmcache.fs.services import Services
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.fs.daemon.accesslog import AccessLog
    from llmcache.fs.vfs.backing import Backing


BOUNDS_NS = tuple(number * 10**power for power in range(5, 10) for number in (1, 3))
"""Upper bounds of the classes, from 0.1 ms to 3 s, inclusive; what takes longer is in one class more."""


class Waits:
    """How long readers waited for one reason, since the mount began. Every method expects the engine's lock.

    Only waits are counted, never hits: a wait takes as long as a request to storage, counting it a microsecond.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._total_ns = 0

    def add(self, waited_ns: int) -> None:
        """Counts one wait."""
        self._counts[bisect_left(BOUNDS_NS, waited_ns)] += 1
        self._total_ns += waited_ns

    def as_dict(self) -> dict[str, Any]:
        """Returns {"bounds_s", "counts" (by class, one more than bounds), "sum_s"}."""
        bounds = [bound / 1e9 for bound in BOUNDS_NS]
        return {"bounds_s": bounds, "counts": list(self._counts), "sum_s": self._total_ns / 1e9}


@dataclass
class Counters:
    """Bytes since the mount began."""

    requested_bytes: int = 0  # by READ requests
    hit_bytes: int = 0  # consumed by readers from memory: pinned in the page cache (once a pass), or held in the arena
    miss_bytes: int = 0  # consumed by readers from storage
    backing_read_bytes: int = 0
    backing_write_bytes: int = 0
    prefetch_useful_bytes: int = 0
    prefetch_late_bytes: int = 0
    prefetch_wasted_bytes: int = 0
    stored_bytes: int = 0
    invalidated_bytes: int = 0
    refault_bytes: int = 0


LOADS_S = 30.0  # that the last close of a file waits for reads of it that are under way
READ, WRITE = 0, 1  # as in llmcache.trace.record, which the daemon must not import


class References:
    """The one way by which references to extents, and events, reach the deterministic core and the access log.

    Both get the same sequence: what a log holds, replayed through `llmcache.cache.steering`, which says what events there
    are, gives what the mount did. Mode steer has no core here (pinned extents are read without a request, so its references
    are not all seen); its log is what the daemon sees. Every method expects the engine's lock.
    """

    def __init__(self, core: Steering | None = None) -> None:
        self.core = core
        self.log: AccessLog | None = None
        self._files: dict[tuple[str, int, int, int], int] = {}
        self._untold: list[tuple[Any, ...]] | None = None

    def pause(self) -> None:
        """The mount ends: what is given up from here on is not what a replay should end with, so the log is not told."""
        self._untold = []

    def resume(self) -> None:
        """The mount goes on after all: the log is told everything."""
        untold, self._untold = self._untold or [], None
        for event in untold:
            if self.log is not None:
                self.log.event(event)

    def tell(self, *event: Any) -> None:
        """Passes an event on."""
        if self._untold is not None:
            self._untold.append(event)
        elif self.log is not None:
            self.log.event(event)
        if self.core is not None:
            self.core.apply(event)

    def joined(self, group: Group, member: Member, backing: Backing) -> None:
        """A member's file is open: its identity is known."""
        if self.log is None:
            return
        identity = (backing.path, backing.dev, backing.ino, backing.generation)
        number = self._files.setdefault(identity, len(self._files))
        if number == member.file_id:
            return
        member.file_id = number
        self.log.file(member.file_id, *identity, backing.size)
        self.log.event(("file", member.file_id, group.key, group.members.index(member)))

    def guessed(self, group: Group, single: Iterable[int], hot: Iterable[int], order: Iterable[int]) -> None:
        """A header was read."""
        self.tell("guess", group.key, ranges(single), ranges(hot), ranges(order))

    def lost(self, group: Group, extent: int) -> None:
        """An extent that was to be held could not be read."""
        if self.core is not None and self.core.holds(group.key, extent):
            self.tell("lost", group.key, extent)

    def claimed(self, group: Group, member: Member, extent: int, pid: int) -> int:
        """A whole extent is being fetched; returns the core's verdict (MISS without one)."""
        verdict = MISS if self.core is None else self.core.reference(group.key, extent)
        if self.log is not None:
            offset, length = group.offset_of(member, extent), group.length_of(member, extent)
            count = -(-length // BLOCK_BYTES)
            self.log.row(member.file_id, offset // BLOCK_BYTES, count, READ, int(verdict != HIT), pid)
        return verdict

    def slices(self, group: Group, member: Member, parts: Iterable[tuple[int, int]], pid: int) -> None:
        """An expert is missed: (offset, bytes) of what is read of it, in whole pages."""
        for offset, length in parts:
            self.pages(group, member, offset, length, READ, pid)

    def pages(self, group: Group, member: Member, offset: int, length: int, op: int, pid: int) -> None:
        """Pages of single extents were read from storage, or written to it."""
        if length <= 0:
            return
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        if self.core is not None:
            self.core.page(group.key, member.base + offset // group.extent_bytes, end - first)
        if self.log is not None:
            self.log.row(member.file_id, first, end - first, op, 1, pid)


def ranges(extents: Iterable[int]) -> list[tuple[int, int]]:
    """Returns `extents`, in their order, as (first, end) of runs of neighbours."""
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
    """Budget, groups and counters of one mount."""

    budget_bytes: int
    pool: BufferPool
    allowance_bytes: int = WINDOW_ALLOWANCE_BYTES
    experts_allowance_bytes: int = 0  # more of it, where there are some
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    late_waits: Waits = field(default_factory=Waits)  # for extents that were being fetched ahead of the reader
    demand_waits: Waits = field(default_factory=Waits)  # for extents that nobody had fetched ahead
    began_ns: int = field(default_factory=time.monotonic_ns)
    references: References = field(default_factory=References)
    services: Services = field(default_factory=Services)
    groups: dict[str, Group] = field(default_factory=dict)
    places: dict[str, list[tuple[Group, Member]]] = field(default_factory=dict)  # by path; a shard may be known alone, too
    owners: dict[Backing, tuple[Group, Member]] = field(default_factory=dict)
    opens: dict[Backing, int] = field(default_factory=dict)  # by applications
    debts: list[tuple[int, int, int, int]] = field(default_factory=list)  # node, offset, length, charged: to be dropped
    jobs: deque[Job] = field(default_factory=deque)  # for loaders, before all that they find to do themselves
    storing: list[tuple[Group, Member]] = field(default_factory=list)  # STOREs under way
    resident_bytes: int = 0  # upper bound of what the kernel holds for us
    asked_bytes: int = 0  # of room that a warm-up waits for
    held_bytes: int = 0  # arena only: bytes in the daemon's own memory
    least_window_bytes: int = MIN_WINDOW_BYTES  # of a loop that is streamed
    slack_bytes: int = 0  # in place only: beyond the limit, in memory that nobody wants
    is_calm: bool = True  # memory has not got shorter for a while
    crowded: bool = False  # somebody on `work` waits for room
    running: bool = True

    def __post_init__(self) -> None:
        self.pin_limit_bytes = self.budget_bytes
        self.limit_bytes = self.budget_bytes + self.allowance_bytes
        self.mixtures = MixtureCache(self)
        self.shadow = Shadow(self.limit_bytes)
        self.work = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.ended = threading.Condition(self.lock)

    def set_limit(self, limit_bytes: int) -> None:
        """Takes what pressure leaves of the budget: pins stay within it, all together may have the allowance."""
        if limit_bytes != self.pin_limit_bytes:
            self.references.tell("limit", limit_bytes)
        self.pin_limit_bytes = limit_bytes
        experts_bytes = self.experts_allowance_bytes if self.mixtures.mixtures else 0
        self.limit_bytes = limit_bytes + self.allowance_bytes + experts_bytes

    def set_slack(self, free_bytes: int) -> None:
        """Takes how much memory nobody wants (negative: so much is wanted): so much more may be used than is used now."""
        slack_bytes = max(0, self.used_bytes + free_bytes - self.limit_bytes)
        if slack_bytes < self.slack_bytes:
            self.room.notify()
        self.slack_bytes = slack_bytes

    def ask_room(self) -> None:
        """Has the evictor make room, and wake those on `work` once there is some."""
        self.crowded = True
        self.room.notify()

    @property
    def room_bytes(self) -> int:
        """What may be used before something has to be dropped."""
        return self.limit_bytes + self.slack_bytes

    @property
    def used_bytes(self) -> int:
        """Kernel and arena bytes that count against the budget."""
        return self.resident_bytes + self.held_bytes

    def stores_old(self, path: str) -> bool:
        """True while a STORE of a group that has ended is under way to `path`."""
        return any(member.path == path and not group.alive for group, member in self.storing)

    def load_ended(self, member: Member) -> None:
        """Notes the end of a read of the file for a fetch."""
        member.loads -= 1
        self.ended.notify_all()

    def store_ended(self, group: Group, member: Member) -> None:
        """Notes the end of a STORE that is in `storing`."""
        self.storing.remove((group, member))
        self.ended.notify_all()

    def opens_of(self, group: Group) -> int:
        """Open handles of applications on all files of `group`, which is alive."""
        return sum(self.opens.get(member.backing, 0) for member in group.members if member.backing is not None)

    def programs_of(self, group: Group) -> int:
        """Open handles of applications on one file of `group`, of which there are most."""
        return max((self.opens.get(member.backing, 0) for member in group.members if member.backing is not None), default=0)

    def place(self, group: Group, member: Member) -> None:
        """The file of a member is at its path from now on."""
        self.places.setdefault(member.path, []).append((group, member))

    def displace(self, group: Group, member: Member) -> None:
        """And is no more, or is forgotten."""
        known = self.places[member.path]
        known.remove((group, member))
        if not known:
            del self.places[member.path]

    def charge(self, group: Group, extent: int, length: int) -> None:
        """Counts `length` more bytes of `extent`, in whole pages, as held by the kernel (at most the whole extent)."""
        if not group.alive or group.member_of(extent).node is None:
            return  # what comes in before the node is known is dropped when it is
        before = group.charge[extent]
        after = min(group.extent_bytes, before + -(-length // BLOCK_BYTES) * BLOCK_BYTES)
        group.charge[extent] = after
        self.resident_bytes += after - before
        if self.used_bytes > self.room_bytes:
            self.room.notify()

    def consumed(self, length: int, hit: bool) -> None:
        """Counts bytes that a reader got."""
        if hit:
            self.counters.hit_bytes += length
        else:
            self.counters.miss_bytes += length

    def finish(self, fetch: Fetch) -> None:
        """Drops one user of `fetch`; the last one gives its buffer back."""
        fetch.users -= 1
        if fetch.users == 0 and fetch.buffer is not None:
            self.pool.give(fetch.buffer)
            self.work.notify()

    def ranges(self, group: Group, extents: list[int]) -> list[tuple[Member, int, int]]:
        """Returns (member, offset, length) of `extents`, neighbours merged."""
        merged: list[tuple[Member, int, int]] = []
        for extent in sorted(extents):
            member = group.member_of(extent)
            offset, length = group.offset_of(member, extent), group.length_of(member, extent)
            if merged and merged[-1][0] is member and merged[-1][1] + merged[-1][2] == offset:
                merged[-1] = (member, merged[-1][1], merged[-1][2] + length)
            else:
                merged.append((member, offset, length))
        return merged

    def pinned_bytes(self) -> int:
        """Bytes that are pinned in the page cache (steer) or held in the arena."""
        return sum(group.pinned_bytes for group in self.groups.values())

    def window_bytes(self) -> int:
        """Charged bytes that are not pinned: the window, hot pages and what has not been dropped yet."""
        return max(0, self.used_bytes - self.pinned_bytes())
