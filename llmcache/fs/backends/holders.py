"""What is kept, and by whom: locked in the page cache by the pin helper (steer, in place), or in the daemon (arena).

Locked: programs hit it without a request. `PinService` is the daemon's side of the helper: starts it, keeps it alive, and
queues locks so that nobody waits for them. One thread owns the helper's pipe. `lock`, `unlock`, `attach` and `detach` only
queue; results come back through the callbacks, called on that thread without any lock held. When the helper dies, it is
started again; everything is attached, and locked once nothing else is asked for: if the OOM killer took it, less is wanted
by then.

Arena: every pass copies what is held into the page cache ahead of the reader and drops it behind. Slower than locking, but
it needs no privilege, and every hit is seen. What is held is decided by the deterministic core (`llmcache.cache.steering`);
`ArenaHolder` only keeps the memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmcache.cache.steering import HIT, KEPT, Steering
from llmcache.fs.backends.base import Holder, MemoryRegion
from llmcache.fs.engine.group import PINNED, READY, TOUCHED, Fetch, Group
from llmcache.fs.engine.state import CacheState

log = logging.getLogger(__name__)

RESTARTS_MAX = 20
RESTARTS_WITHIN_S = 60.0
BATCH_BYTES = 16 << 20  # so that an unlock under pressure never waits behind gigabytes of locks


class PinService:
    """Queue and bookkeeping of attached files and locked ranges."""

    def __init__(
        self,
        on_attached: Callable[[str, int | None], None],
        on_failed: Callable[[str, int, int, int], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self.on_attached = on_attached
        self.on_failed = on_failed
        self.on_lost = on_lost
        self.pid = 0
        self.locked_bytes = 0  # what the helper has locked: less what it was asked to unlock only once it has
        self._mountpoint = ""
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
        # (offset, bytes) in order, of which none overlap: what the helper has locked, and what one that has died had.
        self._locked: dict[str, list[tuple[int, int]]] = {}
        self._lost: dict[str, list[tuple[int, int]]] = {}
        self._helper: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._restarts: list[float] = []

    def start(self, mountpoint: str) -> None:
        """Starts the helper for `mountpoint`. May follow `stop`; nothing is attached or locked then."""
        self._mountpoint = mountpoint
        self._stopping = False
        self._queue = queue.SimpleQueue()
        self._locked.clear()
        self._lost.clear()
        self.locked_bytes = 0
        self._spawn()
        self._thread = threading.Thread(target=self._run, name="pins", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the helper, which releases every lock; waits for it."""
        self._stopping = True
        self._queue.put(None)
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def attach(self, path: str) -> None:
        """Opens `path` in the helper; `on_attached(path, node id or None)` follows."""
        self._queue.put({"op": "attach", "path": path})

    def detach(self, path: str) -> None:
        """Closes `path` in the helper and forgets its locks."""
        self._queue.put({"op": "detach", "path": path})

    def lock(self, path: str, offset: int, length: int) -> None:
        """Locks a range; `on_failed(path, offset, length, errno)` follows if that is refused."""
        for start in range(offset, offset + length, BATCH_BYTES):
            size = min(BATCH_BYTES, offset + length - start)
            self._queue.put({"op": "lock", "path": path, "offset": start, "length": size})

    def unlock(self, path: str, offset: int, length: int) -> None:
        """Unlocks a range."""
        self._queue.put({"op": "unlock", "path": path, "offset": offset, "length": length})

    def rename(self, old: str, new: str) -> None:
        """`old` is called `new` from now on, also to a helper started later."""
        self._queue.put({"op": "rename", "path": old, "new": new})

    def settle(self, timeout_s: float) -> None:
        """Returns when the helper has done what it was asked to until now, or after `timeout_s`."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout_s)

    def _spawn(self) -> None:
        script = str(Path(__file__).with_name("pinhelper.py"))
        # -I -S: no site packages, no package import; it starts in milliseconds and stays small.
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", script, self._mountpoint, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.pid = self._helper.pid
        # The OOM killer's first choice: its death frees what is pinned, and costs nobody anything.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("1000")

    def _run(self) -> None:
        while (request := self._next()) is not None:
            if isinstance(request, threading.Event):
                request.set()
                continue
            while True:
                try:
                    self._serve(request)
                    break
                except (OSError, ValueError) as error:
                    if self._stopping or not self._recovered(error):
                        return

    def _next(self) -> dict[str, Any] | threading.Event | None:
        while self._lost and self._queue.empty():
            path, ranges = next(iter(self._lost.items()))
            if ranges:
                offset, length = ranges.pop()
                return {"op": "lock", "path": path, "offset": offset, "length": length}
            del self._lost[path]
        return self._queue.get()

    def _serve(self, request: dict[str, Any]) -> None:
        path, operation = request["path"], request["op"]
        reply = self._call(request)
        if operation == "attach":
            self._locked.setdefault(path, [])
            self.on_attached(path, reply.get("node"))
        elif operation == "rename":
            self._forget(request["new"])  # as the helper does
            for ranges in (self._locked, self._lost):
                if path in ranges:
                    ranges[request["new"]] = ranges.pop(path)
        elif operation == "detach":
            self._forget(path)
        else:
            self._note(operation, path, request["offset"], request["length"], reply.get("errno", 0))

    def _note(self, operation: str, path: str, offset: int, length: int, code: int) -> None:
        """The helper has locked a range, unless the kernel has refused with `code`, or unlocked it."""
        held = self._locked.setdefault(path, [])
        if operation == "unlock":
            self.locked_bytes -= _take_out(held, offset, length)
            _take_out(self._lost.get(path, []), offset, length)
        elif code:
            self.on_failed(path, offset, length, code)
        else:
            self.locked_bytes += length - _take_out(held, offset, length)
            insort(held, (offset, length))

    def _forget(self, path: str) -> None:
        self._lost.pop(path, None)
        self.locked_bytes -= sum(length for _, length in self._locked.pop(path, []))

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        helper = self._helper
        if helper is None or helper.stdin is None or helper.stdout is None:
            raise OSError("the pin helper does not run")
        helper.stdin.write(json.dumps(request) + "\n")
        helper.stdin.flush()
        line = helper.stdout.readline()
        if not line:
            raise OSError("the pin helper ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _recovered(self, error: Exception) -> bool:
        """Starts the helper again and replays what it had; True when it is ready, False when it is given up."""
        while not self._stopping:
            now = time.monotonic()
            self._restarts = [when for when in self._restarts if now - when < RESTARTS_WITHIN_S] + [now]
            if len(self._restarts) > RESTARTS_MAX:
                log.error("the pin helper ended %d times in a minute: nothing is pinned any more (%s)", RESTARTS_MAX, error)
                self.locked_bytes = 0
                self.on_lost(True)
                return False
            log.warning("the pin helper ended (%s): starting it again", error)
            self.on_lost(False)
            try:
                self._restart()
                return True
            except (OSError, ValueError) as again:
                error = again
        return False

    def _restart(self) -> None:
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
        for path, ranges in self._locked.items():
            if ranges:
                self._lost[path] = sorted(self._lost.get(path, []) + ranges)
                self._locked[path] = []
        self.locked_bytes = 0
        self._spawn()
        for path in list(self._locked):
            self._serve({"op": "attach", "path": path})


def _take_out(held: list[tuple[int, int]], start: int, length: int) -> int:
    """Takes a range out of `held`; returns how many bytes of it were there."""
    end = start + length
    first, last = bisect_left(held, (start,)), bisect_left(held, (end,))
    if first and sum(held[first - 1]) > start:
        first -= 1
    if first == last:
        return 0
    low, high = held[first][0], sum(held[last - 1])
    there = sum(size for _, size in held[first:last])
    rest = [(low, start - low)] if low < start else []
    rest += [(end, high - end)] if high > end else []
    held[first:last] = rest
    return there - sum(size for _, size in rest)


class SteerHolder(Holder):
    """Pins live in the page cache, locked through `PinService`."""

    def __init__(self, state: CacheState, pins: PinService) -> None:
        self.state = state
        self.pins = pins

    def skips_trip(self, group: Group, extent: int) -> bool:
        """True for wanted extents: they are locked as soon as they are stored."""
        return bool(group.wanted[extent])

    def stored(self, group: Group, fetch: Fetch) -> None:
        """Locks the extent if the plan wants it."""
        if group.wanted[fetch.extent]:
            self._pin(group, [fetch.extent])

    def pin_ready(self, group: Group) -> None:
        """Locks the wanted extents that are ready or touched."""
        present = (READY, TOUCHED)
        by_rank = zip(group.order.extent_at, group.status, strict=True)
        self._pin(group, [extent for extent, state in by_rank if state in present and group.wanted[extent]])

    def _pin(self, group: Group, extents: list[int]) -> None:
        for extent in extents:
            group.set_state(extent, PINNED)
            for table in (group.trips, group.ready, group.touched):
                table.pop(extent, None)
            group.pinned_bytes += group.length_of(group.member_of(extent), extent)
        for member, offset, length in self.state.ranges(group, extents):
            self.pins.lock(member.path, offset, length)

    def release(self, group: Group, extents: list[int]) -> None:
        """Unlocks; the data stays until the evictor wants the room."""
        for extent in extents:
            if group.state(extent) == PINNED:
                group.set_state(extent, TOUCHED)
                group.touched[extent] = 0
                group.pinned_bytes -= group.length_of(group.member_of(extent), extent)
        for member, offset, length in self.state.ranges(group, extents):
            self.pins.unlock(member.path, offset, length)

    def pinned(self, group: Group) -> list[int]:
        """Extents in state PINNED."""
        return [group.order.extent_at[rank] for rank, state in enumerate(group.status) if state == PINNED]


class ArenaHolder(Holder):
    """Pins live in anonymous memory, one region an extent; regions are read into directly with O_DIRECT.

    Every pass goes through the window, extents are held when they pass by next, and the core says what leaves.
    `regions`: what is held, by group and extent.
    """

    def __init__(self, state: CacheState, on_plan: Callable[[], None]) -> None:
        self.state = state
        self.core = Steering(state.budget_bytes, self._evicted, on_plan)
        self.regions: dict[tuple[str, int], MemoryRegion] = {}

    def brings_region(self, group: Group, extent: int) -> bool:
        """True for extents that are held, or will be."""
        return self.core.holds(group.key, extent) or self.core.wants(group.key, extent)

    def region(self, group: Group, extent: int, verdict: int) -> MemoryRegion | None:
        """Returns the held copy, or a new region."""
        if verdict == HIT:
            return self.regions[(group.key, extent)]
        return MemoryRegion(group.extent_bytes) if verdict == KEPT else None

    def keep(self, group: Group, extent: int, region: MemoryRegion) -> None:
        """Holds `region`, unless the core has changed its mind while it was read."""
        if self.core.holds(group.key, extent):
            self.regions[(group.key, extent)] = region
            self.state.held_bytes += region.size
            group.pinned_bytes += region.size

    def _evicted(self, key: str, extent: int) -> None:
        """Frees the region; one that is still being read goes when it is."""
        region = self.regions.pop((key, extent), None)
        if region is not None:
            self.state.held_bytes -= region.size
            self.state.groups[key].pinned_bytes -= region.size
            self.state.room.notify()

    def pinned(self, group: Group) -> list[int]:
        """Extents with a region."""
        return [extent for key, extent in self.regions if key == group.key]
