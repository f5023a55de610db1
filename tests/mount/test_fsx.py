"""Random operations on a file of a mount, compared with a bytearray, as fsx does.

Whatever is written, truncated, mapped, renamed, pinned, evicted or warmed up, every read returns the right bytes: through
the mount, behind it, and by another name. test_posix_write.py tests each operation by itself; here they interact, on
files large enough to be cached in extents and read in passes until they become loops, while the budget changes.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from llmcache.mount.client import control
from tests.fuzz.target import Machine
from tests.mount.live import MIB, Live, live, wait_for

LEAST_BYTES = 33 * MIB  # files from 32 MiB on are cached in extents
MOST_BYTES = 36 * MIB
BLOCK = 4096
BUDGETS = (17, 24, 64)
# Offsets and lengths: any, and those next to the borders of pages, extents and files.
PLACES = st.integers(0, MOST_BYTES) | st.sampled_from([0, 1, BLOCK - 1, MIB - 1, MIB, MIB + BLOCK, 32 * MIB, MOST_BYTES])
SIZES = st.integers(LEAST_BYTES, MOST_BYTES) | st.sampled_from([0, 1, BLOCK, 5 * MIB, 32 * MIB - 1, 32 * MIB, LEAST_BYTES])
LENGTHS = st.integers(1, 3 * BLOCK) | st.sampled_from([1, BLOCK, 128 << 10, 300_007, MIB, 2 * MIB + 17])
SEEDS = st.integers(0, 1 << 30)

_mounted: list[Live] = []
_numbers = itertools.count()


@contextlib.contextmanager
def mounted(mode: str) -> Iterator[None]:
    """Mount a directory for all machines, which use files of different names."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        with live(source, Path(name) / "mnt", "32Mi", "--mode", mode) as mount:
            _mounted.append(mount)
            try:
                yield
            finally:
                _mounted.clear()


