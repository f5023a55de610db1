"""Populates the cache before clients read: the extents that the plan pins, and hot pages.

`Warmup.warm` opens the files as a client would, so that they are planned. `WarmupWorker` then fetches the absent extents
that the plan wants. It records no reference, so the learned passes remain those of clients. In arena, the core receives the
data and keeps what it still wants. No thread here owes a reply to a READ.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from llmcache.cache.arbitration import HOT_SHARE
from llmcache.errors import MissingRequirement, MountProblem, UsageError
from llmcache.mount.engine.engine import Engine
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import Caller
from llmcache.mount.state.buffers import MemoryRegion
from llmcache.mount.state.interfaces import Backend, PinStore
from llmcache.mount.state.space import ABSENT, LOADING, PINNED, SINGLE, SPARSE, LoopSpace, SpaceFile
from llmcache.mount.state.state import READ, CacheState, read_whole

SCHEMA = "llmcache.warmup/1"
ATTACH_S = 10.0
NAMES_S = 5.0  # time limit of a scan of SOURCE
DESCRIPTORS = 2  # descriptors of an open file: with and without O_DIRECT
_LONGEST_SHOWN = 500
_ROUNDS = 8  # plans at most: other clients may change the plan again and again


class Opener(Protocol):
    """Opens files as a client of the mount does."""

    def open(self, path: str, flags: int, caller: Caller) -> tuple[int, bool]: ...

    def release(self, number: int) -> None: ...


class Warmup:
    """Warm-ups of one mount, which run one after another."""

    def __init__(self, engine: Engine, operations: Opener) -> None:
        self.engine = engine
        self.state = engine.state
        self.operations = operations
        self._turn = threading.Lock()

    def warm(self, globs: list[str], tell: Tell, *, fetch: bool = True) -> dict[str, Any]:
        """Populate the files that match `globs` (none: all models and small files); return the state of the files.

        `tell` receives progress, and cancels the warm-up by raising. Without `fetch`, only report. UsageError: no file
        matches. MountProblem: the mount ended.
        """
        began = time.monotonic()
        paths = self.named(globs, tell)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (2 * DESCRIPTORS)  # half remains for clients
        if len(paths) > most:
            hint = "name fewer files by globs, or raise the limit of open files (ulimit -n) of the daemon"
            raise MissingRequirement(f"GLOB: {len(paths)} files match, but at most {most} can be warmed at once", hint)
        before = self.state.counters.backing_read_bytes
        with ExitStack() as stack:
            unreadable = [path for path in _with_heartbeat(paths, tell) if not self._open(path, stack)]
            spaces = self._groups(set(paths))
            # All shards of a model are populated, even if only one was named.
            with self.state.lock:
                closed = [member.path for space in spaces for member in space.members if member.backing is None]
            for path in closed:
                self._open(path, stack)
            self._ready(spaces, suppose=bool(globs))
            if fetch:
                self._populate(spaces, tell)
            rows = self._rows(spaces, warm=fetch)
        read = self.state.counters.backing_read_bytes - before if fetch else 0
        return {
            "schema": SCHEMA,
            "mode": self.engine.mode,
            "wanted_bytes": sum(row["wanted_bytes"] for row in rows),
            "warm_bytes": sum(row["warm_bytes"] for row in rows),
            "read_bytes": read,
            "seconds": time.monotonic() - began,
            "files": rows,
            "unreadable": unreadable,
        }

    def _populate(self, spaces: list[LoopSpace], tell: Tell) -> None:
        """Plan and fetch until nothing more can be fetched: hot pages and other clients may change the plan.

        One warm-up runs at a time, because two would read the same extents twice.
        """
        while not self._turn.acquire(timeout=TELL_S):
            tell({})
            if not self.state.running:
                raise ended()
        try:
            for _ in range(_ROUNDS):
                with self.state.lock:
                    pieces = self._planned(spaces)
                worker = WarmupWorker(self.state, self.engine.backend, self.engine.pin_store, pieces)
                worker.run(tell)
                if not worker.done_bytes:
                    return
        finally:
            self._turn.release()

    # Which files

    def named(self, globs: list[str], tell: Tell) -> list[str]:
        """Raise UsageError if no regular file matches."""
        tree = self.engine.tree
        tree.names.refresh(NAMES_S, at_once=True)
        paths = [path for path in _with_heartbeat(self._paths(), tell) if not globs or tree.matches(path, globs)]
        if globs and not paths:
            shown, hint = (
                " ".join(globs)[:_LONGEST_SHOWN],
                "quote globs, so that the shell passes them on: '*.gguf', 'directory/*'",
            )
            raise UsageError(f"GLOB: no file of the mount matches {shown}", hint)
        return paths

    def _paths(self) -> Iterator[str]:
        for directory, names, files, fd in os.fwalk(".", dir_fd=self.engine.tree.fd, follow_symlinks=False):
            names.sort()
            for name in sorted(files):
                with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                    path = os.path.normpath(f"/{directory}/{name}")
                    mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                    if stat.S_ISREG(mode) or path in self.engine.tree.targets:
                        yield path

    def _open(self, path: str, stack: ExitStack) -> bool:
        try:
            number, _ = self.operations.open(path, os.O_RDONLY, Caller(os.geteuid(), os.getegid(), os.getpid()))
        except OSError:
            return False
        stack.callback(self.operations.release, number)
        return True

    def _groups(self, paths: set[str]) -> list[LoopSpace]:
        with self.state.lock:
            spaces = list(self.state.spaces.values())
        return [space for space in spaces if not space.written and any(m.path in paths for m in space.members)]

    def _ready(self, spaces: list[LoopSpace], suppose: bool) -> None:
        state, end = self.state, time.monotonic() + ATTACH_S
        with state.lock:
            members = [member for space in spaces for member in space.members]
            # The pin helper is attaching them, or old pages are being dropped.
            while any(each.backing is not None and (each.attaching or each.backing.unsettled) for each in members):
                if not state.running:
                    raise ended()
                if time.monotonic() > end:
                    break
                state.work.wait(0.05)
            for space in spaces:
                if space.left:  # the kernel would not keep what the warm-up fetches
                    self.engine.judge.turn(space, is_left=False)
                if suppose and space.alive and space.status.count(SINGLE) == 0:
                    self.engine.grouping.suppose(space)

    # Planned extents

    def _planned(self, spaces: list[LoopSpace]) -> list[Piece]:
        self.state.steering.plan()
        self.engine.planner.plan()
        planned: list[Piece] = []
        share = self.state.memory.limit_bytes // HOT_SHARE
        for space in spaces:
            for extent in sorted(space.hot):
                member = space.member_of(extent)
                share -= space.length_of(member, extent)
                if share >= 0 and space.length_of(member, extent) > 0:
                    planned.append((space, member, extent))
        for space in spaces:
            wanted = (extent for extent in space.order.extent_at if space.alive and space.wanted[extent])
            planned += [(space, space.member_of(extent), extent) for extent in wanted]
        return planned

    def _rows(self, spaces: list[LoopSpace], warm: bool) -> list[dict[str, Any]]:
        sums = {(space.key, member.path): [0, 0] for space in spaces for member in space.members if member.backing}
        with self.state.lock:
            for space in spaces:
                space.warm = space.warm or (warm and space.alive)
            for piece in self._planned(spaces):
                space, member, extent = piece
                sums_of_file = sums.get((space.key, member.path))
                if sums_of_file is not None:
                    length = space.length_of(member, extent)
                    sums_of_file[0] += length
                    sums_of_file[1] += length if has(piece) else 0
            return [
                {
                    "path": member.path,
                    "name": self.engine.tree.names.shown(member.path),
                    "size_bytes": member.size_bytes,
                    "wanted_bytes": sums[space.key, member.path][0],
                    "warm_bytes": sums[space.key, member.path][1],
                    "pinned": space.user_pinned,
                }
                for space in spaces
                for member in space.members
                if (space.key, member.path) in sums
            ]


def _with_heartbeat(paths: Iterable[str], tell: Tell) -> Iterator[str]:
    """Call `tell` now and then, so that the client does not time out."""
    last_s = time.monotonic()
    for path in paths:
        if time.monotonic() - last_s > TELL_S:
            last_s = time.monotonic()
            tell({})
        yield path


THREADS = 4
TELL_S = 0.2
STALLED_S = 10.0  # without a byte: no room, or storage hangs

Tell = Callable[[dict[str, Any]], None]
Piece = tuple[LoopSpace, SpaceFile, int]


def has(piece: Piece) -> bool:
    """Return True if the extent is cached. The caller holds the lock."""
    space, member, extent = piece
    if space.state(extent) == SINGLE:
        return bool(space.accounted_bytes[extent] >= min(space.extent_bytes, space.length_of(member, extent)))
    return extent in space.held if space.is_arena else space.state(extent) == PINNED


def ended() -> MountProblem:
    """Return the error of a warm-up that the end of the mount cut short."""
    return MountProblem("the mount ended during the warm-up")


class WarmupWorker:
    """The threads of one warm-up."""

    def __init__(self, state: CacheState, backend: Backend, pin_store: PinStore, pieces: list[Piece]) -> None:
        self.state, self.backend, self.pin_store = state, backend, pin_store
        with state.lock:
            self.left = deque(piece for piece in pieces if not has(piece))
            self.total_bytes = sum(space.length_of(member, extent) for space, member, extent in self.left)
        self.done_bytes = 0
        self.last_ns = time.monotonic_ns()
        self.stop = False

    def run(self, tell: Tell) -> None:
        threads = [threading.Thread(target=self._work, name=f"warm-{n}", daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            while self.total_bytes:  # without work there is no progress to report
                tell({"done_bytes": self.done_bytes, "total_bytes": self.total_bytes})
                if not any(thread.is_alive() for thread in threads):
                    break
                threads[0].join(TELL_S)
                threads = threads[1:] + threads[:1]
        finally:
            self.stop = True
            for thread in threads:
                thread.join()
            with self.state.lock:
                self.state.memory.warmup_bytes = 0
        if not self.state.running:
            raise ended()

    def _work(self) -> None:
        while not self.stop and self.state.running:
            try:
                piece = self.left.popleft()
            except IndexError:
                return
            self._populate(*piece)

    def _populate(self, space: LoopSpace, member: SpaceFile, extent: int) -> None:
        backing = member.backing
        if backing is None:
            return
        if space.state(extent) == SINGLE:
            self._fetch_hot(space, member, extent, backing)
        elif space.is_arena:
            self._fetch_to_arena(space, member, extent, backing)
        else:
            self._fetch(space, member, extent)
        with self.state.lock:
            if has((space, member, extent)):
                self.done_bytes += space.length_of(member, extent)
                self.last_ns = time.monotonic_ns()

    def _fetch(self, space: LoopSpace, member: SpaceFile, extent: int) -> None:
        memory = self.state.memory
        while not self.stop and self.state.running:
            with self.state.lock:
                if not space.alive or not space.wanted[extent]:
                    return  # the plan has changed
                if space.state(extent) not in (ABSENT, SPARSE, LOADING):
                    return  # it is cached
                if space.state(extent) == LOADING:  # another thread fetches it
                    job = None
                elif memory.used_bytes + space.extent_bytes <= memory.room_bytes and member.reachable:
                    job = self.backend.ahead(space, member, extent)
                else:
                    job = None
                if job is None:
                    if time.monotonic_ns() - self.last_ns > STALLED_S * 1e9:
                        return
                    self.state.memory.warmup_bytes = space.extent_bytes
                    self.state.request_room()
                    self.state.work.wait(0.05)
            if job is not None:
                job()
                return

    def _fetch_to_arena(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> None:
        try:
            region = MemoryRegion(space.extent_bytes)
        except OSError:  # no memory
            return
        with self.state.lock:
            if not space.alive or has((space, member, extent)):
                return
            offset, length = space.offset_of(member, extent), space.length_of(member, extent)
            member.loads += 1
        complete = read_whole(self.state, backing, region, offset, length)
        with self.state.lock:
            self.state.load_ended(member)
            core = self.state.references.core
            if complete and space.alive and core is not None and extent not in space.held:
                core.hold(space.key, extent)
                self.pin_store.keep(space, extent, region)

    def _fetch_hot(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> None:
        with self.state.lock:
            if not space.alive or member.node is None:
                return
            offset, length, node = space.offset_of(member, extent), space.length_of(member, extent), member.node
        if not self.backend.fill(space, member, extent, backing):
            return
        with self.state.lock:
            if space.key in self.state.spaces:  # otherwise the space has ended since
                self.state.memory.account(space, extent, length)
                space.make_partial(extent, time.monotonic_ns())
                self.state.references.pages(space, member, offset, length, READ, os.getpid())
            else:
                self.state.invalidate(node, offset, length)
