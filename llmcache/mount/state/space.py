"""Loop spaces as a mount has them: files, extents and their states, readers, and the experts of MoE models.

States are kept by *rank*, an extent's position in the order in which readers visit the extents, so that `bytearray.find`
returns the next absent extent ahead of a reader. Only the methods of `LoopSpace` change them, and only
`accounting.Accounting` changes the accounted bytes. Every method expects the engine's lock.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmcache.cache.arbitration import ROWS_RESERVE_BYTES
from llmcache.cache.loops import CursorTable, LoopLearner, Pass
from llmcache.cache.shadow import Guard
from llmcache.cache.space import Space
from llmcache.model.tensors import Experts, LayerMap
from llmcache.mount.copies import Copied
from llmcache.mount.source.backing import Backing, Identity
from llmcache.mount.state.buffers import MemoryRegion
from llmcache.units import BLOCK_BYTES, PAGE_BYTES

ABSENT, LOADING, READY, TOUCHED, PINNED, SINGLE, SPARSE = range(7)
"""SINGLE extents are read by pages, as requested (headers, embedding rows, small and written files). SPARSE ones are absent
and are fetched whole, but only on demand: no reader has touched them lately, or they were evicted untouched."""

MISSES_MAX = 3
FAILED = 1 << 20  # value of `LoopSpace.missed` for an extent that could not be read: it is never fetched ahead again
WRITTEN_EXTENTS_MAX = 1 << 14  # of a written file, whose extents only serve to find pages to invalidate
RECENT_EXTENTS, RECENT_REQUESTS = 8, 16  # looked at to distinguish sequential readers from readers of single rows
REACH_BYTES = 64 << 20  # readers nearer than this share one cursor
SWEEP = 3  # a visit of a layer that misses more than this multiple of a token's experts belongs to a prompt
UNKNOWN_SHARE, UNKNOWN_LEAST = 4, 8  # if that number is unknown: a quarter of the layer's experts, but at least 8
WINDOW_BYTES = 128 << 10  # readahead of the kernel over FUSE; twice that after POSIX_FADV_SEQUENTIAL (llama.cpp)
# Readahead behind a slice may arrive until COMING_NS after the slice. If it has requested a range, another request for the
# range within AGAIN_NS comes from a client.
COMING_NS, AGAIN_NS = 10_000_000, 100_000_000
AHEAD_REACHES = 4  # a fault near the end of a slice makes the kernel read ahead up to this multiple of its reach
_RESIDENT = bytes(state == TOUCHED for state in range(256))
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
        return self.backing is not None and self.node is not None and not self.attaching


@dataclass(eq=False)
class Fetch:
    """A read of one whole extent. `done` is set once the data is in memory, or `error` is set."""

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


@dataclass(eq=False)
class BufferFetch(Fetch):
    """A read into memory of this process: `region` contains the data once it is done.

    `replied`: (start, end) of the bytes sent to readers. `stored`: set once the rest is in the page cache. `load`: set for a
    piece of an expert; `extent` is then the expert's number.
    """

    region: MemoryRegion = field(kw_only=True)
    offset: int = field(kw_only=True)
    load: ExpertLoad | None = None
    stored: threading.Event = field(default_factory=threading.Event)
    replied: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class ExpertLoad:
    """A load of one expert over FUSE. `waiting`: (offset, bytes) to read; `loading`: fetches of the others."""

    waiting: list[tuple[int, int]]
    loading: list[BufferFetch] = field(default_factory=list)
    failed: bool = False


class Tripwire(NamedTuple):
    """The first page of an extent that was stored without it. `held`: the arena had the extent."""

    page: bytes
    held: bool


@dataclass
class PassEvidence:
    """What `evidence.Judge` records about a space."""

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


class SpaceQueue:
    """Spaces with extents of one kind to evict: closed spaces first, then the least recently used."""

    def __init__(self, has_any: Callable[[LoopSpace], object]) -> None:
        self._has_any = has_any
        self._closed: dict[LoopSpace, None] = {}
        self._open: dict[LoopSpace, None] = {}

    def use(self, space: LoopSpace) -> None:
        spaces = self._open if space.open else self._closed
        spaces.pop(space, None)
        spaces[space] = None

    def move(self, space: LoopSpace) -> None:
        if space in self._open or space in self._closed:
            self.remove(space)
            self.use(space)

    def remove(self, space: LoopSpace) -> None:
        self._open.pop(space, None)
        self._closed.pop(space, None)

    def __iter__(self) -> Iterator[LoopSpace]:
        for spaces in (self._closed, self._open):
            empty: list[LoopSpace] = []
            try:
                for space in spaces:
                    if self._has_any(space):
                        yield space
                    else:
                        empty.append(space)
            finally:
                for space in empty:
                    spaces.pop(space, None)


class SpaceIndex:
    """The spaces that a thread may have work with."""

    def __init__(self) -> None:
        self.read: dict[LoopSpace, None] = {}  # readers have a position in them, or had one until now
        self.looping: dict[LoopSpace, None] = {}
        self.lacking: dict[LoopSpace, None] = {}  # read by pages, because they found no room for their extents
        self.touched = SpaceQueue(lambda space: space.touched and not space.looping)
        self.ready = SpaceQueue(lambda space: space.ready)
        self.partial = SpaceQueue(lambda space: space.partial_extents)
        self.many_partial = SpaceQueue(lambda space: space.partial_extents and space.resident_bytes > ROWS_RESERVE_BYTES)
        self.written = SpaceQueue(lambda space: space.partial_extents)

    @property
    def _queues(self) -> tuple[SpaceQueue, ...]:
        return self.touched, self.ready, self.partial, self.many_partial, self.written

    def move(self, space: LoopSpace) -> None:
        for queue in self._queues:
            queue.move(space)

    def remove(self, space: LoopSpace) -> None:
        for spaces in (self.read, self.looping, self.lacking):
            spaces.pop(space, None)
        for queue in self._queues:
            queue.remove(space)


class LoopSpace(Space):
    """A loop space with its files, and the state of its extents.

    `learner` learns from the fetches in mode arena, because the access log contains those, otherwise from touches.
    """

    def __init__(
        self,
        key: str,
        members: Iterable[SpaceFile],
        extent_bytes: int,
        kind: str = "loop",
        index: SpaceIndex | None = None,
        *,
        is_arena: bool = False,
    ) -> None:
        """`kind`: "loop"; "hot" (small); "written"; or "paged": too large, or no room for its extents. See `Space`."""
        self.members = tuple(members)
        super().__init__(key, extent_bytes, self.members, kind)
        self.index = index or SpaceIndex()
        self.is_arena = is_arena
        self.touches = LoopLearner(self.count) if is_arena else self.learner
        self.order, self.use = self.touches.order, self.touches.use
        self.open = False
        self.status = bytearray([ABSENT if kind == "loop" else SINGLE]) * self.count
        self.accounted_bytes = array("L", bytes(array("L").itemsize * self.count))  # by extent, in the page cache
        self.resident_bytes = self.hot_bytes = 0  # their sum, and that of hot extents
        self.pinned_bytes = 0  # locked in the page cache, or in the arena
        self.seen_ns = array("Q", bytes(8 * self.count))  # by extent: time of the last touch or request; 0: none yet
        self.unlockable: dict[int, int] = {}  # extents charged to a client's cgroup -> time until which they are not locked
        self.loading: dict[int, Fetch] = {}
        self.trips: dict[int, Tripwire] = {}
        self.ready: dict[int, int] = {}  # extent -> time when it was stored ahead of its reader, oldest first
        self.touched: dict[int, int] = {}  # extent -> time of its last touch, oldest first
        self.partial_extents: dict[int, int] = {}  # extents in the page cache in part -> time of the last read, oldest first
        self.refaults: dict[int, int] = {}  # extent -> requests for pages of it that the kernel had reclaimed
        self.missed: dict[int, int] = {}  # extent -> times that it was fetched ahead and evicted untouched
        self.thin: set[int] = set()  # to become SINGLE once no fetch of them is under way: clients use little of them
        self.alive = True
        self.warm = False  # populated by a warm-up and not used since: stays cached although no client has it open
        self.lacks_extents = 0  # number of extents that found no room in a table; 0 if they have room
        self.read_bytes = 0  # bytes read from storage (FUSE)
        self.evidence = PassEvidence()
        self.recent: deque[int] = deque(maxlen=RECENT_EXTENTS)  # extents that were touched last
        self.request_ends: deque[tuple[SpaceFile, int]] = deque(maxlen=RECENT_REQUESTS)  # where requests ended (FUSE)
        self.last_ns = 0  # time of the last touch, open or close
        self.sequential_ns = 0  # when a request last continued where another had ended (FUSE)
        self.opened_ns = 0  # when a client last opened one of its files
        self.together_ns = 0  # when there was last at most one reader
        self.apart_ns = -(1 << 62)  # when the window was last widened or narrowed for several readers
        self.last_pid = 0  # process or thread of the last reader
        self.names_version = 0  # version of the names by which its files were found
        self.copied: Copied | None = None  # set if the last reader copied the weights instead of reading them again
        self.only_extents: dict[int, int] = {}  # by reader: the extent that it has touched, or _SEVERAL
        self.cursors = CursorTable(self.count, REACH_BYTES // extent_bytes, False)

    # Facts

    @property
    def looping(self) -> bool:
        return self.touches.looping

    @property
    def written(self) -> bool:
        return self.kind == "written"

    @property
    def paged(self) -> bool:
        """True if it is too large or finds no room."""
        return self.kind == "paged"

    @property
    def inode(self) -> int:
        return next((member.identity.ino for member in self.members if member.identity is not None), 0)

    @property
    def has_experts(self) -> bool:
        return any(member.moe is not None for member in self.members)

    @property
    def used_loop_bytes(self) -> int:
        return self.bytes_in_loop(self.touches)

    @property
    def kept_whole(self) -> bool:
        return self.looping and not self.is_arena and self.plan.extents > 0 and not self.plan.streamed

    def member_of(self, extent: int) -> SpaceFile:
        return self.members[bisect_right(self.members, extent, key=_base) - 1] if len(self.members) > 1 else self.members[0]

    def offset_of(self, member: SpaceFile, extent: int) -> int:
        return (extent - member.base) * self.extent_bytes

    def length_of(self, member: SpaceFile, extent: int) -> int:
        return max(0, min(self.extent_bytes, member.size_bytes - self.offset_of(member, extent)))

    def ranges(self, extents: Iterable[int]) -> list[tuple[SpaceFile, int, int]]:
        merged: list[tuple[SpaceFile, int, int]] = []
        for extent in sorted(extents):
            member = self.member_of(extent)
            offset, length = self.offset_of(member, extent), self.length_of(member, extent)
            if merged and merged[-1][0] is member and merged[-1][1] + merged[-1][2] == offset:
                merged[-1] = (member, merged[-1][1], merged[-1][2] + length)
            else:
                merged.append((member, offset, length))
        return merged

    def charged_extents(self) -> Iterator[int]:
        return (extent for extent, charged in enumerate(self.accounted_bytes) if charged)

    def in_state(self, state: int) -> list[int]:
        return [self.order.extent_at[rank] for rank, each in enumerate(self.status) if each == state]

    # Readers

    def set_predicted_order(self, guess: Iterable[int]) -> None:
        guess = list(guess)
        super().set_predicted_order(guess)
        if self.is_arena:
            self.touches.set_predicted_order(guess)
        self._set_looping()

    def _set_looping(self) -> None:
        if self.looping:
            self.cursors.loops = True  # from now on they wrap round
            if self.alive:
                self.index.looping[self] = None

    def record_open(self, now_ns: int) -> None:
        self.last_ns = self.opened_ns = now_ns

    def record_close(self, now_ns: int, *, by_warmup: bool) -> None:
        """After a client has used the file, nothing stays only because it was warmed up."""
        self.last_ns = now_ns
        self.warm = self.warm and by_warmup

    def record_pages(self, extent: int, now_ns: int) -> None:
        self.last_ns = self.seen_ns[extent] = now_ns

    def record_access(self, extent: int, now_ns: int, missed: bool, pid: int = 0) -> Pass | None:
        """Return the pass that this ends, if any. `pid`: the reader's process or thread."""
        self.last_ns = self.seen_ns[extent] = now_ns
        if pid and self._is_peek(extent, pid):
            return None
        if not self.use.unused[extent] or self.continues(extent):  # a row of a table is not a reader's position
            self.cursors.record_access(self.order.rank_of[extent], now_ns, missed)
            if self.alive and self not in self.index.read:
                self.index.read[self] = None
                self.together_ns = now_ns
        if not self.recent or self.recent[-1] != extent:
            self.recent.append(extent)
        return self.touches.record_access(extent, now_ns)

    def _is_peek(self, extent: int, pid: int) -> bool:
        """Return True while `pid` may only have read the header."""
        only = self.only_extents.get(pid)
        if only is None:
            if len(self.only_extents) >= READERS_MAX:
                del self.only_extents[next(iter(self.only_extents))]
            self.only_extents[pid] = extent
        elif only != extent:
            self.only_extents[pid] = _SEVERAL
        return only is None or only == extent

    def continues(self, extent: int) -> bool:
        rank, recent = self.order.rank_of[extent], self.recent
        is_next_by_offset = extent - 1 in recent and extent - 2 in recent
        return is_next_by_offset or (
            rank > 1 and self.order.extent_at[rank - 1] in recent and self.order.extent_at[rank - 2] in recent
        )

    def learn(self, done: Pass) -> bool:
        visible = self.count - self.status.count(PINNED) - self.status.count(SINGLE)
        visible -= self.use.unused.count(1) if self.looping else 0
        lesson = self.touches.learn(done, visible)
        self._set_looping()
        if lesson.old_ranks is not None:
            self.status = bytearray(self.status[old] for old in lesson.old_ranks)
            self.cursors.reset()
        return lesson.changed

    def follow_plan(self) -> None:
        near, self.cursors.step = self.plan.convoy(self.extent_bytes)
        self.cursors.near = min(self.cursors.reach, near)
        if not self.is_arena:
            self.touches.expect(self.plan.streamed)

    def next_absent(self, head: int, span: int) -> int | None:
        """Return the first absent extent within `span` ranks after `head`."""
        end = min(head + 1 + span, self.count)
        rank = self.status.find(ABSENT, head + 1, end)
        if rank < 0 and self.looping:
            rank = self.status.find(ABSENT, 0, max(0, min(head + 1 + span - self.count, head)))
        return self.order.extent_at[rank] if rank >= 0 else None

    def waiting(self, head: int, rank: int) -> int:
        if rank > head:
            part: Iterable[bytes | bytearray] = (self.status[head + 1 : rank],)
        else:
            part = (self.status[head + 1 :], self.status[:rank])
        return sum(piece.count(LOADING) + piece.count(READY) for piece in part)

    # States of extents

    def state(self, extent: int) -> int:
        return self.status[self.order.rank_of[extent]]

    def set_state(self, extent: int, state: int) -> None:
        self.status[self.order.rank_of[extent]] = state

    def begin_load(self, fetch: Fetch) -> None:
        self.loading[fetch.extent] = fetch
        self.partial_extents.pop(fetch.extent, None)
        self.touched.pop(fetch.extent, None)
        self.set_state(fetch.extent, LOADING)

    def make_ready(self, extent: int, now_ns: int, trip: Tripwire | None = None) -> None:
        self.loading.pop(extent, None)
        self.set_state(extent, READY)
        self.ready[extent] = now_ns
        if trip is not None:
            self.trips[extent] = trip
        self.index.ready.use(self)

    def touch(self, extent: int, now_ns: int) -> None:
        self.loading.pop(extent, None)
        self.set_state(extent, TOUCHED)
        for table in (self.trips, self.ready, self.touched):
            table.pop(extent, None)
        self.touched[extent] = now_ns
        if self.alive and not self.looping:
            self.index.touched.use(self)

    def make_partial(self, extent: int, now_ns: int) -> None:
        self.partial_extents.pop(extent, None)
        self.partial_extents[extent] = now_ns
        if not self.alive:
            return
        (self.index.written if self.written else self.index.partial).use(self)
        if self.resident_bytes > ROWS_RESERVE_BYTES and not self.written:
            self.index.many_partial.use(self)

    def fail_load(self, extent: int, now_ns: int, *, for_good: bool) -> None:
        """Make an extent absent, and (`for_good`) never fetch it ahead again."""
        self.loading.pop(extent, None)
        if for_good:
            self.missed[extent] = FAILED
        self.set_state(extent, SPARSE if self.missed.get(extent, 0) else ABSENT)
        if self.accounted_bytes[extent]:  # pages that were stored must be evicted some time
            self.make_partial(extent, now_ns)

    def make_single(self, extents: Iterable[int]) -> None:
        """Have extents read by pages once they are not resident or loading."""
        extents = list(extents)
        super().make_single(extents)
        unused, rank_of, status = self.use.unused, self.order.rank_of, self.status
        for extent in extents:
            unused[extent] = 0
            rank = rank_of[extent]
            if status[rank] in (ABSENT, SPARSE):
                status[rank] = SINGLE
            elif status[rank] != SINGLE:
                self.thin.add(extent)
        self.thin = {extent for extent in self.thin if self.state(extent) != SINGLE}

    def cancel(self, extent: int) -> None:
        fetch = self.loading.pop(extent, None)
        if fetch is not None:
            fetch.stale = True
            self.set_state(extent, ABSENT)

    def reclaimed(self, extent: int, now_ns: int) -> None:
        self.refaults.pop(extent, None)
        self.touched.pop(extent, None)
        self.set_state(extent, ABSENT)
        self.make_partial(extent, now_ns)

    def pin(self, extent: int) -> None:
        self.set_state(extent, PINNED)
        for table in (self.trips, self.ready, self.touched):
            table.pop(extent, None)

    def forget(self, extent: int) -> None:
        """SINGLE stays SINGLE. Called by `Accounting`."""
        if self.state(extent) == READY:
            self.missed[extent] = self.missed.get(extent, 0) + 1
        if self.state(extent) != SINGLE:
            if self.state(extent) == TOUCHED:
                self.use.excuse((extent,))
            is_sparse = self.missed.get(extent, 0) >= MISSES_MAX or self.use.unused[extent]
            self.set_state(extent, SINGLE if extent in self.thin else SPARSE if is_sparse else ABSENT)
            self.thin.discard(extent)
        for table in (self.trips, self.ready, self.touched, self.partial_extents, self.refaults):
            table.pop(extent, None)

    def truncate(self, size_bytes: int) -> None:
        """The number of extents must not change."""
        self.members[0].size_bytes = size_bytes
        self.size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def grow(self, size_bytes: int) -> None:
        self.truncate(size_bytes)
        if size_bytes > self.extent_bytes * WRITTEN_EXTENTS_MAX:
            self._coarsen(-(-2 * size_bytes // (self.extent_bytes * WRITTEN_EXTENTS_MAX)))
        more = max(1, -(-size_bytes // self.extent_bytes)) - self.count
        if more > 0:
            self.accounted_bytes.extend([0] * more)
            self.seen_ns.extend([0] * more)
            self._resize(self.count + more)

    def _resize(self, count: int) -> None:
        self.resize(count)
        if self.is_arena:
            self.touches.resize(count)
        self.members[0].count = self.cursors.count = count
        self.status = bytearray([SINGLE]) * count

    def _coarsen(self, factor: int) -> None:
        self.extent_bytes *= factor
        count = -(-self.count // factor)
        slices = [slice(at * factor, (at + 1) * factor) for at in range(count)]
        self.accounted_bytes = array("L", (sum(self.accounted_bytes[part]) for part in slices))
        self.seen_ns = array("Q", (max(self.seen_ns[part]) for part in slices))
        self._resize(count)
        partial, self.partial_extents = self.partial_extents, {}
        for extent, since_ns in partial.items():
            self.partial_extents.pop(extent // factor, None)
            self.partial_extents[extent // factor] = since_ns


def _base(member: SpaceFile) -> int:
    return member.base


class MoeFile:
    """The experts of one open file, each ABSENT, LOADING or TOUCHED. Expert n has the key `first` + n in `ExpertCache`.

    - `alone`: the experts are left to the kernel; all are ABSENT.
    - `fresh`: experts just loaded or requested, whose next sample does not count.
    - `loads`: over FUSE, loads of the experts that are LOADING.
    - `trips`: over FUSE, resident experts with a dropped page, and the (round, layer) of their next use.
    - `pages`: over FUSE, the content of that page, for the reply.
    - `came_ns`: when a resident expert was loaded.
    - `read_on`: slices that kernel readahead has requested: (time, first byte, end).
    """

    def __init__(self, space: LoopSpace, member: SpaceFile, layout: Experts, first: int) -> None:
        self.space, self.member, self.layout, self.first = space, member, layout, first
        self.states = bytearray(layout.count)
        self.probes, self.sizes = array("Q"), array("Q")  # by expert: offset of the sampled page, and bytes of `ranges`
        for ranges in map(self.ranges, range(layout.count)):
            # In the middle of a slice: the kernel maps pages around a fault in the next slice, but not this far.
            offset, length = ranges[0] if ranges else (0, 0)
            self.probes.append((offset + length // 2) // PAGE_BYTES * PAGE_BYTES)
            self.sizes.append(sum(length for _, length in ranges))
        self.layer = (0, 0)  # the experts of the layer being computed: first, and end
        self.rounds = 0  # how often the first layers were computed again: an estimate of the tokens
        self.seen, self.caught_up = 0, 0  # uses counted since the last `catch_up`, and the round of that call
        self.visit, self.last = 0, 0  # misses in this visit of the layer, and the last expert missed
        self.sweeping = False  # a prompt is being computed
        self.window = WINDOW_BYTES
        self.loads: dict[int, ExpertLoad] = {}
        self.alone = False
        self.fresh: set[int] = set()
        self.trips: dict[int, tuple[int, int]] = {}
        self.pages: dict[int, bytes] = {}
        self.refaults: dict[int, int] = {}
        self.came_ns: dict[int, int] = {}
        self.read_on: dict[int, tuple[int, int, int]] = {}

    @property
    def kept(self) -> list[int]:
        return list(itertools.compress(range(len(self.states)), self.states.translate(_RESIDENT)))

    def sweeps(self, expert: int) -> bool:
        """Record a miss; return True if the layer has missed enough experts for a prompt."""
        self.reach(expert)
        count = self.layer[1] - self.layer[0]
        self.visit, self.last = 1 if expert < self.last else self.visit + 1, expert
        most = SWEEP * self.layout.used if self.layout.used else max(UNKNOWN_LEAST, count // UNKNOWN_SHARE)
        self.sweeping = self.visit > min(most, count - 1)
        return self.sweeping

    def reach(self, expert: int) -> None:
        _, first, count = self.layout.layer_of(expert)
        if self.layer != (first, first + count):
            self.rounds += first < self.layer[0]
            self.layer, self.visit = (first, first + count), 0

    def trip(self, expert: int) -> None:
        first = self.layout.layer_of(expert)[1]
        self.trips[expert] = self.rounds + (first <= self.layer[0]), first

    def unused(self) -> Iterator[int]:
        """Yield the experts whose layer was computed without a request for their dropped page."""
        now = self.rounds, self.layer[0]
        return (expert for expert, then in self.trips.items() if then < now and not self.computes(expert))

    def computes(self, expert: int) -> bool:
        """Return True for experts of the layer being computed; during a prompt, for those that it has not passed."""
        return (self.last if self.sweeping else self.layer[0]) <= expert < self.layer[1]

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        return [self._pages(start, start + size) for start, size in self.layout.ranges(expert)]

    def own(self, expert: int) -> list[tuple[int, int]]:
        """Return `ranges` without pages that hold data of others than absent experts."""
        parts: list[tuple[int, int]] = []
        for number in self.layout.slices[expert]:
            start = self.layout.starts[number]
            end = start + self.layout.sizes[number]
            low = start if self._is_absent(number - 1, start) else -(-start // PAGE_BYTES) * PAGE_BYTES
            high = end if self._is_absent(number + 1, end) else end // PAGE_BYTES * PAGE_BYTES
            offset, length = self._pages(low, high) if low < high else (low, 0)
            parts += [(offset, length)] if length else []
        return parts

    def _is_absent(self, number: int, edge: int) -> bool:
        if not 0 <= number < len(self.layout.starts):
            return False
        start, size = self.layout.starts[number], self.layout.sizes[number]
        return size >= PAGE_BYTES and edge in (start, start + size) and self.states[self.layout.expert_of[number]] == ABSENT

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        size, base = self.space.extent_bytes, self.member.base
        start = start // PAGE_BYTES * PAGE_BYTES
        if self.space.state(base + start // size) != SINGLE:
            start = (start // size + 1) * size
        if end % size and self.space.state(base + end // size) != SINGLE:
            end = end // size * size
        return start, max(0, -(-end // PAGE_BYTES) * PAGE_BYTES - start)

    def slice_at(self, offset: int) -> int | None:
        number = bisect_right(self.layout.starts, offset) - 1
        if number < 0 or offset >= self.layout.starts[number] + self.layout.sizes[number]:
            return None
        return number if self.space.state(self.member.base + offset // self.space.extent_bytes) == SINGLE else None

    def reads_on(self, number: int, offset: int, size: int, now_ns: int) -> bool:
        """Return True if a request at the beginning of a slice is kernel readahead from the slice before.

        Kernel readahead requests a range once; a second request, or one that continues behind it, comes from a client.
        """
        if size > WINDOW_BYTES:
            self.window = 2 * WINDOW_BYTES
        previous = self.layout.expert_of[number - 1] if number else number
        coming = self.states[previous] == LOADING or now_ns - self.came_ns.get(previous, 0) < COMING_NS
        begins = offset - self.layout.starts[number] < min(self.window, self.layout.sizes[number] // 2)
        since_ns, first, end = self.read_on.pop(number, (0, offset, offset))
        if now_ns - since_ns > AGAIN_NS:
            first = end = offset
        if not number or self.sweeping or not coming or not begins or first <= offset < end:
            return False
        self.read_on[number] = now_ns, min(first, offset), max(end, offset + size)
        return True

    def neighbours(self, number: int, reach: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of absent experts that the kernel reads around faults, `reach` bytes before the slice."""
        layout = self.layout
        start, end = layout.starts[number], layout.starts[number] + layout.sizes[number]
        parts: list[tuple[int, int]] = []
        for first, last in ((start - reach, start), (end, end + AHEAD_REACHES * reach)):
            at = max(0, bisect_right(layout.starts, max(0, first)) - 1)
            while at < len(layout.starts) and layout.starts[at] < last:
                if self.states[layout.expert_of[at]] == ABSENT:
                    parts += self.inner(at, first, last)
                at += 1
        return parts

    def inner(self, number: int, first: int, end: int) -> list[tuple[int, int]]:
        """Leave out pages shared with other data."""
        start = self.layout.starts[number]
        low = -(-max(first, start) // PAGE_BYTES) * PAGE_BYTES
        high = min(end, start + self.layout.sizes[number]) // PAGE_BYTES * PAGE_BYTES
        offset, length = self._pages(low, high) if low < high else (low, 0)
        return [(offset, length)] if length else []

    def pages_of(self, number: int) -> tuple[int, int]:
        start = self.layout.starts[number]
        return self._pages(start, start + self.layout.sizes[number])

    def end_of(self, number: int) -> int:
        return sum(self.pages_of(number))

    def facts(self) -> dict[str, Any]:
        kept = self.kept
        return {
            "count": self.layout.count,
            "kept": len(kept),
            "kept_bytes": sum(map(self.sizes.__getitem__, kept)),
            "bytes": sum(self.layout.sizes),
            "alone": self.alone,
            "token": None,  # no longer measured
            "token_alone": None,
        }
