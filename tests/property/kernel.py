"""A small model of the kernel's side of a FUSE mount: page cache, READ, STORE, INVAL, mlock and reclaim.

It follows the rules that the engine depends on: only missing pages are requested; pages of an unanswered READ are locked;
STORE, INVAL and a second reader wait for locked pages; unlocked pages can vanish at any time. Every wait has a limit, so
that a deadlock becomes a failure.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmcache.mount.backends.fuse import Reader
from llmcache.mount.budget import PressureGauge
from llmcache.mount.engine.engine import Engine
from llmcache.mount.source.backing import Backing

PAGE = 4096
READ_AHEAD_PAGES = 32
PATIENCE_S = 120.0  # limit of waiting for a locked page
SETTLE_S = 120.0
HELPER_PID = 4242
READER_PID = 77


@dataclass(eq=False)
class File:
    """A file as the kernel sees it: node id, pages by index, pages of unanswered READs, mlocked pages."""

    node: int
    backing: SlowBacking
    pages: dict[int, bytes] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)


class Kernel:
    """The page cache of one mount; also the engine's notifier."""

    def __init__(self) -> None:
        self.engine: Engine
        self.reader: Reader
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.files: dict[str, File] = {}
        self.refuse_store: Callable[[int, int], bool] = lambda _offset, _length: False
        self.before_store_page: Callable[[], None] = lambda: None
        self.most_requests = 0
        self._requests = 0
        self._nodes = 1000

    def add(self, backing: SlowBacking) -> File:
        """Look a file up; a path that is already known keeps its node and its pages."""
        known = self.files.get(backing.path)
        if known is not None:
            known.backing = backing
            return known
        self._nodes += 1
        file = self.files[backing.path] = File(self._nodes, backing)
        return file

    def open(self, file: File) -> None:
        """Open `file` as a client; its pages are dropped unless the engine allows them to stay."""
        if not self.engine.opened(file.backing, file.backing.path, READER_PID):
            self.invalidate(file.node, 0, 0)

    def resident_bytes(self) -> int:
        """Return the bytes in the page cache. The lock must be held."""
        return sum(len(file.pages) for file in self.files.values()) * PAGE

    def read(self, file: File, offset: int, size: int, pid: int = READER_PID) -> bytes:
        """Return the bytes that a client reads; raise the OSError that it gets."""
        end = min(offset + size, file.backing.size)
        page, parts = offset // PAGE, []
        while page * PAGE < end:
            data = self._page(file, page, -(-file.backing.size // PAGE), pid)
            parts.append(data[max(0, offset - page * PAGE) : min(PAGE, end - page * PAGE)])
            page += 1
        return b"".join(parts)

    def _page(self, file: File, page: int, last: int, pid: int) -> bytes:
        for ahead in (READ_AHEAD_PAGES, 1):  # a failed read-ahead is repeated for the page alone
            with self.lock:
                self._wait_for(file, page)
                if page in file.pages:
                    return file.pages[page]
                run = page
                while run < min(page + ahead, last) and run not in file.pages and run not in file.busy:
                    file.busy.add(run)
                    run += 1
            try:
                return self._request(file, page, run, pid)
            except OSError:
                if ahead == 1:
                    raise
        raise AssertionError("not reached")

    def _request(self, file: File, first: int, end: int, pid: int) -> bytes:
        """Send a READ for some pages, which are locked until the reply."""
        length = (end - first) * PAGE
        memory = ctypes.create_string_buffer(length)
        data: list[bytes] = []
        with self.lock:
            self._requests += 1
            self.most_requests = max(self.most_requests, self._requests)
        try:
            count = self.reader.read(file.backing, ctypes.addressof(memory), length, first * PAGE, pid)
            if count <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            data = [memory.raw[at : at + PAGE] for at in range(0, count, PAGE)]
        finally:
            with self.lock:
                self._requests -= 1
                file.pages.update(zip(range(first, end), data, strict=False))
                file.busy.difference_update(range(first, end))
                self.changed.notify_all()
        return data[0]

    def _wait_for(self, file: File, page: int) -> None:
        if not self.changed.wait_for(lambda: page not in file.busy, PATIENCE_S):
            raise AssertionError(f"deadlock: page {page} of {file.backing.path} stays locked")

    def store(self, nodeid: int, offset: int, address: int, length: int) -> int:
        """FUSE_NOTIFY_STORE: store page by page, each as soon as it is not locked."""
        if self.refuse_store(offset, length):
            return -errno.ENOMEM
        file = self._by_node(nodeid)
        assert offset % PAGE == 0
        for at in range(0, length, PAGE):
            self.before_store_page()
            data = ctypes.string_at(address + at, min(PAGE, length - at))
            page = (offset + at) // PAGE
            with self.lock:
                self._wait_for(file, page)
                if len(data) == PAGE or (page * PAGE + len(data)) == file.backing.size:
                    file.pages[page] = data.ljust(PAGE, b"\0")
        return 0

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """FUSE_NOTIFY_INVAL_INODE: drop whole pages, even mlocked ones; a length of 0 or less means to the end."""
        file = self._by_node(nodeid)
        with self.lock:
            last = (offset + length - 1) // PAGE if length > 0 else max([*file.pages, *file.busy], default=0)
            for page in range(offset // PAGE, last + 1):
                self._wait_for(file, page)
                file.pages.pop(page, None)
        return 0

    def reclaim(self, source: random.Random, pages: int) -> None:
        """Drop some pages that are not mlocked, as the kernel may."""
        with self.lock:
            for file in self.files.values():
                free = [page for page in file.pages if page not in file.pinned]
                for page in source.sample(free, min(pages, len(free))):
                    del file.pages[page]

    def _by_node(self, nodeid: int) -> File:
        return next(file for file in self.files.values() if file.node == nodeid)


class Pins:
    """Replaces PinService: like the helper, it faults pages in through the modeled mount before it locks them."""

    def __init__(self, kernels: list[Kernel], on_attached: Callable[[str, int], None]) -> None:
        self._kernels = kernels
        self.on_attached = on_attached
        self.pid, self.locked_bytes, self.again_bytes = HELPER_PID, 0, 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.pid,)

    @property
    def kernel(self) -> Kernel:
        """The kernel, which is created after the engine that creates this object."""
        return self._kernels[0]

    def start(self, _mountpoint: str) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop like PinService: all locks end with the helper."""
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for file in self.kernel.files.values():
            file.pinned.clear()

    def settle(self, timeout_s: float) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(timeout_s)

    def attach(self, path: str) -> None:
        self._queue.put(lambda: self.on_attached(path, self.kernel.files[path].node))

    def detach(self, path: str) -> None:
        self._queue.put(lambda: self._detach(path))

    def lock(self, path: str, offset: int, length: int) -> None:
        self._queue.put(lambda: self._lock(path, offset, length))

    def unlock(self, path: str, offset: int, length: int) -> None:
        self._queue.put(lambda: self._unlock(path, offset, length))

    def rename(self, old: str, new: str) -> None:
        self._queue.put(lambda: self.kernel.files.update({new: self.kernel.files.pop(old)}))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _lock(self, path: str, offset: int, length: int) -> None:
        file = self.kernel.files[path]
        self.kernel.read(file, offset, length, HELPER_PID)
        with self.kernel.lock:
            file.pinned.update(range(offset // PAGE, -(-(offset + length) // PAGE)))

    def _unlock(self, path: str, offset: int, length: int) -> None:
        with self.kernel.lock:
            self.kernel.files[path].pinned.difference_update(range(offset // PAGE, -(-(offset + length) // PAGE)))

    def _detach(self, path: str) -> None:
        with self.kernel.lock:
            self.kernel.files[path].pinned.clear()


class CalmGauge(PressureGauge):
    """A gauge that never reports memory pressure."""

    def check(self, budget_bytes: int, held_bytes: int) -> None:
        pass

    def limit(self, held_bytes: int, window_bytes: int = 0) -> int:
        return self.budget_bytes


class SlowBacking(Backing):
    """A Backing with slow storage that fails in one range and calls a hook after each read."""

    failing = range(0)
    delays: random.Random | None = None
    after_read: Callable[[int, int], None] = staticmethod(lambda _size, _offset: None)

    def read_into(self, address: int, size: int, offset: int) -> int:
        if self.delays is not None:
            time.sleep(self.delays.random() * 1e-3)
        if offset < self.failing.stop and offset + size > self.failing.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = super().read_into(address, size, offset)
        self.after_read(size, offset)
        return count


def open_backing(path: str, real: Any, writable: bool = False) -> SlowBacking:
    """Return a SlowBacking of the file `real`, with the path `path` below the mount."""
    fd = os.open(real, os.O_RDWR if writable else os.O_RDONLY)
    return SlowBacking(path, fd, os.fstat(fd), writable)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.005)
