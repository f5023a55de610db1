"""An engine with its modeled kernel and real files, and threads that read and compare."""

from __future__ import annotations

import functools
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmcache.cache.arbitration import WINDOW_ALLOWANCE_BYTES
from llmcache.mount.backends.fuse import FuseBackend, Reader
from llmcache.mount.daemon.parts import new_engine
from llmcache.mount.source.tree import SourceTree
from tests.property.kernel import CalmGauge, File, Kernel, Pins, open_backing, wait_until

MIB = 1 << 20
BUDGET = 16 * MIB
LOOP = 34 * MIB + 5  # large enough to be fetched in extents
SLACK = 16 * MIB + WINDOW_ALLOWANCE_BYTES


@functools.cache
def _random_bytes() -> bytes:
    return random.Random(0).randbytes(48 * MIB)


def content(size: int, seed: str) -> bytes:
    """Return the bytes of a file: a part of one long random string, chosen by the seed. New bytes would take longer."""
    start = zlib.crc32(seed.encode()) % (8 * MIB)
    assert start + size <= len(_random_bytes())
    return _random_bytes()[start : start + size]


class Rig:
    def __init__(self, directory: Path, mode: str, budget_bytes: int = BUDGET) -> None:
        self.directory = directory
        self.kernel = Kernel()
        self.engine = self.kernel.engine = new_engine(budget_bytes, mode, SourceTree(str(directory)))
        assert isinstance(self.engine.backend, FuseBackend)
        self.reader = self.kernel.reader = Reader(self.engine, self.engine.backend)
        self.content: dict[str, bytes] = {}

    def file(self, name: str, size: int, seed: int = 0, attached: bool = True) -> File:
        """Create and open a file of random bytes; reads before it is attached are not counted."""
        self.write(name, content(size, f"{name}{seed}"))
        file = self.kernel.add(open_backing(f"/{name}", self.directory / name))
        self.kernel.open(file)
        if attached:
            wait_until(lambda: self.node_known(file), "the file is attached")
        return file

    def write(self, name: str, data: bytes) -> None:
        """Write new content to storage, without notifying the engine."""
        self.content[f"/{name}"] = data
        with open(self.directory / name, "r+b" if (self.directory / name).exists() else "wb") as stream:
            stream.write(data)

    def expected(self, file: File, offset: int, size: int) -> bytes:
        return self.content[file.backing.path][offset : offset + size]

    def check(self, file: File, offset: int, size: int) -> None:
        got = self.kernel.read(file, offset, size)
        assert got == self.expected(file, offset, size), f"wrong bytes in {file.backing.path} at {offset}+{size}"

    def sweep(self, file: File, passes: int = 1) -> None:
        """Read and compare the whole file `passes` times."""
        for _ in range(passes):
            for offset in range(0, file.backing.size, 256 << 10):
                self.check(file, offset, 256 << 10)

    def node_known(self, file: File) -> bool:
        """Return whether extents of `file` can be fetched."""
        owner = self.engine.state.owners.get(file.backing)
        return owner is not None and owner[1].node is not None

    def until_pinned(self, file: File) -> None:
        """Read passes over a loop until part of it is pinned; a pin that missed one pass is made in the next."""
        wait_until(lambda: self._swept(file) and self.engine.state.memory.pinned_bytes > 0, "something is pinned")

    def _swept(self, file: File) -> bool:
        self.sweep(file)
        return True

    def bound_holds(self) -> None:
        """Check that the engine counts at least as many resident bytes as the kernel has."""
        with self.engine.state.lock, self.kernel.lock:
            resident = self.kernel.resident_bytes()
            assert self.engine.state.memory.resident_bytes >= resident

    def charges_add_up(self) -> None:
        """Check that every accounted byte is in a loop space or a pending invalidation, once no eviction runs."""
        wait_until(self._adds_up, "charges add up")

    def _adds_up(self) -> bool:
        state = self.engine.state
        with state.lock:
            state.memory.verify(state.spaces.values())
            return state.memory.pending_bytes == sum(each.charged for each in state.memory.pending)

    def settled(self) -> bool:
        """Return whether memory is within the budget and no load or eviction runs."""
        state = self.engine.state
        with state.lock, self.kernel.lock:
            memory = state.memory
            held = self.kernel.resident_bytes() + memory.held_bytes + state.pool.count * MIB
            busy = state.jobs or memory.pending or any(space.loading for space in state.spaces.values())
            limit_bytes = memory.budget_bytes + SLACK
            return held <= limit_bytes and memory.used_bytes <= limit_bytes and not busy


@contextmanager
def running(directory: Path, mode: str, monkeypatch: pytest.MonkeyPatch, budget_bytes: int = BUDGET) -> Iterator[Rig]:
    """Yield a rig with a running engine; the pin helper, the gauge and the mount table are replaced."""
    kernels: list[Kernel] = []
    monkeypatch.setattr("llmcache.mount.daemon.parts.PinService", lambda attached, *_: Pins(kernels, attached))
    monkeypatch.setattr("llmcache.mount.engine.engine.PressureGauge", CalmGauge)
    monkeypatch.setattr("llmcache.mount.daemon.parts.find", lambda _point: Mock(dev=0))
    monkeypatch.setattr("llmcache.mount.backends.fuse.start_sentinel", lambda _entry: Mock())
    rig = Rig(directory, mode, budget_bytes)
    kernels.append(rig.kernel)
    rig.engine.start(rig.kernel, "/mount")
    try:
        yield rig
    finally:
        rig.engine.stop()


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run `jobs` concurrently; raise the first failure, and fail if a job does not end."""
    failures: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), "deadlock: a thread does not end"
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


def reader(rig: Rig, files: list[File], seed: int, reads: int) -> Callable[[], None]:
    """Return a thread's work: sequential runs, strides and single pages, each read compared."""

    def work() -> None:
        source = random.Random(seed)
        file, offset, stride, size, left = files[0], 0, 0, 0, 0
        for _ in range(reads):
            if left == 0:
                file = source.choice(files)
                size = source.choice([1, 4096, 5000, 64 << 10, 300 << 10])
                stride = source.choice([size, size, 3 * size + 17, -size, 128 << 10])
                offset, left = source.randrange(file.backing.size), source.randrange(1, 40)
            rig.check(file, offset, size)
            offset = (offset + stride) % file.backing.size
            left -= 1

    return work


def looper(rig: Rig, file: File, rounds: int) -> Callable[[], None]:
    return lambda: rig.sweep(file, rounds)
