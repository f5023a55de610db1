"""The threads of a warm-up: they bring extents in that nobody has asked for yet.

Locking: the engine's one lock, as in `state`. In steer, extents are fetched through `Fetcher`, like those of a loader.
In arena they are read into memory of their own and handed to the core, which keeps what it still wants: no reference is
made, so passes that are learned from references stay those of readers. Hot pages are stored while `CacheState.storing`
tells a writer to wait. No thread here owes a reply to a READ.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmcache.errors import MountProblem
from llmcache.fs.buffers import Region
from llmcache.fs.group import ABSENT, LOADING, PAGE, PINNED, SINGLE, SPARSE, Group, Member
from llmcache.fs.references import READ

if TYPE_CHECKING:
    from llmcache.fs.backing import Backing
    from llmcache.fs.holders import Fetching, Holder
    from llmcache.fs.state import CacheState

THREADS = 4
TELL_S = 0.2
STALLED_S = 10.0  # without a byte: there is no room, or storage hangs

Tell = Callable[[dict[str, Any]], None]
Piece = tuple[Group, Member, int]


def has(state: CacheState, piece: Piece) -> bool:
    """True if the extent is kept, as far as the mount knows. Lock held."""
    group, member, extent = piece
    if group.state(extent) == SINGLE:
        return bool(group.charge[extent] >= min(group.extent_bytes, group.length_of(member, extent)))
    core = state.references.core
    return group.state(extent) == PINNED if core is None else core.holds(group.key, extent)


def ended() -> MountProblem:
    """The error of a warm-up that the end of the mount has cut short."""
    return MountProblem("the mount ended during the warm-up")


class Bringer:
    """One warm-up's threads, and the pieces that are left to do for them."""

    def __init__(self, state: CacheState, fetcher: Fetching, holder: Holder, pieces: list[Piece]) -> None:
        self.state, self.fetcher, self.holder = state, fetcher, holder
        with state.lock:
            self.left = deque(piece for piece in pieces if not has(state, piece))
            self.total_bytes = sum(group.length_of(member, extent) for group, member, extent in self.left)
        self.done_bytes = 0
        self.last_ns = time.monotonic_ns()
        self.stop = False

    def run(self, tell: Tell) -> None:
        """Returns when everything was brought in, or does not fit."""
        threads = [threading.Thread(target=self._work, name=f"warm-{n}", daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                tell({"done_bytes": self.done_bytes, "total_bytes": self.total_bytes})
                threads[0].join(TELL_S)
                threads = threads[1:] + threads[:1]
        finally:
            self.stop = True
            for thread in threads:
                thread.join()
            with self.state.lock:
                self.state.asked_bytes = 0
        if not self.state.running:
            raise ended()

    def _work(self) -> None:
        while self.left and not self.stop and self.state.running:
            try:
                piece = self.left.popleft()
            except IndexError:  # another thread was faster
                return
            self._bring(*piece)

    def _bring(self, group: Group, member: Member, extent: int) -> None:
        backing = member.backing
        if backing is None:
            return
        if group.state(extent) == SINGLE:
            self._bring_hot(group, member, extent, backing)
        elif self.state.references.core is None:
            self._bring_fetched(group, member, extent)
        else:
            self._bring_held(group, member, extent, backing)
        with self.state.lock:
            if has(self.state, (group, member, extent)):
                self.done_bytes += group.length_of(member, extent)
                self.last_ns = time.monotonic_ns()

    def _bring_fetched(self, group: Group, member: Member, extent: int) -> None:
        """Steer: as a loader does, when there is a buffer and room."""
        while not self.stop and self.state.running:
            with self.state.lock:
                if not group.alive or not group.wanted[extent]:
                    return  # the plan has changed
                if group.state(extent) not in (ABSENT, SPARSE, LOADING):
                    return  # it is there
                if group.state(extent) == LOADING:  # others bring it
                    job = None
                elif self.state.used_bytes + group.extent_bytes <= self.state.room_bytes and member.reachable:
                    job = self.fetcher.ahead(group, member, extent)
                else:
                    job = None
                if job is None:
                    if time.monotonic_ns() - self.last_ns > STALLED_S * 1e9:
                        return
                    self.state.asked_bytes = group.extent_bytes
                    self.state.room.notify()
                    self.state.work.wait(0.05)
            if job is not None:
                job()
                return

    def _bring_held(self, group: Group, member: Member, extent: int, backing: Backing) -> None:
        """Arena: into memory of the daemon; the core may have changed its mind while it was read."""
        with self.state.lock:
            if not group.alive or has(self.state, (group, member, extent)):
                return
            offset, length = group.offset_of(member, extent), group.length_of(member, extent)
            member.loads += 1
        region = Region(group.extent_bytes)
        complete = self._read(backing, region, offset, length)
        with self.state.lock:
            self.state.load_ended(member)
            core = self.state.references.core
            if complete and group.alive and core is not None and not core.holds(group.key, extent):
                self.state.references.held(group, extent)
                self.holder.keep(group, extent, region)

    def _bring_hot(self, group: Group, member: Member, extent: int, backing: Backing) -> None:
        """Puts a page-by-page extent into the page cache whole. A writer waits for that."""
        with self.state.lock:
            if not group.alive or member.node is None:
                return
            offset, length, node = group.offset_of(member, extent), group.length_of(member, extent), member.node
            self.state.storing.append((group, member))
            member.loads += 1
        region = Region(group.extent_bytes)
        notifier = self.state.notifier
        complete = self._read(backing, region, offset, length)
        with self.state.lock:
            self.state.load_ended(member)  # who closes the file waits for this, and not for the kernel
        stored = complete and notifier is not None and notifier.store(node, offset, region.address, length) == 0
        with self.state.lock:
            self.state.store_ended(group, member)
            if not stored:
                return
            self.state.counters.stored_bytes += length
            if group.key in self.state.groups:  # else it was given up meanwhile
                self.state.charge(group, extent, length)
                group.strays[extent] = time.monotonic_ns()
                self.state.references.pages(group, member, offset, length, READ, os.getpid())
            else:
                self.state.debts.append((node, offset, length, 0))

    def _read(self, backing: Backing, region: Region, offset: int, length: int) -> bool:
        """True if the whole of it was read; what cannot be read is left to its readers, who are told why."""
        try:
            count = backing.read_into(region.address, -(-length // PAGE) * PAGE, offset)
        except OSError:
            return False
        with self.state.lock:
            self.state.counters.backing_read_bytes += count
        return count >= length
