"""In-place mode without a mount: page table ranges, clients and their mappings, reading in and dropping pages."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.space import HUGE_BYTES
from llmcache.mount import syscalls
from llmcache.mount.backends.files import READAHEAD_BYTES, Files, MappedFile, Program, SlotAllocator, read_ahead
from llmcache.mount.readahead import read_ahead_file
from llmcache.mount.source.backing import Backing
from llmcache.storage import cached_blocks, has_cachestat

SIZE = 5 * HUGE_BYTES + 12345


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_places_never_overlap_and_are_reused(steps: list[tuple[bool, int]]) -> None:
    places, taken = SlotAllocator(100), dict[int, int]()
    for gives, count in steps:
        if gives and taken:
            first = sorted(taken)[count % len(taken)]
            places.give(first)
            del taken[first]
            continue
        found = places.take(count)
        held = [place for start, length in taken.items() for place in range(start, start + length)]
        if found is None:
            free = "".join("x" if place in held else "." for place in range(100))
            assert "." * count not in free
        else:
            assert 0 <= found <= 100 - count and not set(held) & set(range(found, found + count))
            taken[found] = count


@pytest.fixture(params=["cachestat", "mincore"])
def mapping(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MappedFile]:
    """An open file without cached pages, whose pages are counted in both ways."""
    if request.param == "mincore":
        monkeypatch.setattr("llmcache.storage._CACHESTAT", 9999)  # as before Linux 6.5
    elif not has_cachestat():
        pytest.skip("the kernel has no cachestat")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    status = os.fstat(fd)
    if cached_blocks(fd, 0, SIZE):
        pytest.skip("this file system keeps pages despite POSIX_FADV_DONTNEED")
    found = MappedFile.of(Backing("/file", fd, status, False))
    yield found
    found.close()


def test_bring_reads_exactly_the_requested_range(mapping: MappedFile) -> None:
    fd = mapping.backing.fd
    assert mapping.populate(HUGE_BYTES, HUGE_BYTES) == HUGE_BYTES
    deadline = time.monotonic() + 30
    while cached_blocks(fd, HUGE_BYTES, HUGE_BYTES) < HUGE_BYTES // 4096 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cached_blocks(fd, 0, SIZE) == HUGE_BYTES // 4096
    assert mapping.populate(HUGE_BYTES, HUGE_BYTES) == 0, "already resident"
    mapping.populate(5 * HUGE_BYTES, 12345)  # the end of the file
    while cached_blocks(fd, 5 * HUGE_BYTES, 12345) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cached_blocks(fd, 5 * HUGE_BYTES, HUGE_BYTES) == 4


def test_cached_pages_larger_than_a_block_count_as_their_blocks(
    mapping: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = mapping.backing.fd
    os.pread(fd, 1, 0)
    found = cached_blocks(fd, 0, SIZE)
    assert 0 < 4 * found <= SIZE // 4096
    monkeypatch.setattr("llmcache.storage.PAGE_BYTES", 16384)
    assert cached_blocks(fd, 0, SIZE) == 4 * found
    assert cached_blocks(fd, 0, 3 * 4096) == 3


def test_read_ahead_reads_exactly_the_requested_range(tmp_path: Path) -> None:
    setting = read_ahead_file(str(tmp_path))
    window = READAHEAD_BYTES if setting is None else max(READAHEAD_BYTES, int(setting.read_text()) << 10)
    path, page = tmp_path / "sparse", mmap.PAGESIZE
    offset, length = 5 * page, 9 * window + 3 * page
    with path.open("wb") as file:
        file.truncate(13 * window)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_ahead(fd, [(offset, length)], window) == length
        deadline = time.monotonic() + 30
        while cached_blocks(fd, offset, length) < length // page and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cached_blocks(fd, offset, length) == length // page
        with mmap.mmap(fd, 13 * window, prot=mmap.PROT_READ) as view:
            assert not any(view[offset : offset + length : page])
        assert cached_blocks(fd, 0, 13 * window) == length // page
        assert read_ahead(fd, [(offset, length)], window) == 0, "already resident"
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapper(path: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], Program]]:
    """Start a program that maps a file as `view` and then runs `code`."""
    begin = (
        "import ctypes, mmap, sys, zlib\n"
        "file = open(sys.argv[1], 'rb'); view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
    )
    command = [sys.executable, "-c", begin + code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        program = Program(process.pid)
        try:
            yield process, program
        finally:
            assert process.stdin is not None
            process.stdin.close()
            program.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give advice on the memory of others")
def test_pages_that_a_program_maps_are_dropped(mapping: MappedFile, tmp_path: Path) -> None:
    """The program reads the same contents again."""
    fd, key = mapping.backing.fd, (mapping.backing.dev, mapping.backing.ino)
    with mapper(tmp_path / "file", "for _ in sys.stdin: print(zlib.crc32(view), flush=True)\n") as (process, program):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        before = process.stdout.readline()
        assert not program.ended and program.has(*key) and program.maps(*key)
        assert cached_blocks(fd, 0, SIZE) == -(-SIZE // 4096)
        assert program.advise(*key, [(0, SIZE)], syscalls.MADV_PAGEOUT)
        left = cached_blocks(fd, 0, SIZE) * mmap.PAGESIZE
        assert left < SIZE // 2 and not program.refused
        process.stdin.write("\n")
        assert process.stdout.readline() == before
        process.stdin.close()
        process.wait()
        assert program.ended


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give advice on the memory of others")
def test_ranges_that_a_program_has_unmapped_are_skipped(mapping: MappedFile, tmp_path: Path) -> None:
    """The ranges after them are dropped nevertheless."""
    code = (
        "print(zlib.crc32(view), flush=True); sys.stdin.readline()\n"
        "mapped = next(line for line in open('/proc/self/maps') if line.endswith(sys.argv[1] + '\\n'))\n"
        "start = int(mapped.split('-')[0], 16)\n"
        "unmap = ctypes.CDLL(None).munmap; unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
        f"unmap(start + {HUGE_BYTES}, {HUGE_BYTES}); print(flush=True); sys.stdin.readline()\n"
    )
    fd, key = mapping.backing.fd, (mapping.backing.dev, mapping.backing.ino)
    with mapper(tmp_path / "file", code) as (process, program):
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        program.look()
        process.stdin.write("\n")
        process.stdout.readline()
        parts = [(at, min(1 << 16, SIZE - at)) for at in range(0, SIZE, 1 << 16)]
        assert program.advise(*key, parts, syscalls.MADV_PAGEOUT) and not program.refused
        behind = SIZE - 2 * HUGE_BYTES
        assert cached_blocks(fd, 2 * HUGE_BYTES, behind) * mmap.PAGESIZE < behind // 2
        assert cached_blocks(fd, HUGE_BYTES, HUGE_BYTES) * mmap.PAGESIZE == HUGE_BYTES


def test_a_program_that_has_closed_a_file_is_removed_from_its_readers() -> None:
    """Otherwise a look at the header counts as a second reader and widens the window to four times its size."""
    peek, loop = (
        Mock(has=lambda *_key: False),
        Mock(has=Mock(side_effect=AssertionError("the last reader is not looked at"))),
    )
    space = Mock(last_pid=2, last_ns=time.monotonic_ns())
    file = Mock(space=space, unplaced=False, programs={1: peek, 2: loop}, looked_ns=0, key=(1, 1))
    files = Mock(in_use={1: file})
    Files._check_use(files)
    files._leave.assert_called_once_with(file, 1)
    del file.programs[1]
    file.looked_ns = 0
    Files._check_use(files)
    assert files._leave.call_count == 1
