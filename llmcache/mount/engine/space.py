"""The state of each extent of a loop space: absent, loading, ready, touched, pinned, read by pages, or sparse.

A `LoopSpace` is one loop space: a file, or the shards of one model in order. Its extents are numbered through all members.
States are kept by *rank*, an extent's position in the order in which readers visit the extents, so that `bytearray.find`
returns the next absent extent ahead of a reader. `charge` accounts an upper bound of each extent's bytes in the page cache:
everything that was sent in a reply or stored, and not invalidated since, whether or not the kernel has reclaimed it.

Every method expects the engine's lock to be held.
"""

from __future__ import annotations

import operator
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from llmcache.cache.loops import CursorTable, LoopLearner, LoopOrder, Pass
from llmcache.cache.shadow import Guard

if TYPE_CHECKING:
    from llmcache.model.tensors import LayerMap
    from llmcache.mount.backends.base import MemoryRegion
    from llmcache.mount.copies import Copied
    from llmcache.mount.engine.experts import MoeFile
    from llmcache.mount.vfs.backing import Backing, Identity

ABSENT, LOADING, READY, TOUCHED, PINNED, SINGLE, SPARSE = range(7)
"""SINGLE extents are read by pages, as requested (headers, embedding rows, small and written files). SPARSE ones are absent
and are fetched whole, but only on demand: no reader has touched them lately, or they were evicted untouched."""

MISSES_MAX = 3
SETTLED_PASSES = 1  # passes until misses count as readers that fall behind; earlier ones only show that the order is unknown
WRITTEN_EXTENTS_MAX = 1 << 14  # of a written file, whose extents only serve to find pages to invalidate
RECENT_EXTENTS, RECENT_REQUESTS = 8, 16  # looked at to distinguish sequential readers from readers of single rows
REACH_BYTES = 64 << 20  # readers nearer than this share one cursor
READERS_MAX, _SEVERAL = 256, -1  # readers in `LoopSpace.only_extents`; the value of one that has touched several extents


@dataclass(eq=False)
class SpaceFile:
    """One file of a space: its extents are `base` .. `base + count - 1`."""

    path: str
    size_bytes: int
    base: int
    count: int
    backing: Backing | None = None
    identity: Identity | None = None
    node: int | None = None  # inode number in the mount; None until the pin helper has reported it
    attaching: bool = False  # the pin helper is opening the file, or old pages are being dropped
    loads: int = 0  # reads of the file by fetches under way
    file_id: int = -1  # in the access log
    anatomy: LayerMap | None = None  # of a model
    repacked_bytes: int = 0  # of tensors that llama.cpp copies into memory of its own
    moe: MoeFile | None = None  # the experts of an MoE model, while they are steered
    tensors: array[int] = field(default_factory=lambda: array("Q"))  # first byte and end of each, in file order

    @property
    def reachable(self) -> bool:
        """True if the file is open and its node is known, so that extents can be read and stored."""
        return self.backing is not None and self.node is not None and not self.attaching


@dataclass(eq=False)
class Fetch:
    """A read of one whole extent from storage. `done` is set once the data is in memory, or `error` is set."""

    extent: int
    length: int
    ahead: bool  # claimed by a loader, not by a reader
    backing: Backing | None = None
    charged: int = 0  # bytes of the extent that were accounted before
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None
    users: int = 1  # threads that use the buffer
    joined: bool = False  # a reader waits for it, or has read from it
    judged: bool = False  # a reader has used it, and was counted as in time or late
    stale: bool = False  # the space has ended or the file has changed: the data is not used
    held: bool = False  # the arena had the extent
    keep: bool = False  # the arena pins the extent
    buffer: MemoryRegion | None = None  # of the pool; the last user returns it


class Tripwire(NamedTuple):
    """The first page of an extent that was stored without it, so that the first touch sends a request.

    `held`: the arena had the extent.
    """

    page: bytes
    held: bool


