"""`llmcache trace -- CMD` records exactly the blocks that a program reads from a file, in any order."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmcache.trace.record import MISS, Trace
from llmcache.units import BLOCK_BYTES
from tests.trace.conftest import PATIENCE_S, drop

pytestmark = pytest.mark.filemap

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SIZE = 32 * MIB
BLOCKS = SIZE // BLOCK_BYTES
MAP_LOCKED = 0x2000

# Reads blocks given on stdin: one line per thread, all threads concurrently.
READ_BLOCKS = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
def work(blocks):
    for block in blocks:
        assert len(os.pread(fd, 4096, 4096 * block)) == 4096
threads = [threading.Thread(target=work, args=([int(word) for word in line.split()],)) for line in sys.stdin]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """A file of random bytes on a disk: a tmpfs has no page cache to observe."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LLMCACHE_TEST_DISK", "/var/tmp")) as directory:
        path = Path(directory) / "data.bin"
        path.write_bytes(os.urandom(SIZE))
        yield path


@contextlib.contextmanager
def prepared(file: Path, cached: bool) -> Iterator[None]:
    """Lock all of the file in the page cache, because some kernels (DAMON) reclaim pages at any time; or drop all of it."""
    if not cached:
        drop(file)
        yield
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED | MAP_LOCKED, mmap.PROT_READ):
        yield


def traced(file: Path, out: Path, stdin: str) -> Trace:
    """Record a program that reads blocks, and return the trace of the file alone."""
    program = [sys.executable, "-c", READ_BLOCKS, str(file)]
    options = ["-o", str(out), "--path", file.name, "--no-writes"]
    command = [sys.executable, "-m", "llmcache", "trace", *options, "--", *program]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    trace = Trace.load(out)
    assert trace.provenance.lost_events == 0
    (recorded,) = (each for each in trace.files if each.id in trace.file)
    assert (recorded.path, recorded.size_bytes) == (str(file), file.stat().st_size)
    return trace


def accessed(trace: Trace) -> list[int]:
    return [
        block for row in zip(trace.first.tolist(), trace.count.tolist(), strict=True) for block in range(row[0], sum(row))
    ]


def patterns() -> dict[str, list[list[int]]]:
    rng = random.Random(11)
    return {
        "random": [[rng.randrange(BLOCKS) for _ in range(5000)]],
        "backwards": [list(range(BLOCKS - 1, 0, -3))],
        "threads, interleaved": [list(range(part, 8000, 4)) for part in range(4)],
    }


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", patterns())
def test_the_trace_has_exactly_the_blocks_that_were_read(file: Path, tmp_path: Path, name: str, cached: bool) -> None:
    blocks_by_thread = patterns()[name]
    lines = "\n".join(" ".join(map(str, blocks)) for blocks in blocks_by_thread)
    with prepared(file, cached):
        trace = traced(file, tmp_path / "t.parquet", lines)
    expected = sorted(block for blocks in blocks_by_thread for block in blocks)
    assert sorted(accessed(trace)) == expected
    if len(blocks_by_thread) == 1:
        assert accessed(trace) == blocks_by_thread[0], "the trace keeps the order of a single thread"
    missed, distinct = int(trace.count[trace.miss == MISS].sum()), len(np.unique(expected))
    evicted = int(trace.provenance.extra.get("evicted_blocks", 0))
    assert missed == 0 if cached else distinct <= missed <= distinct + evicted
