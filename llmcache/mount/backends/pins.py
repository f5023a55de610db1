"""Pin stores: pinned extents are locked in the page cache by pin helpers (steer, in place), or held by the daemon (arena).

`PinService` only queues requests; one thread owns the helpers' pipes and calls the callbacks, without any lock held. After a
helper's death, its locks are taken again last: after an OOM kill, the planner has reduced the pins by then. Helpers stay
below vm.max_map_count mappings, where the kernel refuses locks, and unlocks within a run.

A page is charged to the memory cgroup of the process that first read it. If that is a client's cgroup with a limit of its
own, the page is unlocked at once: the kernel could not reclaim it, and would kill the client.

Mode arena copies pinned extents into the page cache in every pass: slower than locking, but without privileges.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmcache.cache.space import LARGE_EXTENT
from llmcache.cache.steering import HIT, KEPT, Steering
from llmcache.memory import OOM_FIRST, limits_apart, set_oom_score
from llmcache.mount.backends.pinhelper import BATCH_BYTES, Run, add_run, overlap, pieces, take_out
from llmcache.mount.services import Services
from llmcache.mount.source.tree import LinkTarget
from llmcache.mount.state.buffers import MemoryRegion
from llmcache.mount.state.interfaces import PinStore
from llmcache.mount.state.space import PINNED, Fetch, LoopSpace
from llmcache.mount.state.state import CacheState

log = logging.getLogger(__name__)

RESTARTS_MAX = 20
RESTARTS_WITHIN_S = 60.0
RETRY_S = 1.0  # from a refused unlock to the next attempt, and between checks of helpers while no request is queued
PAYERS_S = 5.0  # between checks of the limits of cgroups that are charged for locked pages
MAP_COUNT = Path("/proc/sys/vm/max_map_count")
DEFAULT_MAP_COUNT = 65530


class PinHelper:
    """One helper process.

    `locked`: runs by path, sorted and merged. `nodes`: inode numbers in the mount; None for files that cannot be opened.
    """

    def __init__(self, mountpoint: str, target_of: Callable[[str], LinkTarget | None]) -> None:
        self.target_of = target_of
        self.locked: dict[str, list[Run]] = {}
        self.given: list[tuple[str, int, int]] = []  # ranges unlocked without a request, because memory.high was exceeded
        self.nodes: dict[str, int | None] = {}
        self.count = self.locked_bytes = self.given_bytes = 0
        script = str(Path(__file__).with_name("pinhelper.py"))
        # -I -S: no site packages, no package import; it starts in milliseconds and stays small.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, mountpoint, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.pid = self._process.pid
        # The OOM killer's first choice: its death frees pinned memory, and clients only read from storage again.
        set_oom_score(OOM_FIRST, self.pid)

    def call(self, operation: str, path: str, **more: int | str | list[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, "path": path, **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                raise HelperLost(self, "it ended")
            reply: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # otherwise the request in its buffer fails once more, at some later time
                self._process.stdin.close()
            raise HelperLost(self, str(error)) from error
        before = self.locked_bytes
        for path, *run in reply.pop("given", ()):
            if path in self.locked:
                self._change(path, (run[0], run[1]), take_out)
                self.given.append((path, run[0], run[1]))
        self.given_bytes = before - self.locked_bytes or self.given_bytes
        return reply

    def attach(self, path: str) -> int | None:
        """Return the file's node, or None."""
        self._drop(path)
        target = self.target_of(path)
        more: dict[str, int | str | list[int]] = {}
        if target is not None:
            more = {"target": target.path, "dev": target.dev, "ino": target.ino}
        node = self.nodes[path] = self.call("attach", path, **more).get("node")
        self.locked[path] = []
        return node

    def detach(self, path: str) -> None:
        if path in self.locked:
            self.call("detach", path)
            self._drop(path)

    def rename(self, old: str, new: str) -> None:
        if old in self.locked:
            self.call("rename", old, new=new)
            self._drop(new)
            self.locked[new], self.nodes[new] = self.locked.pop(old), self.nodes.pop(old)

    def lock(self, path: str, run: Run, free: list[int]) -> tuple[int, list[tuple[int, int, int]] | None]:
        """Return (errno or 0, ranges charged to other cgroups).

        A range is (offset, bytes, inode of a memory cgroup not in `free`). None: the kernel does not show charges.
        """
        reply = self.call("lock", path, offset=run[0], length=run[1], free=free)
        if code := int(reply.get("errno", 0)):
            return code, []
        self._change(path, run, add_run)
        return 0, reply["charged"]

    def unlock(self, path: str, run: Run) -> int:
        """Return 0, or the errno of a refusal."""
        code = int(self.call("unlock", path, offset=run[0], length=run[1]).get("errno", 0))
        if not code:
            self._change(path, run, take_out)
        return code

    def _change(self, path: str, run: Run, how: Callable[[list[Run], int, int], int]) -> None:
        runs = self.locked[path]
        before = len(runs)
        self.locked_bytes += how(runs, *run)
        self.count += len(runs) - before

    def _drop(self, path: str) -> None:
        self.nodes.pop(path, None)
        runs = self.locked.pop(path, [])
        self.count -= len(runs)
        self.locked_bytes -= sum(length for _, length in runs)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Payers:
    """Decides which memory cgroups may be charged for locked pages: those whose limits all bind this process too."""

    def __init__(self) -> None:
        self.free: list[int] = []

    def refuse(self, inode: int) -> int:
        """Return 0, EDQUOT if the cgroup is short of memory, else EAGAIN."""
        if inode in self.free:
            return 0
        limits = limits_apart(inode)
        if limits == []:
            self.free.append(inode)
            return 0
        return errno.EDQUOT if limits and min(limit.slack_bytes for limit in limits) < 0 else errno.EAGAIN

    def have_changed(self) -> bool:
        before, self.free = self.free, []
        return any([self.refuse(inode) for inode in before])