@dataclass
class PassEvidence:
    """What `evidence.Judge` records about a space from one pass to the next."""

    guard: Guard | None = None
    used_bytes: array[int] | None = None  # by extent: estimate of the bytes that clients use, from the tensors in use
    lru_bytes: int = 0  # bytes that LRU would have read
    missing_bytes: float = 0.0  # bytes a pass that the shadow LRU misses; measured while left
    window_passes: int = 1  # passes in the last comparison
    passes: int = 0  # ended since the last comparison
    ended_ns: int = 0  # when the last pass ended
    seen_read_bytes: int = 0  # bytes read until the end of the last pass
    judged_lru_bytes: int = 0  # `lru_bytes` at the last comparison
    judged_read_bytes: int = 0  # bytes read until the last comparison
    steered_bytes: int = 0  # bytes a pass that steering read when the space was left to the kernel
    tried_bytes: int | None = None  # the same, during a trial of the kernel
    trial_pass: int = 0  # first pass that may begin the next trial
    trial_gap: int = 0  # passes from one trial to the next
    unused: int = -1  # number of unused extents when a trial was last considered
    pins_due_ns: int = 0  # time of the next exposure, or of its evaluation, of a loop that is pinned whole
    pins_gap_ns: int = 0  # from one exposure to the next, once the loop was seen in use
    pins_doubted: bool = False  # the last exposure left some pins untouched
    exposed: set[int] = field(default_factory=set)  # resident extents whose next touch will be observed
    exposed_pass: int = 0  # the pass in which they were exposed
    exposure_gap: int = 1  # least number of passes from one exposure to the next


