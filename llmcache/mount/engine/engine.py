"""The engine of a mount: the part of the cache that file operations call.

It turns opens into spaces, passes events to the other parts, and runs the maintenance thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmcache.cache.loops import Pass
from llmcache.cache.space import SMALL_EXTENT
from llmcache.memory import limits_of_process_apart
from llmcache.model.names import SCAN_S
from llmcache.mount.budget import PressureGauge
from llmcache.mount.copies import client_facts, find_copy
from llmcache.mount.engine.evidence import Judge
from llmcache.mount.engine.grouping import Grouping
from llmcache.mount.engine.loader import Loader
from llmcache.mount.engine.planner import UNLIMITED, Planner
from llmcache.mount.engine.report import statistics
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import SourceTree
from llmcache.mount.state.interfaces import Backend, KernelNotifier, PinHelpers, PinStore
from llmcache.mount.state.space import PINNED, LoopSpace, SpaceFile
from llmcache.mount.state.state import LOADS_S, WRITE, CacheState
from llmcache.mount.stats import MountStats

log = logging.getLogger(__name__)

RETRY_NS = 30_000_000_000  # after the kernel refused to lock pages
COPIES_S = 10.0  # between checks for clients that have copied weights
IDLE_DROP_NS = 60_000_000_000  # closed files are evicted after this time
CLOSED_MAX, CLOSED_DESCRIPTORS = 512, 8  # remembered closed spaces: at most 512, and one for each 8 descriptors of the limit
REST, REST_MAX_S = 4.0, 0.1  # maintenance pauses for a multiple of the time that it took, at most 0.1 s
BEYOND_PAUSE_S = 0.05  # pause while memory beyond the budget is used: another program may need it soon
WAITERS, WAIT_S = 32, 5.0  # requests that may wait for STOREs at a time, and for how long (see `state.py`)


class Engine:
    """Cache of one mount. `pinned`: globs of files that are pinned before all others.

    `make(engine)` returns the pin helpers, the pin store and the back end; see `daemon.parts`.
    """

    def __init__(
        self,
        state: CacheState,
        mode: str,
        tree: SourceTree,
        make: Callable[[Engine], tuple[PinHelpers, PinStore, Backend]],
        pinned: tuple[str, ...] = (),
    ) -> None:
        self.state = state
        self.mode = mode
        self.tree = tree
        self.pins, self.pin_store, self.backend = make(self)
        self.planner = Planner(state, self.pin_store)
        self.grouping = Grouping(state, tree, self.backend, self._dissolve, pinned)
        self.judge = Judge(state, self.backend, self.pin_store, self.replan)
        self.gauge = PressureGauge(state.memory.budget_bytes)
        self.on_room: Callable[[], None] = lambda: None  # more may be pinned than before
        state.services.on_broken = self._broken
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._maintenance: threading.Thread | None = None
        self._helpers: set[int] = set()  # pids of pin helpers, dead ones too: the kernel reports their closes late
        self._closed: dict[str, LoopSpace] = {}  # spaces without a client handle, by key, in the order of their last close
        self._plan_due = False
        self._refused_ns = 0
        self.waiting = 0  # requests that wait for a STORE of old data to end

    # Start and stop

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Start without an access to the mount; may follow `stop`."""
        self.state.running = True
        self.tree.names.refresh(SCAN_S)
        self._stopping.clear()
        self.state.references.resume()
        # In place, the helper opens files below SOURCE, so that it does not make MOUNT busy.
        self.pins.start(self.tree.directory if self.backend.in_place else mountpoint)
        self.loader = Loader(self.state, self.backend)
        self.loader.start()
        self.backend.start(notifier, mountpoint)
        self._maintenance = self.state.services.thread("planner", self._maintain, mountpoint)
        self._maintenance.start()
        self.state.services.thread("copies", self._find_copies).start()

    def stop(self) -> None:
        """Unpin everything; reads are then answered from SOURCE."""
        if not self.state.running or self._maintenance is None:
            return
        with self.state.lock:
            self.state.running = False
            self.state.references.pause()
            for space in list(self.state.spaces.values()):
                self._dissolve(space)
            self.state.work.notify_all()
            self.state.room.notify_all()
        self._wake.set()
        self._stopping.set()
        self.pins.stop()
        self.loader.join()
        self.backend.stop()
        if self._maintenance is not threading.current_thread():
            self._maintenance.join(timeout=10)
        with self.state.lock:
            self.state.memory.verify(self.state.spaces.values())

    def _broken(self, service: str) -> None:
        """Stop steering, because other services rely on the failed one."""
        log.error("service %s has failed repeatedly: steering ends, and files are read straight from SOURCE", service)
        threading.Thread(target=self.stop, name="stop", daemon=True).start()

    # Called by the file operations

    def opened(self, backing: Backing, path: str, pid: int) -> bool:
        """Return True if the kernel may keep its pages."""
        if pid in self.pins.pids:
            self._helpers.add(pid)
            return True
        if not self.state.running:
            return True
        with self.state.lock:
            self._helpers.discard(pid)  # a process has reused the pid of a helper
            self.state.opens[backing] = self.state.opens.get(backing, 0) + 1
            owner = self.state.owners.get(backing)
            if owner is not None and backing.writable and not owner[0].written:
                self._dissolve(owner[0])
        known = owner is not None and owner[0].alive
        if not (backing.hidden or backing.deleted):
            known = self.adopt(backing) or known
        self.settle(backing, owes_reply=True)
        return known

    def adopt(self, backing: Backing) -> bool:
        """Return True if a space already accounts for the cached pages of a file that was not open."""
        space, member = self.grouping.adopt(backing)
        with self.state.lock:
            space.record_open(time.monotonic_ns())
            self._update_presence(space)
            known = member.node is not None
            attach = not known and not member.attaching
            member.attaching = member.attaching or attach
            self._plan_due = True
        if attach:
            self.pins.attach(member.path)
        self._wake.set()
        return known

    def _update_presence(self, space: LoopSpace) -> None:
        is_open = space.user_pinned or space.warm or self.state.opens_of(space) > 0
        self._closed.pop(space.key, None)
        if space.alive and not is_open:
            self._closed[space.key] = space
            self._forget_closed()
        if space.alive and space.open != is_open:
            if is_open:
                self.state.steering.open(space.key)
            else:
                self.state.steering.close(space.key)
            self.state.index.move(space)

    def _forget_closed(self) -> None:
        if len(self._closed) > min(CLOSED_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // CLOSED_DESCRIPTORS):
            not_looping = (space for space in self._closed.values() if not space.looping)
            self._dissolve(next(not_looping, None) or next(iter(self._closed.values())))

    def settle(self, backing: Backing, *, owes_reply: bool) -> None:
        """Wait until no STORE of an ended space is under way to the path: it would bring back old data.

        `owes_reply`: the thread owes the kernel a reply. At most WAITERS such threads wait, at most WAIT_S each.
        """
        state = self.state
        with state.lock:
            if not state.stores_old(backing.path) or (owes_reply and self.waiting >= WAITERS):
                return
            self.waiting += owes_reply
            state.ended.wait_for(lambda: not state.stores_old(backing.path), WAIT_S if owes_reply else None)
            self.waiting -= owes_reply

    def closed(self, backing: Backing, pid: int) -> None:
        if pid in self._helpers:
            return
        with self.state.lock:
            opens = self.state.opens.get(backing, 1) - 1
            self.state.opens[backing] = opens
            owner = self.state.owners.get(backing)
            if owner is not None:
                owner[0].record_close(time.monotonic_ns(), by_warmup=pid == os.getpid())
            if opens <= 0:
                self.state.opens.pop(backing, None)
                if owner is not None:
                    self._part(*owner, backing)
                    self._update_presence(owner[0])
            self._plan_due = True
        self._wake.set()

    def _part(self, space: LoopSpace, member: SpaceFile, backing: Backing) -> None:
        """Detach `backing`, and wait until no loader reads it. The caller holds the lock."""
        if space.written:
            self._dissolve(space)
        self.state.owners.pop(backing, None)
        if member.backing is backing:
            member.backing = None
        if not self.state.ended.wait_for(lambda: not member.loads, LOADS_S):
            backing.keep_open(f"{member.loads} reads have not ended within {LOADS_S:.0f} s")

    def changed(self, backing: Backing, offset: int, length: int) -> None:
        """Handle a write through the mount, or a change outside it (offset 0, length -1)."""
        with self.state.lock:
            if length > 0:
                self.state.counters.backing_write_bytes += length
            owner = self.state.owners.get(backing)
            if owner is None:
                return
            space, member = owner
            if not space.written:
                self._dissolve(space)  # the next read makes a new space
            elif backing.size > member.size_bytes:
                self.state.extents -= space.count
                space.grow(backing.size)
                self.state.extents += space.count
            else:
                space.truncate(backing.size)
            if space.written and length > 0:
                self._charge_written(space, offset, length)

    def _charge_written(self, space: LoopSpace, offset: int, length: int) -> None:
        last = min((offset + length - 1) // space.extent_bytes, space.count - 1)  # the file may have been truncated since
        for extent in range(offset // space.extent_bytes, last + 1):
            start = max(offset, extent * space.extent_bytes)
            end = min(offset + length, (extent + 1) * space.extent_bytes)
            self.state.memory.account(space, extent, end - start)
            space.make_partial(extent, time.monotonic_ns())
        if space.alive:
            self.state.references.pages(space, space.members[0], offset, length, WRITE, space.last_pid)

    def renamed(self, old: str, new: str) -> None:
        """Move the files at or below a path; forget those that had the new name."""
        self.removed(new)
        with self.state.lock:
            for space in self.state.spaces.values():
                for member in space.members:
                    if member.path == old or member.path.startswith(old + "/"):
                        self.pins.rename(member.path, new + member.path[len(old) :])
                        self.state.displace(space, member)
                        member.path = new + member.path[len(old) :]
                        self.state.place(space, member)
            for space, member in self.state.storing:
                if not space.alive and (member.path == old or member.path.startswith(old + "/")):
                    member.path = new + member.path[len(old) :]

    def removed(self, path: str) -> None:
        with self.state.lock:
            for space, _ in list(self.state.places.get(path, ())):
                self._dissolve(space)

    def about(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "mode": self.mode,
            "budget_bytes": self.state.memory.budget_bytes,
            "window_allowance_bytes": self.state.memory.allowance_bytes,
        }
        facts |= {"large_extent_bytes": self.backend.large_extent, "small_extent_bytes": SMALL_EXTENT}
        if self.mode != "arena":
            facts["unseen"] = "pinned extents are read without a request, so these reads are not recorded"
        return {"extra": facts, "note": facts.get("unseen", "")}

    def stats(self) -> MountStats:
        names = self.tree.names
        names.refresh(0)  # for the next call: this one does not wait for storage
        found = statistics(self.state, self.mode, self.pins.pids, self.backend.client_reads(), names.shown)
        faults: dict[str, Any] = self.backend.faults() | {"locked_again_bytes": self.pins.again_bytes}
        services = replace(found.services, **faults)
        return replace(found, services=services)

    @property
    def _held_bytes(self) -> int:
        return self.pins.locked_bytes + self.state.memory.held_bytes

    def resize(self, size_bytes: int) -> None:
        """Raise MissingRequirement if the machine cannot spare the memory."""
        self.gauge.check(size_bytes, self._held_bytes)
        with self.state.lock:
            self.state.memory.budget_bytes = size_bytes
            self.state.set_limit(size_bytes)
            self.gauge.reset(size_bytes)
            self.planner.plan()
            self.state.room.notify_all()

    def forget(self, space: LoopSpace) -> list[tuple[int, int]]:
        """End `space`; return (node, bytes) of its files. The caller holds the lock."""
        nodes = [(member.node, member.size_bytes) for member in space.members if member.node is not None]
        self._dissolve(space)
        return nodes

    # Events, on other threads

    def attached(self, path: str, node: int | None) -> None:
        """Record the node of `path` (None: the helper cannot open it), and drop unaccounted pages."""
        with self.state.lock:
            members_at_path = list(self.state.places.get(path, ()))
            for _, member in members_at_path:
                member.node = node  # from now on, pages are accounted
        if node is not None and not self.backend.in_place:
            self.backend.drop(node, [(0, 0)])
        with self.state.lock:
            for _, member in members_at_path:
                member.attaching = False
            if any(space.cursors.live for space, _ in members_at_path):  # most of thousands of small files have no reader
                self.state.work.notify_all()

    def lock_failed(self, path: str, offset: int, length: int, code: int) -> None:
        with self.state.lock:
            for space, member in self.state.places.get(path, ()):
                self._unpin(space, member, offset, length, code)

    def _unpin(self, space: LoopSpace, member: SpaceFile, offset: int, length: int, code: int) -> None:
        """The caller holds the engine's lock."""
        first = member.base + offset // space.extent_bytes
        end = min(member.base - (-(offset + length) // space.extent_bytes), member.base + member.count)
        extents = [extent for extent in range(first, end) if space.state(extent) == PINNED]
        if not extents:
            return
        inode = member.identity.ino if member.identity is not None else 0
        now_ns = time.monotonic_ns()
        if code in (errno.EDQUOT, errno.EAGAIN):
            self._refused_ns = self._refused_ns or now_ns
            self._leave_to_client(space, member, extents, inode, code)
            return
        self._refused_ns = now_ns
        log.warning("inode %d: cannot lock %d bytes at offset %d: %s", inode, length, offset, os.strerror(code))
        space.adopt(replace(space.plan, pin=(), unpin=extents))
        self.pin_store.release(space, extents)
        self.planner.pinnable_bytes = self.state.memory.pinned_bytes
        self._plan_due = True

    def _leave_to_client(self, space: LoopSpace, member: SpaceFile, extents: list[int], inode: int, code: int) -> None:
        """Unpin extents that are charged to a client's cgroup with a memory limit of its own.

        EDQUOT: that cgroup is short of memory, so the pages are dropped and the next read charges this process.
        """
        if not space.unlockable:
            log.warning("inode %d: pages charged to a client's cgroup with a memory limit are not pinned", inode)
        self.pin_store.release(space, extents)
        now_ns = time.monotonic_ns()
        for extent in extents:
            is_new = space.unlockable.get(extent, 0) <= now_ns
            space.unlockable[extent] = now_ns + RETRY_NS
            if is_new and code == errno.EDQUOT and member.node is not None:
                self.state.memory.pending.append(self.state.memory.evict(space, extent))
        self.state.room.notify()

    def is_limited(self, path: str) -> bool:
        """Return True if a memory limit binds a client of `path`, but not this process."""
        pids = {space.last_pid for space, _ in self.state.places.get(path, ()) if space.last_pid}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                if limits_of_process_apart(pid):
                    return True
        return False

    def helper_lost(self, for_good: bool) -> None:
        """Continue with a smaller budget, because the OOM killer may have killed a pin helper.

        The plan changes here, before the next helper locks again what is still planned.
        """
        limit = self.gauge.lost(self.state.memory.pinned_bytes)
        with self.state.lock:
            if for_good:
                self.planner.pinnable_bytes = 0
            self.state.set_limit(limit)
            self.planner.plan()

    def pass_ended(self, space: LoopSpace, done: Pass) -> None:
        if space.learn(done):
            self.replan()
        self.judge.pass_ended(space)

    def replan(self) -> None:
        self._plan_due = True
        self._wake.set()

    def _dissolve(self, space: LoopSpace) -> None:
        self._closed.pop(space.key, None)
        for extent in list(space.loading):
            space.cancel(extent)
        self.pin_store.release(space, self.pin_store.pinned(space))
        if space.alive:
            self.state.steering.end(space.key)
        self.grouping.dissolve(space)
        for member in space.members:
            self.pins.detach(member.path)

    # Maintenance

    def _find_copies(self) -> None:
        while not self._stopping.wait(COPIES_S):
            with self.state.lock:
                spaces = [space for space in self.state.index.looping if space.last_pid]
            for space in spaces:
                copied = None
                with contextlib.suppress(OSError):  # the client has ended
                    client = client_facts(space.last_pid, self.backend.keys(space))
                    copied = find_copy(client, space.size_bytes, sum(member.repacked_bytes for member in space.members))
                if copied is not None and (space.copied is None or space.copied.pid != copied.pid):
                    log.warning("inode %d: %s", space.inode, copied)
                space.copied = copied

    def _maintain(self, mountpoint: str) -> None:
        limit_before = -1
        cannot_observe = False
        began = time.monotonic()
        while self.state.running:
            # Every open requests a plan: with thousands of known files, plans without a pause would leave no time to serve.
            time.sleep(min(REST * (time.monotonic() - began), REST_MAX_S))
            beyond = self.state.memory.used_bytes > self.state.memory.limit_bytes
            self._wake.wait(min(self.gauge.pause_s, BEYOND_PAUSE_S) if beyond else self.gauge.pause_s)
            self._wake.clear()
            began = time.monotonic()
            try:
                if not self.backend.guards(mountpoint):  # unmounted by a user: the helper's clone must not keep it alive
                    self.pins.stop()
                    return
                limit = self.gauge.limit(self._held_bytes, self.state.memory.needed_window_bytes)
            except OSError as error:  # no free descriptor until clients close some files
                if not cannot_observe:
                    log.warning("cannot observe memory pressure for now: %s", error.strerror)
                cannot_observe = True
                continue
            cannot_observe = False
            now_ns = time.monotonic_ns()
            with self.state.lock:
                pinnable = min(self.planner.pinnable_bytes, self.state.memory.pin_limit_bytes)
                if limit != limit_before:
                    limit_before = limit
                    self.state.set_limit(limit)
                    self._plan_due = True
                    self.state.room.notify_all()
                self._look(now_ns)
                has_room = pinnable < min(self.planner.pinnable_bytes, self.state.memory.pin_limit_bytes)
            if has_room:
                self.on_room()

    def _look(self, now_ns: int) -> None:
        """The caller holds the engine's lock."""
        state, memory = self.state, self.state.memory
        state.is_calm, state.is_near = self.gauge.is_calm, self.gauge.is_near
        lru_bytes = memory.limit_bytes
        if self.backend.in_place:
            memory.set_opportunistic(self.gauge.slack_bytes)
            lru_bytes = max(lru_bytes, memory.used_bytes + max(0, self.gauge.free_bytes))
        state.shadow.resize(lru_bytes)
        if self._refused_ns and now_ns - self._refused_ns > RETRY_NS:
            self._refused_ns, self.planner.pinnable_bytes, self._plan_due = 0, UNLIMITED, True
        for space in list(state.index.read):
            self._plan_due |= self.planner.watch(space, now_ns, in_place=self.backend.in_place)
        for space in list(state.index.looping):
            if (done := space.touches.cut(space.last_ns)) is not None:
                self.pass_ended(space, done)
            self.judge.look(space, now_ns)
        while self._closed and now_ns - (oldest := next(iter(self._closed.values()))).last_ns > IDLE_DROP_NS:
            self._dissolve(oldest)
        self.grouping.find_room()
        if self._plan_due:
            self._plan_due = False
            self.planner.plan()