class HelperLost(Exception):
    """A helper has ended, or does not reply."""

    def __init__(self, helper: PinHelper, reason: str) -> None:
        super().__init__(reason)
        self.helper = helper


class PinService:
    """The queue of requests to pin helpers, and the record of files and locks.

    The first helper has all files attached, to learn their nodes.
    """

    def __init__(
        self,
        on_attached: Callable[[str, int | None], None],
        on_failed: Callable[[str, int, int, int], None],
        on_lost: Callable[[bool], None],
        target_of: Callable[[str], LinkTarget | None] = lambda _path: None,
        is_limited: Callable[[str], bool] = lambda _path: False,
        services: Services | None = None,
    ) -> None:
        """`target_of(path)`: the file to attach in place of a link, or None.

        `is_limited(path)`: whether a memory limit binds a client of the file but not this process.
        """
        self._target_of, self._is_limited, self._services = target_of, is_limited, services or Services()
        self._payers, self._payers_at = Payers(), 0.0
        self.on_attached = on_attached
        self.on_failed = on_failed
        self.on_lost = on_lost
        self.may_look: Callable[[], bool] = lambda: True  # False while pages of locked ranges are dropped on purpose
        self.again_bytes = 0  # locked again, because the kernel had unmapped them
        self.pids: tuple[int, ...] = ()  # of the helpers, in order
        self._mountpoint = ""
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
        self._helpers: list[PinHelper] = []
        self._lost: dict[str, list[Run]] = {}  # to be locked again: locked by helpers that have died
        self._refused: dict[str, list[Run]] = {}  # to be unlocked again: unlocks that the kernel has refused
        self._retry_at = 0.0
        self._most_runs = self._most_bytes = 0  # limits of one helper
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._restarts: list[float] = []

    @property
    def pid(self) -> int:
        return next(iter(self.pids), 0)

    @property
    def locked_bytes(self) -> int:
        """A queued unlock counts as locked until it is done."""
        return sum(helper.locked_bytes for helper in list(self._helpers))

    def start(self, mountpoint: str) -> None:
        """May follow `stop`."""
        self._mountpoint = mountpoint
        self._stopping = False
        self._queue = queue.SimpleQueue()
        self._helpers = []
        self._lost.clear()
        self._refused.clear()
        self._most_runs, self._most_bytes = capacity()
        self._spawn()
        self._thread = self._services.thread("pins", self._run)
        self._thread.start()

    def stop(self) -> None:
        """Releases all locks; waits for the helpers."""
        self._stopping = True
        self._queue.put(None)
        for helper in list(self._helpers):
            helper.kill()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._helpers = []

    def attach(self, path: str) -> None:
        self._queue.put({"op": "attach", "path": path})

    def detach(self, path: str) -> None:
        self._queue.put({"op": "detach", "path": path})

    def lock(self, path: str, offset: int, length: int) -> None:
        """The thread calls `on_failed(path, offset, length, errno)` for parts that cannot stay locked.

        For pages charged to a cgroup with a limit of its own, errno is EDQUOT if it is short of memory, else EAGAIN.
        """
        for start, size in pieces(offset, length):
            self._queue.put({"op": "lock", "path": path, "offset": start, "length": size})

    def unlock(self, path: str, offset: int, length: int) -> None:
        """If the kernel refuses, the bytes count as locked."""
        self._queue.put({"op": "unlock", "path": path, "offset": offset, "length": length})

    def rename(self, old: str, new: str) -> None:
        self._queue.put({"op": "rename", "path": old, "new": new})

    def settle(self, timeout_s: float) -> None:
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout_s)

    # The thread

    def _run(self) -> None:
        while (request := self._next()) is not None:
            if isinstance(request, threading.Event):
                request.set()
                continue
            while True:
                try:
                    self._serve(request)
                    self._report_given()
                    break
                except HelperLost as lost:
                    if self._stopping or not self._recovered(lost):
                        return

    def _next(self) -> dict[str, Any] | threading.Event | None:
        while True:
            retry = bool(self._refused) and time.monotonic() > self._retry_at
            with contextlib.suppress(queue.Empty):
                return self._queue.get(block=not (self._lost or retry), timeout=RETRY_S)
            if not retry and not self._lost:
                return {"op": "check", "path": ""}
            if (run := take_last(self._lost)) is not None:
                return {"op": "lock", "path": run[0], "offset": run[1], "length": run[2]}
            if retry and (run := take_last(self._refused)) is not None:
                return {"op": "unlock", "path": run[0], "offset": run[1], "length": run[2]}

    def _report_given(self) -> None:
        for helper in self._helpers:
            given, helper.given = helper.given, []
            if given:
                log.warning("memory.high is exceeded: the pin helper has unlocked %d bytes", helper.given_bytes)
            for path, offset, length in given:
                self.on_failed(path, offset, length, errno.ENOMEM)

    def _serve(self, request: dict[str, Any]) -> None:
        path, operation = request["path"], request["op"]
        if operation == "attach":
            self._forget(path)
            self.on_attached(path, self._helpers[0].attach(path))
        elif operation == "detach":
            self._forget(path)
        elif operation == "rename":
            for helper in self._helpers:
                helper.rename(path, request["new"])
            for runs in (self._lost, self._refused):
                if path in runs:
                    runs[request["new"]] = runs.pop(path)
        elif operation == "lock":
            self._lock(path, request["offset"], request["length"])
        elif operation == "unlock":
            self._unlock(path, request["offset"], request["length"])
        else:
            self._check()

    def _check(self) -> None:
        for helper in self._helpers:
            again = int(helper.call("check", "", look=int(self.may_look())).get("again", 0))
            if again and not self.again_bytes:
                log.warning("%d pinned bytes were no longer in memory, and are locked again", again)
            self.again_bytes += again
        if time.monotonic() > self._payers_at:
            self._payers_at = time.monotonic() + PAYERS_S
            if self._payers.have_changed():
                for helper in self._helpers:
                    for path, runs in helper.locked.items():
                        for run in runs:
                            add_run(self._lost.setdefault(path, []), *run)

    def _forget(self, path: str) -> None:
        self._lost.pop(path, None)
        self._refused.pop(path, None)
        for helper in self._helpers:
            helper.detach(path)

    def _lock(self, path: str, offset: int, length: int) -> None:
        if path not in self._helpers[0].locked:
            self.on_failed(path, offset, length, errno.ENOENT)
            return
        for runs in (self._lost, self._refused):
            take_out(runs.get(path, []), offset, length)
        rest = [(offset, length)]
        parts: list[tuple[PinHelper, Run]] = []
        for helper in self._helpers:
            for run in overlap(helper.locked.get(path, []), offset, length):
                parts.append((helper, run))
                take_out(rest, *run)
        parts += [(self._helper_for(path, run), run) for run in rest]
        for helper, run in parts:
            if not self._has(helper, path):
                self.on_failed(path, *run, errno.ESTALE)
                continue
            code, charged = helper.lock(path, run, self._payers.free)
            if code:
                self.on_failed(path, *run, code)
            elif charged or (charged is None and self._is_limited(path)):
                self._unlock_charged(path, run, charged)

    def _unlock_charged(self, path: str, run: Run, charged: list[tuple[int, int, int]] | None) -> None:
        """`charged` None: unlock the whole run."""
        refused: dict[int, list[Run]] = {errno.EAGAIN: [run]} if charged is None else {}
        for offset, length, inode in charged or ():
            if code := self._payers.refuse(inode):
                start = offset - offset % LARGE_EXTENT
                end = -(-(offset + length) // LARGE_EXTENT) * LARGE_EXTENT
                add_run(refused.setdefault(code, []), start, end - start)
        for code, blocks in refused.items():
            for part in overlap(blocks, *run):
                self._unlock(path, *part)
                self.on_failed(path, *part, code)

    def _has(self, helper: PinHelper, path: str) -> bool:
        """Return False if another file than the first helper's now has that path."""
        node = self._helpers[0].nodes[path]
        if path not in helper.locked and helper.attach(path) != node:
            helper.detach(path)
            return False
        return True

    def _helper_for(self, path: str, run: Run) -> PinHelper:
        free = [helper for helper in self._helpers if helper.locked_bytes < self._most_bytes]
        for helper in free:
            if overlap(helper.locked.get(path, []), run[0] - 1, run[1] + 2):
                return helper
        return next((helper for helper in free if helper.count < self._most_runs), None) or self._spawn()

    def _unlock(self, path: str, offset: int, length: int) -> None:
        take_out(self._lost.get(path, []), offset, length)
        for helper in self._helpers:
            for run in overlap(helper.locked.get(path, []), offset, length):
                if code := helper.unlock(path, run):
                    if not any(self._refused.values()):
                        log.warning("cannot unlock %d bytes: %s; trying again", run[1], os.strerror(code))
                    add_run(self._refused.setdefault(path, []), *run)
                    self._retry_at = time.monotonic() + RETRY_S

    def _spawn(self) -> PinHelper:
        try:
            helper = PinHelper(self._mountpoint, self._target_of)
        except OSError:
            if not self._helpers:
                raise
            return self._helpers[-1]
        self._helpers.append(helper)
        self.pids = tuple(each.pid for each in self._helpers)
        if self._stopping:  # `stop` may have run before it was in the list
            helper.kill()
        return helper

    def _recovered(self, lost: HelperLost) -> bool:
        while not self._stopping:
            now = time.monotonic()
            self._restarts = [when for when in self._restarts if now - when < RESTARTS_WITHIN_S] + [now]
            if len(self._restarts) > RESTARTS_MAX:
                log.error(
                    "the pin helper ended %d times in a minute: no data is pinned from now on (%s)", RESTARTS_MAX, lost
                )
                for helper in self._helpers:
                    helper.kill()
                self._helpers, self.pids = [], ()
                self.on_lost(True)
                return False
            log.warning("the pin helper ended (%s): starting it again", lost)
            self.on_lost(False)
            try:
                self._replace(lost.helper)
                return True
            except HelperLost as again:
                lost = again
            except OSError as error:
                lost = HelperLost(lost.helper, str(error))
        return False

    def _replace(self, helper: PinHelper) -> None:
        helper.kill()
        for path, runs in helper.locked.items():
            for run in runs:
                add_run(self._lost.setdefault(path, []), *run)
        attached = list(helper.locked)
        helper.locked, helper.count, helper.locked_bytes = {path: [] for path in attached}, 0, 0
        if helper is not self._helpers[0]:
            self._helpers.remove(helper)
            self.pids = tuple(each.pid for each in self._helpers)
            return
        self._helpers[0] = successor = PinHelper(self._mountpoint, self._target_of)
        successor.locked = {path: [] for path in attached}  # if it dies before it has attached them, the next one does
        self.pids = tuple(each.pid for each in self._helpers)
        if self._stopping:  # `stop` may have run before it was in the list
            successor.kill()
        for path in attached:
            self.on_attached(path, successor.attach(path))


def capacity() -> tuple[int, int]:
    """Return how many runs, and how many bytes, one helper locks at most.

    A run takes two mappings. Half of vm.max_map_count is kept for unlocking every second extent of them.
    """
    with contextlib.suppress(OSError, ValueError):
        most = int(MAP_COUNT.read_text()) // 4
        return most, 2 * most * LARGE_EXTENT
    return DEFAULT_MAP_COUNT // 4, DEFAULT_MAP_COUNT // 2 * LARGE_EXTENT


def take_last(runs_by_path: dict[str, list[Run]]) -> tuple[str, int, int] | None:
    """Return (path, offset, bytes) of the last piece, or None."""
    while runs_by_path:
        path, runs = next(iter(runs_by_path.items()))
        if runs:
            end = sum(runs[-1])
            size = runs[-1][1] % BATCH_BYTES or BATCH_BYTES
            take_out(runs, end - size, size)
            return path, end - size, size
        del runs_by_path[path]
    return None


class LockedPinStore(PinStore):
    """Pin store for steer and in place, locked through `PinService`."""

    def __init__(self, state: CacheState, pins: PinService) -> None:
        self.state = state
        self.pins = pins

    def skips_trip(self, space: LoopSpace, extent: int) -> bool:
        return bool(space.wanted[extent])

    def stored(self, space: LoopSpace, fetch: Fetch) -> None:
        if space.wanted[fetch.extent]:
            self._pin(space, [fetch.extent])

    def pin_ready(self, space: LoopSpace) -> None:
        now_ns = time.monotonic_ns()
        wanted = [extent for extent in (*space.ready, *space.touched) if space.wanted[extent]]
        self._pin(space, [extent for extent in wanted if space.unlockable.get(extent, 0) <= now_ns])

    def _pin(self, space: LoopSpace, extents: list[int]) -> None:
        for extent in extents:
            space.pin(extent)
            self.state.memory.pin(space, space.length_of(space.member_of(extent), extent))
        for member, offset, length in space.ranges(extents):
            self.pins.lock(member.path, offset, length)

    def release(self, space: LoopSpace, extents: list[int]) -> None:
        for extent in extents:
            if space.state(extent) == PINNED:
                space.touch(extent, 0)
                self.state.memory.pin(space, -space.length_of(space.member_of(extent), extent))
        for member, offset, length in space.ranges(extents):
            self.pins.unlock(member.path, offset, length)

    def settle(self, timeout_s: float = 5.0) -> None:
        self.pins.settle(timeout_s)

    def lock_again(self, space: LoopSpace, extents: list[int]) -> None:
        for member, offset, length in space.ranges(extents):
            self.pins.lock(member.path, offset, length)

    def pinned(self, space: LoopSpace) -> list[int]:
        return space.in_state(PINNED) if space.pinned_bytes else []


class ArenaPinStore(PinStore):
    """Pin store for arena: one region of anonymous memory for each pinned extent.

    The deterministic core (`llmcache.cache.steering`) chooses pins and victims; an extent is pinned when it is next read.
    """

    def __init__(self, state: CacheState, steering: Steering) -> None:
        self.state = state
        steering.on_evict = self._evicted
        self.regions: dict[tuple[str, int], MemoryRegion] = {}

    def has_region(self, space: LoopSpace, extent: int) -> bool:
        return extent in space.held or bool(space.wanted[extent])

    def region(self, space: LoopSpace, extent: int, verdict: int) -> MemoryRegion | None:
        if verdict == HIT:
            return self.regions[(space.key, extent)]
        return MemoryRegion(space.extent_bytes) if verdict == KEPT else None

    def keep(self, space: LoopSpace, extent: int, region: MemoryRegion) -> None:
        if extent in space.held:
            self.regions[(space.key, extent)] = region
            self.state.memory.hold(space, region.size)

    def _evicted(self, key: str, extent: int) -> None:
        region = self.regions.pop((key, extent), None)
        if region is not None:
            self.state.memory.hold(self.state.spaces[key], -region.size)
            self.state.room.notify()

    def pinned(self, space: LoopSpace) -> list[int]:
        return [extent for key, extent in self.regions if key == space.key]