class Fsx(RuleBasedStateMachine):
    """A spill file, its descriptors, and the bytes that it must contain.

    While a descriptor is open for writing, its pages are cached one by one; otherwise the file can become a loop. It may
    have a hard link, which the mount treats as another file with the same bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        (self.mount,) = _mounted
        self.name = f"{next(_numbers)}.kv"
        self.content = bytearray()
        self.fd = self.writer = -1
        self.link, self.linked = "", -1  # its other name, and a descriptor opened by that name

    @initialize(size=st.integers(LEAST_BYTES, MOST_BYTES), seed=SEEDS)
    def make(self, size: int, seed: int) -> None:
        self.content[:] = random.Random(seed).randbytes(size)
        self.path.write_bytes(self.content)
        self._open()

    def teardown(self) -> None:
        if self.link:
            self.unlink()
        self._close()
        counters = control.request(str(self.mount.mountpoint), {"op": "stats"})
        assert not [name for name, value in counters.items() if isinstance(value, int) and value < 0], counters
        for root in (self.mount.mountpoint, self.mount.source):
            (root / self.name).unlink(missing_ok=True)

    @property
    def path(self) -> Path:
        return self.mount.mountpoint / self.name

    @property
    def behind(self) -> Path:
        return self.mount.source / self.name

    def _open(self) -> None:
        self.fd = os.open(self.path, os.O_RDONLY)

    def _close(self) -> None:
        for fd in (self.fd, self.writer):
            if fd >= 0:
                os.close(fd)
        self.fd = self.writer = -1

    def _unlink(self) -> None:
        if self.link:
            os.unlink(self.mount.mountpoint / self.link)
            assert os.pread(self.linked, MOST_BYTES * 2, 0) == self._written()
            os.close(self.linked)
            self.link, self.linked = "", -1

    def _written(self) -> bytearray:
        """Return the bytes; first make data written to a mapping visible under the other name."""
        if self.fd >= 0:
            os.fsync(self.fd)
        return self.content

    def _agrees(self, fd: int, place: int, length: int) -> None:
        """Check a descriptor of one name after a write by the other name, which may take effect later."""
        self._ask(op="warmup", check=True, globs=["*.kv"])  # drops stale pages, unless the file is being written
        wait_for(
            lambda: (
                os.fstat(fd).st_size == len(self.content)
                and os.pread(fd, length, place) == self.content[place : place + length]
            ),
            f"{place}+{length} has the bytes written by the other name",
        )

    @contextlib.contextmanager
    def _writing(self, flags: int = 0) -> Iterator[int]:
        """Yield a descriptor for writing: the one that is open, or a temporary one."""
        if self.writer >= 0 and not flags:
            yield self.writer
            return
        fd = os.open(self.path, os.O_RDWR | flags)
        try:
            yield fd
        finally:
            os.close(fd)

    # Changes

    def _put(self, place: int, data: bytes) -> None:
        self.content.extend(bytes(max(0, place + len(data) - len(self.content))))
        self.content[place : place + len(data)] = data

    @rule(place=PLACES, length=LENGTHS, seed=SEEDS)
    def write(self, place: int, length: int, seed: int) -> None:
        data = random.Random(seed).randbytes(length)
        with self._writing() as fd:
            assert os.pwrite(fd, data, place) == length
        self._put(place, data)

    @rule(length=LENGTHS, seed=SEEDS)
    def append(self, length: int, seed: int) -> None:
        data = random.Random(seed).randbytes(length)
        with self._writing(os.O_APPEND) as fd:
            assert os.write(fd, data) == length
        self._put(len(self.content), data)

    @rule(place=PLACES, blocks=st.integers(1, 40), seed=SEEDS)
    def write_direct(self, place: int, blocks: int, seed: int) -> None:
        place -= place % BLOCK
        with self._writing(os.O_DIRECT) as fd, mmap.mmap(-1, blocks * BLOCK) as pages:
            pages[:] = random.Random(seed).randbytes(len(pages))
            assert os.pwrite(fd, pages, place) == len(pages)
            self._put(place, bytes(pages))

    @precondition(lambda self: self.content)
    @rule(share=st.floats(0, 1), length=LENGTHS, seed=SEEDS, flush=st.booleans())
    def write_mapped(self, share: float, length: int, seed: int, flush: bool) -> None:
        place = int(share * (len(self.content) - 1))
        data = random.Random(seed).randbytes(min(length, len(self.content) - place))
        with self._writing() as fd, mmap.mmap(fd, len(self.content)) as pages:
            pages[place : place + len(data)] = data
            if flush:
                pages.flush()
        self._put(place, data)

    @rule(size=SIZES, by_name=st.booleans())
    def truncate(self, size: int, by_name: bool) -> None:
        with self._writing() as fd:
            os.truncate(self.path if by_name else fd, size)
        self.content.extend(bytes(max(0, size - len(self.content))))
        del self.content[size:]

    @rule(place=PLACES, length=LENGTHS)
    def allocate(self, place: int, length: int) -> None:
        with self._writing() as fd:
            os.posix_fallocate(fd, place, length)
        self.content.extend(bytes(max(0, place + length - len(self.content))))

    # The other name

    @precondition(lambda self: not self.link)
    @rule()
    def link_it(self) -> None:
        self.link = f"{next(_numbers)}.kv"
        os.link(self.path, self.mount.mountpoint / self.link)
        self._written()
        self.linked = os.open(self.mount.mountpoint / self.link, os.O_RDONLY)

    @precondition(lambda self: self.link)
    @rule(place=PLACES, length=LENGTHS, seed=SEEDS)
    def write_by_link(self, place: int, length: int, seed: int) -> None:
        data = random.Random(seed).randbytes(length)
        self._written()
        with (self.mount.mountpoint / self.link).open("r+b", buffering=0) as file:
            assert os.pwrite(file.fileno(), data, place) == length
        self._put(place, data)
        with self.path.open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), length, place) == data
        self._agrees(self.fd, place, length)

    @precondition(lambda self: self.link)
    @rule(place=PLACES, length=LENGTHS)
    def read_by_link(self, place: int, length: int) -> None:
        expected = self._written()[place : place + length]
        with (self.mount.mountpoint / self.link).open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), length, place) == expected
        self._agrees(self.linked, place, length)

    @precondition(lambda self: self.link)
    @rule()
    def unlink(self) -> None:
        self._agrees(self.linked, 0, len(self._written()))
        self._unlink()

    # Renames and opens

    @rule()
    def rename(self) -> None:
        old, self.name = self.path, f"{next(_numbers)}.kv"
        os.rename(old, self.path)

    @rule(length=LENGTHS, seed=SEEDS)
    def replace(self, length: int, seed: int) -> None:
        """An open file keeps its bytes after another file takes over its name; then the new file is used."""
        if self.link:
            self.unlink()
        new = self.mount.mountpoint / f"new-{self.name}"
        data = random.Random(seed).randbytes(length)
        new.write_bytes(data)
        os.replace(new, self.path)
        assert os.pread(self.fd, MOST_BYTES * 2, 0) == self.content
        assert os.fstat(self.fd).st_nlink == 0
        self._close()
        self.content[:] = data
        self._open()

    @rule()
    def reopen(self) -> None:
        self._close()
        self._open()

    @precondition(lambda self: self.writer < 0)
    @rule()
    def open_to_write(self) -> None:
        self.writer = os.open(self.path, os.O_RDWR)

    @rule()
    def sync(self) -> None:
        with self._writing() as fd:
            os.fsync(fd)
        assert self.behind.read_bytes() == self.content

    # Reads

    @rule(place=PLACES, length=LENGTHS)
    def read(self, place: int, length: int) -> None:
        assert os.pread(self.fd, length, place) == self.content[place : place + length]

    @rule(place=PLACES, blocks=st.integers(1, 40))
    def read_direct(self, place: int, blocks: int) -> None:
        place -= place % BLOCK
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, blocks * BLOCK) as pages:
                count = os.preadv(fd, [pages], place)
                assert pages[:count] == self.content[place : place + len(pages)]
        finally:
            os.close(fd)

    @precondition(lambda self: self.content)
    @rule(share=st.floats(0, 1), length=LENGTHS)
    def read_mapped(self, share: float, length: int) -> None:
        place = int(share * (len(self.content) - 1))
        with mmap.mmap(self.fd, len(self.content), prot=mmap.PROT_READ) as pages:
            assert pages[place : place + length] == self.content[place : place + length]

    @rule(passes=st.integers(1, 3), chunk=st.sampled_from([65_521, 128 << 10, MIB]))
    def sweep(self, passes: int, chunk: int) -> None:
        """Read in passes, like a model's weights: the file becomes a loop if it is not open for writing."""
        for _ in range(passes):
            for place in range(0, len(self.content) + chunk, chunk):
                assert os.pread(self.fd, chunk, place) == self.content[place : place + chunk]

    @rule(passes=st.integers(1, 3))
    def use_as_a_model(self, passes: int) -> None:
        """Close the writer, warm up the file and read it: extents are pinned or cached, and others are prefetched."""
        self.reopen()
        self.ask("warmup")
        self.sweep(passes, 128 << 10)

    @rule()
    def compare(self) -> None:
        assert os.fstat(self.fd).st_size == os.stat(self.path).st_size == len(self.content)
        assert self.path.read_bytes() == self.content

    # Cache operations

    @rule()
    def forget_pages(self) -> None:
        """Let the kernel drop cached pages, of the mount and of SOURCE."""
        for path in (self.path, self.behind):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    @rule(operation=st.sampled_from(["evict", "warmup"]))
    def ask(self, operation: str) -> None:
        self._ask(op=operation, globs=["*.kv"])

    @rule(mib=st.sampled_from(BUDGETS))
    def resize(self, mib: int) -> None:
        self._ask(op="resize", cache_bytes=mib * MIB)

    def _ask(self, **message: Any) -> None:
        control.request(str(self.mount.mountpoint), message)


def with_mount(mode: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return lambda: mounted(mode)


MACHINES = [Machine(f"fsx-{mode}", Fsx, with_mount(mode)) for mode in ("steer", "arena")]
STEER, ARENA = MACHINES


@pytest.mark.parametrize("mode", ["steer", "arena"])
def test_fsx(mode: str) -> None:
    if mode == "steer" and os.geteuid() != 0:
        pytest.skip("steer needs the right to lock memory")
    with mounted(mode):
        run_state_machine_as_test(Fsx, settings=settings(max_examples=2, stateful_step_count=25))
