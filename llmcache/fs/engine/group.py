"""What the daemon knows of each extent: absent, loading, ready, touched or pinned.

A `Group` is one loop space: a file, or the shards of one model in a row. Its extents are numbered through all members.
States are kept by *rank* (place in the visiting order), so that "the next absent extent ahead of this reader" is one
`bytearray.find`. `charge` is an upper bound of what the kernel holds of each extent: everything that was replied to or
stored and not yet invalidated counts, whether or not the kernel has dropped it since.

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
    from llmcache.fs.backends.base import MemoryRegion
    from llmcache.fs.copies import Copied
    from llmcache.fs.engine.experts import Mixture
    from llmcache.fs.layout.tensors import Anatomy
    from llmcache.fs.vfs.backing import Backing, Identity

ABSENT, LOADING, READY, TOUCHED, PINNED, SINGLE, SPARSE = range(7)
"""SINGLE extents are read page by page as asked for (headers, embedding rows, small and written files); SPARSE ones are
absent and fetched whole, but only on demand: no reader has touched them lately, or they were dropped untouched."""

MISSES_MAX = 3
SETTLED_PASSES = 1  # until then misses say that the order is not known yet, and nothing about readers
WRITTEN_EXTENTS_MAX = 1 << 14  # of a file that is written: no one extent of it is more than a place to drop pages from
RECENT_EXTENTS, RECENT_REQUESTS = 8, 16  # that are looked at to tell a reader in order from one of single rows
REACH_BYTES = 64 << 20  # readers nearer than this share one cursor
READERS_MAX, _SEVERAL = 256, -1  # that are remembered; in place of an extent: more than one


@dataclass(eq=False)
class Member:
    """One file of a group: its extents are `base` .. `base + count - 1`."""

    path: str
    size_bytes: int
    base: int
    count: int
    backing: Backing | None = None
    identity: Identity | None = None
    node: int | None = None
    attaching: bool = False
    loads: int = 0  # reads of the backing file that fetches have under way
    file_id: int = -1  # in the access log
    anatomy: Anatomy | None = None  # of a model
    repacked_bytes: int = 0  # of tensors that llama.cpp copies
    mixture: Mixture | None = None  # of experts, where they are steered
    tensors: array[int] = field(default_factory=lambda: array("Q"))  # first byte and end of each, in file order

    @property
    def reachable(self) -> bool:
        """True when the file is open and its node in the kernel is known: it can be read and stored."""
        return self.backing is not None and self.node is not None and not self.attaching


@dataclass(eq=False)
class Fetch:
    """One whole extent on its way from storage; `done` is set when it is there or `error` is set."""

    extent: int
    length: int
    ahead: bool
    backing: Backing | None = None
    charged: int = 0  # bytes of the extent that were charged before
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None
    users: int = 1
    joined: bool = False
    judged: bool = False  # a reader has come for it, and was counted as in time or late
    stale: bool = False
    held: bool = False  # the arena had it
    keep: bool = False  # the arena wants it
    buffer: MemoryRegion | None = None  # of the pool, which gets it back with the last user


class Tripwire(NamedTuple):
    """First page of an extent that is stored without it, and whether the arena had the extent."""

    page: bytes
    held: bool


@dataclass
class PassEvidence:
    """What `evidence.Judge` remembers of a group from one pass to the next."""

    guard: Guard | None = None
    used_bytes: array[int] | None = None  # by extent: what clients use of it, as far as the tensors tell
    lru_bytes: int = 0  # that LRU would have read
    missing_bytes: float = 0.0  # that the shadow leaves out in a pass: measured while the kernel had the space alone
    window_passes: int = 1  # that were compared last
    passes: int = 0  # that have ended since the guard has judged
    ended_ns: int = 0  # when the last one did
    seen_read_bytes: int = 0  # what was read until then
    judged_lru_bytes: int = 0  # the same, and what was read, at the end of the last pass
    judged_read_bytes: int = 0
    steered_bytes: int = 0  # that steering read in a pass, when the space was left to the kernel
    tried_bytes: int | None = None  # the same, during a trial of the kernel
    trial_pass: int = 0  # before which there is no other trial
    trial_gap: int = 0  # passes from one trial to the next
    unused: int = -1  # extents, when that was judged last
    pins_due_ns: int = 0  # when a loop that is pinned whole is exposed, or looked at, next
    pins_gap_ns: int = 0  # from one look at it to the next, once it was seen to be in use
    pins_doubted: bool = False  # some were untouched at the last look
    exposed: set[int] = field(default_factory=set)  # resident extents whose next touch will be seen
    exposed_pass: int = 0
    exposure_gap: int = 1  # passes from one exposure to the next, at least


class Group:
    """State of one loop space; `loop` holds the extents that count as loop, first guess or observed."""

    def __init__(self, key: str, members: list[Member], extent_bytes: int) -> None:
        self.key = key
        self.members = members
        self.extent_bytes = extent_bytes
        self.count = sum(member.count for member in members)
        self.size_bytes = sum(member.size_bytes for member in members)
        self.learner = LoopLearner(self.count)
        self.order = self.learner.order
        self.use = self.learner.use
        self.thin = bytearray(self.count)  # by extent: 1 where so little is used that it is to be read page by page
        self.left = False  # to the kernel, which reads less: nothing is pinned, fetched ahead or dropped
        self.read_bytes = 0  # from storage, over FUSE
        self.evidence = PassEvidence()
        self.status = bytearray(self.count)
        self.charge = array("L", bytes(array("L").itemsize * self.count))
        self.seen_ns = array("Q", bytes(8 * self.count))  # by extent: when a request for it came last; 0 for never
        self.wanted = bytearray(self.count)  # by extent: 1 where the plan wants a pin
        self.unlockable: dict[int, int] = {}  # extents charged to a client -> time until which they are not locked
        self.loading: dict[int, Fetch] = {}
        self.trips: dict[int, Tripwire] = {}
        self.ready: dict[int, int] = {}  # extent -> time it was stored ahead of its reader, oldest first
        self.touched: dict[int, int] = {}  # extent -> time of touch, oldest first
        self.strays: dict[int, int] = {}  # extents of which single pages were read, least recent first
        self.refaults: dict[int, int] = {}
        self.missed: dict[int, int] = {}  # times fetched ahead and dropped untouched, per extent
        self.hot: set[int] = set()  # single extents that are kept (headers, small files)
        self.alive = True
        self.first = False  # --pin: kept before all others, open or not
        self.warm = False  # brought in by a warm-up, and not used since: kept though nobody has it open
        self.written = False  # open for writing: the kernel alone fills its pages
        self.paged = False  # too large, or one too many, to be steered: read page by page, and kept as single rows are
        self.lacks_extents = 0  # for which there is no room in a table: not steered until there is
        self.window_bytes = 0
        self.pinned_bytes = 0
        self.recent: deque[int] = deque(maxlen=RECENT_EXTENTS)  # extents that were touched last
        self.request_ends: deque[tuple[Member, int]] = deque(maxlen=RECENT_REQUESTS)  # where requests ended, over FUSE
        self.last_ns = 0
        self.sequential_ns = 0  # when a request, over FUSE, went on where another had ended
        self.opened_ns = 0  # when a client opened a file of it last
        self.convoy = 0  # how far readers drift apart: steps of a wider window
        self.together_ns = 0  # when there was one reader at most, last
        self.apart_ns = -(1 << 62)  # when there were several, last
        self.listed_open = False  # as the references were told
        self.last_pid = 0  # of a reader
        self.names_version = 0  # of the names by which its files were found
        self.copied: Copied | None = None  # by the last reader, instead of reading it again
        self.only_extents: dict[int, int] = {}  # by reader: the extent that it has touched, or _SEVERAL
        self.cursors = CursorTable(self.count, REACH_BYTES // extent_bytes, False)

    @property
    def looping(self) -> bool:
        """True by a header's guess or an observed second pass."""
        return self.learner.looping

    @property
    def inode(self) -> int:
        """Inode of its first file that a client has opened, for the log; 0 if there is none."""
        return next((member.identity.ino for member in self.members if member.identity is not None), 0)

    @property
    def loop_bytes(self) -> int:
        """Bytes that take part in the loop: everything but single-page and unused extents; 0 when nothing loops."""
        if not self.looping:
            return 0
        left_out = self.status.count(SINGLE) + self.use.unused.count(1) + self._thin_in_loop()
        return max(0, self.size_bytes - left_out * self.extent_bytes)

    def _thin_in_loop(self) -> int:
        """Return how many thin extents have not become SINGLE yet."""
        if 1 not in self.thin:
            return 0
        return sum(
            state != SINGLE and self.thin[extent] for extent, state in zip(self.order.extent_at, self.status, strict=True)
        )

    @property
    def kept_whole(self) -> bool:
        """True if the plan is to pin all that takes part in the loop."""
        return self.looping and self.wanted.count(1) * self.extent_bytes >= self.loop_bytes

    def member_of(self, extent: int) -> Member:
        """Returns the file that `extent` belongs to."""
        if extent >= self.count:
            raise ValueError(f"extent {extent} is outside the group")
        return self.members[bisect_right(self.members, extent, key=operator.attrgetter("base")) - 1]

    def offset_of(self, member: Member, extent: int) -> int:
        """Returns the byte offset of `extent` in its file."""
        return (extent - member.base) * self.extent_bytes

    def length_of(self, member: Member, extent: int) -> int:
        """Returns the bytes of `extent`: the last one of a file may be short, those behind it have none (it was cut)."""
        return max(0, min(self.extent_bytes, member.size_bytes - self.offset_of(member, extent)))

    def state(self, extent: int) -> int:
        """Returns the state of `extent`."""
        return self.status[self.order.rank_of[extent]]

    def set_state(self, extent: int, state: int) -> None:
        """Sets the state of `extent`."""
        self.status[self.order.rank_of[extent]] = state

    def believe(self, guess: Iterable[int]) -> None:
        """Marks the group as a loop on a header's word, with the order of computation that it shows (so far)."""
        self.learner.believe(guess)
        self.cursors.loops = True  # they wrap round from now on

    def note(self, extent: int, now_ns: int, missed: bool, pid: int = 0) -> Pass | None:
        """Record that a reader touched `extent`; return the pass that this ends, if any. `pid`: its process or thread."""
        self.last_ns = self.seen_ns[extent] = now_ns
        if pid and self._is_peek(extent, pid):
            return None
        if not self.use.unused[extent] or self.continues(extent):  # a row of a table is no reader's position
            self.cursors.note(self.order.rank_of[extent], now_ns, missed)
        if not self.recent or self.recent[-1] != extent:
            self.recent.append(extent)
        return self.learner.note(extent, now_ns)

    def _is_peek(self, extent: int, pid: int) -> bool:
        """Return True while `extent` is the only one that `pid` has touched: a look at the header, which ends no pass."""
        only = self.only_extents.get(pid)
        if only is None:
            if len(self.only_extents) >= READERS_MAX:
                del self.only_extents[next(iter(self.only_extents))]
            self.only_extents[pid] = extent
        elif only != extent:
            self.only_extents[pid] = _SEVERAL
        return only is None or only == extent

    def continues(self, extent: int) -> bool:
        """Return True if a touch of `extent` goes on where a reader was just now: it has touched the two before it."""
        rank, recent = self.order.rank_of[extent], self.recent
        by_place = extent - 1 in recent and extent - 2 in recent
        return by_place or (
            rank > 1 and self.order.extent_at[rank - 1] in recent and self.order.extent_at[rank - 2] in recent
        )

    def learn(self, done: Pass) -> bool:
        """Takes a completed pass as evidence; returns True when class or order changed (the plan is due)."""
        visible = self.count - self.status.count(PINNED) - self.status.count(SINGLE)
        visible -= self.use.unused.count(1) if self.looping else 0
        lesson = self.learner.learn(done, visible)
        self.cursors.loops = self.looping
        if lesson.old_ranks is not None:
            self.status = bytearray(self.status[old] for old in lesson.old_ranks)
            self.cursors.reset()
        return lesson.changed

    def next_absent(self, head: int, span: int) -> int | None:
        """Returns the first absent extent within `span` ranks after rank `head`, going round if it is a loop."""
        end = min(head + 1 + span, self.count)
        rank = self.status.find(ABSENT, head + 1, end)
        if rank < 0 and self.looping:
            rank = self.status.find(ABSENT, 0, max(0, min(head + 1 + span - self.count, head)))
        return self.order.extent_at[rank] if rank >= 0 else None

    def waiting(self, head: int, rank: int) -> int:
        """Returns how many extents after rank `head` and before `rank` are loading or ready, but not touched."""
        if rank > head:
            part: Iterable[bytes | bytearray] = (self.status[head + 1 : rank],)
        else:
            part = (self.status[head + 1 :], self.status[:rank])
        return sum(piece.count(LOADING) + piece.count(READY) for piece in part)

    def touch(self, extent: int, now_ns: int) -> None:
        """Moves an extent that is in the page cache to touched, as the latest."""
        self.set_state(extent, TOUCHED)
        for table in (self.trips, self.ready, self.touched):
            table.pop(extent, None)
        self.touched[extent] = now_ns

    def cancel(self, extent: int) -> None:
        """What is on its way, if anything, is outdated: it is of no use when it comes."""
        fetch = self.loading.pop(extent, None)
        if fetch is not None:
            fetch.stale = True
            self.set_state(extent, ABSENT)

    def grow(self, size_bytes: int) -> None:
        """Makes room for a written file's growth (single member)."""
        member = self.members[0]
        member.size_bytes = self.size_bytes = size_bytes
        if size_bytes > self.extent_bytes * WRITTEN_EXTENTS_MAX:
            self._coarsen(-(-2 * size_bytes // (self.extent_bytes * WRITTEN_EXTENTS_MAX)))
        more = max(1, -(-size_bytes // self.extent_bytes)) - self.count
        if more > 0:
            self.status.extend(bytes([SINGLE]) * more)
            self.wanted.extend(bytes(more))
            self.charge.extend([0] * more)
            self.seen_ns.extend([0] * more)
            self.count = member.count = self.count + more
            self.order.extend(self.count)
            self.use.resize(self.count)
            self.thin.extend(bytes(more))
            self.cursors.count = self.count

    def _coarsen(self, factor: int) -> None:
        """Makes `factor` extents one. They are all single, and their pages stay where they are."""
        self.extent_bytes *= factor
        self.count = self.members[0].count = self.cursors.count = -(-self.count // factor)
        self.status, self.wanted = bytearray([SINGLE]) * self.count, bytearray(self.count)
        self.charge = array("L", (sum(self.charge[at * factor : (at + 1) * factor]) for at in range(self.count)))
        self.seen_ns = array("Q", (max(self.seen_ns[at * factor : (at + 1) * factor]) for at in range(self.count)))
        self.order = self.learner.order = LoopOrder(self.count)
        self.use.resize(self.count)
        self.thin = bytearray(self.count)
        strays, self.strays = self.strays, {}
        for extent, since in strays.items():
            self.strays.pop(extent // factor, None)
            self.strays[extent // factor] = since

    def forget(self, extent: int) -> int:
        """Makes `extent` absent (a single one stays single); returns the bytes that were charged for it."""
        if self.state(extent) == READY:
            self.missed[extent] = self.missed.get(extent, 0) + 1
        if self.state(extent) != SINGLE:
            if self.state(extent) == TOUCHED:
                self.use.excuse((extent,))
            is_sparse = self.missed.get(extent, 0) >= MISSES_MAX or self.use.unused[extent]
            self.set_state(extent, SINGLE if self.thin[extent] else SPARSE if is_sparse else ABSENT)
        for table in (self.trips, self.ready, self.touched, self.strays, self.refaults):
            table.pop(extent, None)
        charged = self.charge[extent]
        self.charge[extent] = 0
        return charged

    def charged_extents(self) -> Iterator[int]:
        """Yields the extents of which the kernel may hold something."""
        return (extent for extent, charged in enumerate(self.charge) if charged)