class LoopSpace:
    """State of one loop space."""

    def __init__(self, key: str, members: list[SpaceFile], extent_bytes: int) -> None:
        self.key = key
        self.members = members
        self.extent_bytes = extent_bytes
        self.count = sum(member.count for member in members)
        self.size_bytes = sum(member.size_bytes for member in members)
        self.learner = LoopLearner(self.count)
        self.order = self.learner.order
        self.use = self.learner.use
        self.thin = bytearray(self.count)  # by extent: 1 if clients use so little of it that it is to be read by pages
        self.left = False  # left to the kernel, because LRU reads less: nothing is pinned, fetched ahead or evicted
        self.read_bytes = 0  # bytes read from storage (FUSE)
        self.evidence = PassEvidence()
        self.status = bytearray(self.count)
        self.accounted_bytes = array(
            "L", bytes(array("L").itemsize * self.count)
        )  # by extent: accounted bytes in the page cache
        self.seen_ns = array("Q", bytes(8 * self.count))  # by extent: time of the last touch or request; 0: none yet
        self.wanted = bytearray(self.count)  # by extent: 1 if the plan pins it
        self.unlockable: dict[int, int] = {}  # extents charged to a client's cgroup -> time until which they are not locked
        self.loading: dict[int, Fetch] = {}
        self.trips: dict[int, Tripwire] = {}
        self.ready: dict[int, int] = {}  # extent -> time when it was stored ahead of its reader, oldest first
        self.touched: dict[int, int] = {}  # extent -> time of its last touch, oldest first
        self.partial_extents: dict[int, int] = {}  # extents in the page cache in part -> time of the last read, oldest first
        self.refaults: dict[int, int] = {}  # extent -> requests for pages of it that the kernel had reclaimed
        self.missed: dict[int, int] = {}  # extent -> times that it was fetched ahead and evicted untouched
        self.hot: set[int] = set()  # single-page extents with a reserved share of the budget (headers, small files)
        self.alive = True
        self.user_pinned = False  # matches --pin: pinned before all other spaces, open or not
        self.warm = False  # populated by a warm-up and not used since: stays cached although no client has it open
        self.written = False  # open for writing: only the kernel fills its pages
        self.paged = False  # too large, or no room for its extents: read by pages, and cached like rows of a table
        self.lacks_extents = 0  # number of extents that found no room in a table; 0 if they have room
        self.window_bytes = 0
        self.pinned_bytes = 0
        self.recent: deque[int] = deque(maxlen=RECENT_EXTENTS)  # extents that were touched last
        self.request_ends: deque[tuple[SpaceFile, int]] = deque(maxlen=RECENT_REQUESTS)  # where requests ended (FUSE)
        self.last_ns = 0  # time of the last touch, open or close
        self.sequential_ns = 0  # when a request last continued where another had ended (FUSE)
        self.opened_ns = 0  # when a client last opened one of its files
        self.convoy = 0  # steps by which the window is widened, because readers drift apart
        self.together_ns = 0  # when there was last at most one reader
        self.apart_ns = -(1 << 62)  # when the window was last widened or narrowed for several readers
        self.listed_open = False  # True if the references were last given an "open" event, not a "close"
        self.last_pid = 0  # process or thread of the last reader
        self.names_version = 0  # version of the names by which its files were found
        self.copied: Copied | None = None  # set if the last reader copied the weights instead of reading them again
        self.only_extents: dict[int, int] = {}  # by reader: the extent that it has touched, or _SEVERAL
        self.cursors = CursorTable(self.count, REACH_BYTES // extent_bytes, False)

    @property
    def looping(self) -> bool:
        """True if a header's guess or a second pass says that the extents are read repeatedly."""
        return self.learner.looping

    @property
    def inode(self) -> int:
        """Inode number, for log lines, of its first file that a client has opened; 0 if there is none."""
        return next((member.identity.ino for member in self.members if member.identity is not None), 0)

    @property
    def loop_bytes(self) -> int:
        """Bytes that take part in the loop: all but single-page and unused extents; 0 if nothing loops."""
        if not self.looping:
            return 0
        left_out = self.status.count(SINGLE) + self.use.unused.count(1) + self._thin_in_loop()
        return max(0, self.size_bytes - left_out * self.extent_bytes)

    def _thin_in_loop(self) -> int:
        """Return how many thin extents are not SINGLE yet."""
        if 1 not in self.thin:
            return 0
        return sum(
            state != SINGLE and self.thin[extent] for extent, state in zip(self.order.extent_at, self.status, strict=True)
        )

    @property
    def kept_whole(self) -> bool:
        """True if the plan pins everything that takes part in the loop."""
        return self.looping and self.wanted.count(1) * self.extent_bytes >= self.loop_bytes

    def member_of(self, extent: int) -> SpaceFile:
        """Return the file that `extent` belongs to."""
        if extent >= self.count:
            raise ValueError(f"extent {extent} is outside the group")
        return self.members[bisect_right(self.members, extent, key=operator.attrgetter("base")) - 1]

    def offset_of(self, member: SpaceFile, extent: int) -> int:
        """Return the byte offset of `extent` in its file."""
        return (extent - member.base) * self.extent_bytes

    def length_of(self, member: SpaceFile, extent: int) -> int:
        """Return the bytes of `extent`: fewer at the end of a file, and 0 beyond it after a truncation."""
        return max(0, min(self.extent_bytes, member.size_bytes - self.offset_of(member, extent)))

    def state(self, extent: int) -> int:
        """Return the state of `extent`."""
        return self.status[self.order.rank_of[extent]]

    def set_state(self, extent: int, state: int) -> None:
        """Set the state of `extent`."""
        self.status[self.order.rank_of[extent]] = state

    def set_predicted_order(self, guess: Iterable[int]) -> None:
        """Mark the space as a loop that visits the extents in the order of `guess`, which a header suggests."""
        self.learner.set_predicted_order(guess)
        self.cursors.loops = True  # from now on they wrap round

    def record_access(self, extent: int, now_ns: int, missed: bool, pid: int = 0) -> Pass | None:
        """Record that a reader touched `extent`; return the pass that this ends, if any. `pid`: its process or thread."""
        self.last_ns = self.seen_ns[extent] = now_ns
        if pid and self._is_peek(extent, pid):
            return None
        if not self.use.unused[extent] or self.continues(extent):  # a row of a table is not a reader's position
            self.cursors.record_access(self.order.rank_of[extent], now_ns, missed)
        if not self.recent or self.recent[-1] != extent:
            self.recent.append(extent)
        return self.learner.record_access(extent, now_ns)

    def _is_peek(self, extent: int, pid: int) -> bool:
        """Return True while `extent` is the only one that `pid` has touched: it has read the header, which is not a pass."""
        only = self.only_extents.get(pid)
        if only is None:
            if len(self.only_extents) >= READERS_MAX:
                del self.only_extents[next(iter(self.only_extents))]
            self.only_extents[pid] = extent
        elif only != extent:
            self.only_extents[pid] = _SEVERAL
        return only is None or only == extent

    def continues(self, extent: int) -> bool:
        """Return True if a reader has just touched the two extents before `extent`, by offset or by rank."""
        rank, recent = self.order.rank_of[extent], self.recent
        is_next_by_offset = extent - 1 in recent and extent - 2 in recent
        return is_next_by_offset or (
            rank > 1 and self.order.extent_at[rank - 1] in recent and self.order.extent_at[rank - 2] in recent
        )

    def learn(self, done: Pass) -> bool:
        """Learn from a completed pass; return True if class or order changed, so that a new plan is due."""
        visible = self.count - self.status.count(PINNED) - self.status.count(SINGLE)
        visible -= self.use.unused.count(1) if self.looping else 0
        lesson = self.learner.learn(done, visible)
        self.cursors.loops = self.looping
        if lesson.old_ranks is not None:
            self.status = bytearray(self.status[old] for old in lesson.old_ranks)
            self.cursors.reset()
        return lesson.changed

    def next_absent(self, head: int, span: int) -> int | None:
        """Return the first absent extent within `span` ranks after rank `head`, wrapping round in a loop."""
        end = min(head + 1 + span, self.count)
        rank = self.status.find(ABSENT, head + 1, end)
        if rank < 0 and self.looping:
            rank = self.status.find(ABSENT, 0, max(0, min(head + 1 + span - self.count, head)))
        return self.order.extent_at[rank] if rank >= 0 else None

    def waiting(self, head: int, rank: int) -> int:
        """Return how many extents between the ranks `head` and `rank`, wrapping round, are loading or ready."""
        if rank > head:
            part: Iterable[bytes | bytearray] = (self.status[head + 1 : rank],)
        else:
            part = (self.status[head + 1 :], self.status[:rank])
        return sum(piece.count(LOADING) + piece.count(READY) for piece in part)

    def touch(self, extent: int, now_ns: int) -> None:
        """Set a resident extent to TOUCHED, as the most recent one."""
        self.set_state(extent, TOUCHED)
        for table in (self.trips, self.ready, self.touched):
            table.pop(extent, None)
        self.touched[extent] = now_ns

    def cancel(self, extent: int) -> None:
        """Make a fetch of `extent` under way stale, if there is one."""
        fetch = self.loading.pop(extent, None)
        if fetch is not None:
            fetch.stale = True
            self.set_state(extent, ABSENT)

    def grow(self, size_bytes: int) -> None:
        """Add extents for a written file that has grown. Such a space has one member."""
        member = self.members[0]
        member.size_bytes = self.size_bytes = size_bytes
        if size_bytes > self.extent_bytes * WRITTEN_EXTENTS_MAX:
            self._coarsen(-(-2 * size_bytes // (self.extent_bytes * WRITTEN_EXTENTS_MAX)))
        more = max(1, -(-size_bytes // self.extent_bytes)) - self.count
        if more > 0:
            self.status.extend(bytes([SINGLE]) * more)
            self.wanted.extend(bytes(more))
            self.accounted_bytes.extend([0] * more)
            self.seen_ns.extend([0] * more)
            self.count = member.count = self.count + more
            self.order.extend(self.count)
            self.use.resize(self.count)
            self.thin.extend(bytes(more))
            self.cursors.count = self.count

    def _coarsen(self, factor: int) -> None:
        """Merge each `factor` extents into one. All are SINGLE, and their pages stay in the page cache."""
        self.extent_bytes *= factor
        self.count = self.members[0].count = self.cursors.count = -(-self.count // factor)
        self.status, self.wanted = bytearray([SINGLE]) * self.count, bytearray(self.count)
        self.accounted_bytes = array(
            "L", (sum(self.accounted_bytes[at * factor : (at + 1) * factor]) for at in range(self.count))
        )
        self.seen_ns = array("Q", (max(self.seen_ns[at * factor : (at + 1) * factor]) for at in range(self.count)))
        self.order = self.learner.order = LoopOrder(self.count)
        self.use.resize(self.count)
        self.thin = bytearray(self.count)
        strays, self.partial_extents = self.partial_extents, {}
        for extent, since in strays.items():
            self.partial_extents.pop(extent // factor, None)
            self.partial_extents[extent // factor] = since

    def forget(self, extent: int) -> int:
        """Make `extent` absent (SINGLE stays SINGLE); return the bytes that were accounted for it."""
        if self.state(extent) == READY:
            self.missed[extent] = self.missed.get(extent, 0) + 1
        if self.state(extent) != SINGLE:
            if self.state(extent) == TOUCHED:
                self.use.excuse((extent,))
            is_sparse = self.missed.get(extent, 0) >= MISSES_MAX or self.use.unused[extent]
            self.set_state(extent, SINGLE if self.thin[extent] else SPARSE if is_sparse else ABSENT)
        for table in (self.trips, self.ready, self.touched, self.partial_extents, self.refaults):
            table.pop(extent, None)
        charged = self.accounted_bytes[extent]
        self.accounted_bytes[extent] = 0
        return charged

    def charged_extents(self) -> Iterator[int]:
        """Yield the extents that may have pages in the page cache."""
        return (extent for extent, charged in enumerate(self.accounted_bytes) if charged)
