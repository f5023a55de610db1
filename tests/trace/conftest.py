"""Fixtures that record a small program while it accesses one file in one way."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.arrays import Records
from llmcache.trace.kernel import FilemapSource
from llmcache.trace.records import ACCESS, POLL_S, Scope, Source
from llmcache.units import BLOCK_BYTES
from tests.mount.live import resident_bytes, wait_for

HERE = Path(__file__).parent
BLOCKS = 1024
TOUCHED = [3 + 40 * i for i in range(23)]
PATIENCE_S = 240.0  # only a hang takes this long
_MAP_LOCKED = 0x2000
_KINDS = ("access", "fill", "evict", "block request", "sampled")
_locked: list[mmap.mmap] = []  # mappings that keep pages locked until the test's file is deleted


@dataclass(frozen=True, repr=False)
class Recording:
    """The records of one file."""

    records: Records
    pid: int
    lost: int
    status: int
    output: str

    def kind(self, kind: int) -> Records:
        rows: Records = self.records[self.records["kind"] == kind]
        return rows

    @property
    def accesses(self) -> Records:
        return self.kind(ACCESS)

    def blocks(self, kind: int = ACCESS, miss: int | None = None) -> list[int]:
        """Return every block of every record of a kind, in the order recorded."""
        rows = self.kind(kind)
        rows = rows if miss is None else rows[rows["miss"] == miss]
        return [int(block) for row in rows for block in range(row["first"], row["first"] + row["count"])]

    @property
    def requests(self) -> int:
        """The number of requests that the accesses represent."""
        return int(self.accesses["aux"].sum())

    def __repr__(self) -> str:
        """Return the records, one per line, for a failed assertion."""
        return "\n".join(f"{_KINDS[row['kind']]} {row}" for row in self.records)


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program of paths.c."""
    compiler = shutil.which("cc") or shutil.which("clang") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("paths") / "paths"
    subprocess.run([compiler, "-O1", "-o", program, HERE / "paths.c", "-lpthread"], check=True)
    return program


@pytest.fixture
def file() -> Iterator[Path]:
    """A file of 1024 blocks on a disk: the page cache of a tmpfs works differently."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LLMCACHE_TEST_DISK", "/var/tmp")) as directory:
        path = Path(directory) / "data"
        path.write_bytes(os.urandom(BLOCKS * BLOCK_BYTES))
        os.sync()
        drop(path)
        if subprocess.run(["stat", "-fc", "%T", path], capture_output=True, text=True).stdout.strip() == "tmpfs":
            pytest.skip("/var/tmp is a tmpfs: LLMCACHE_TEST_DISK names a directory on a disk")
        yield path
        unlock()


def drop(path: Path) -> None:
    """Drop a file from the page cache; retry if the kernel is using a page, for example to age it."""
    unlock()

    def is_gone() -> bool:
        with path.open("rb") as handle:
            os.fdatasync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return resident_bytes(path) == 0

    wait_for(is_gone, f"{path} leaves the page cache")


def warm(path: Path) -> None:
    """Read a file page by page and lock it in the page cache: without large folios, every fault is seen."""
    with path.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while handle.read(BLOCK_BYTES):
            pass
    lock(path)


def warm_but(path: Path, block: int) -> None:
    """Do the same, but leave one block uncached."""

    def is_uncached() -> bool:
        warm(path)
        unlock()
        with path.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        _lock(path, 0, block)
        _lock(path, block + 1, BLOCKS)
        return resident_bytes(path) == (BLOCKS - 1) * BLOCK_BYTES

    wait_for(is_uncached, f"block {block} leaves the page cache")


def lock(path: Path) -> None:
    """Lock a file in the page cache for the test, because some kernels (DAMON) reclaim pages at any time."""
    _lock(path, 0, -(-path.stat().st_size // BLOCK_BYTES))
    assert resident_bytes(path) == path.stat().st_size


def _lock(path: Path, first: int, end: int) -> None:
    if first == end:
        return
    flags, offset = mmap.MAP_SHARED | _MAP_LOCKED, first * BLOCK_BYTES
    length = min(end * BLOCK_BYTES, path.stat().st_size) - offset
    with path.open("rb") as handle:
        _locked.append(mmap.mmap(handle.fileno(), length, flags, mmap.PROT_READ, offset=offset))


def unlock() -> None:
    while _locked:
        _locked.pop().close()


def recorded(
    command: Sequence[str | Path],
    file: Path,
    kind: type[Source] = FilemapSource,
    lazy: bool = False,
    pause: float = POLL_S,
    **scope: Any,
) -> Recording:
    """Return the records of `file` that a source makes while a command runs, which starts after a line on stdin."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        source = kind()
        try:
            source.start(Scope([process.pid], **scope))
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.close()
            records = drained(source, process, lazy, pause)
        finally:
            source.stop()
            process.kill()
        output = process.stdout.read()
    status = file.stat()
    mine = (records["inode"] == status.st_ino) & (records["dev"] == status.st_dev)
    assert (np.diff(records["t_ns"].astype(np.int64)) >= 0).all()
    return Recording(records[mine], process.pid, source.lost, process.returncode, output)


def drained(source: Source, process: subprocess.Popen[Any], lazy: bool = False, pause: float = POLL_S) -> Records:
    """Return everything that `source` records until the processes end; `lazy` leaves it in the ring until then."""
    records = []
    deadline = time.monotonic() + PATIENCE_S
    while (process.poll() is None or source.alive()) and time.monotonic() < deadline:
        if not lazy or process.poll() is not None:
            records.append(source.drain())
        time.sleep(pause)
    source.stop()
    records.append(source.drain())
    return np.concatenate(records)


@pytest.fixture
def record(paths: Path, file: Path) -> Callable[..., Recording]:
    """Return a function that records paths.c accessing the file in one way."""

    def record_way(way: str, kind: type[Source] = FilemapSource, **options: Any) -> Recording:
        found = recorded([paths, file, way], file, kind, **options)
        if found.status == 77:
            pytest.skip(f"this system cannot {way}")
        assert found.status == 0
        return found

    return record_way
