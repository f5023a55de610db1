"""23 requests are recorded as 23, by every way to read or write, hit or miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcache.trace.kernel import FexitSource, SyscallSource
from llmcache.trace.record import HIT, MAP, MISS, READ, UNKNOWN, WRITE
from llmcache.trace.records import BLOCK, DIRECT, EVICT, FILL, MATCHED, STORED
from tests.trace.conftest import BLOCKS, TOUCHED, Recording, drop, warm

pytestmark = pytest.mark.filemap
Record = Callable[..., Recording]

BUFFERED = ["read", "pread", "readv", "preadv", "preadv2", "sendfile", "splice", "uring", "uring-async", "uring-sqpoll"]
WRITES = ["write", "pwrite", "writev", "pwritev", "pwritev2", "pwritev2-at-position", "uring-write", "direct-write"]
APPENDS = ["append", "append-with-place", "append-with-flag"]


@pytest.mark.parametrize("way", [*BUFFERED, "threads", "fork"])
def test_reads_of_cached_blocks_are_hits(way: str, record: Record, file: Path) -> None:
    warm(file)
    found = record(way)
    assert sorted(found.blocks()) == TOUCHED, found
    assert found.requests == 23
    assert set(found.accesses["miss"]) == {HIT}
    assert set(found.accesses["op"]) == {READ}
    assert not len(found.kind(FILL))
    assert found.lost == 0


@pytest.mark.parametrize("way", [*BUFFERED, "threads", "fork"])
def test_reads_from_storage_are_misses(way: str, record: Record) -> None:
    found = record(way)
    assert sorted(found.blocks()) == TOUCHED, found
    assert sorted(found.blocks(miss=MISS)) == TOUCHED, found
    assert set(TOUCHED) <= set(found.blocks(FILL))
    assert found.requests == 23


@pytest.mark.parametrize("way", ["direct", "uring-direct"])
def test_direct_reads_are_misses_without_fills(way: str, record: Record, file: Path) -> None:
    found = record(way)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["flags"]) == {DIRECT}
    assert set(found.accesses["miss"]) == {MISS}
    assert not len(found.kind(FILL))


def test_faults_on_cached_pages_map_a_window_each(record: Record, file: Path) -> None:
    warm(file)
    found = record("mmap")
    assert found.requests == 23, found
    assert set(found.accesses["op"]) == {MAP}
    assert set(found.accesses["miss"]) == {HIT}
    assert set(TOUCHED) <= set(found.blocks())
    assert len(found.blocks()) <= 23 * 16


def test_faults_on_missing_pages_wait_for_storage(record: Record) -> None:
    found = record("mmap")
    assert TOUCHED[0] in found.blocks(miss=MISS), found
    assert set(TOUCHED) <= set(found.blocks())


@pytest.mark.parametrize("way", WRITES)
def test_writes_are_recorded(way: str, record: Record) -> None:
    found = record(way, writes=True)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["op"]) == {WRITE}
    assert found.requests == 23


@pytest.mark.parametrize("way", WRITES)
def test_writes_are_not_recorded_unless_requested(way: str, record: Record) -> None:
    assert not len(record(way).accesses)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("way", APPENDS)
def test_appended_pages_are_not_fills(way: str, writes: bool, record: Record) -> None:
    found = record(way, writes=writes)
    assert not len(found.kind(FILL)), found
    assert found.blocks() == (list(range(BLOCKS, BLOCKS + 23)) if writes else [])


def test_stores_through_a_mapping_are_writes(record: Record, file: Path) -> None:
    warm(file)
    found = record("msync", writes=True)
    stores = found.accesses[found.accesses["op"] == WRITE]
    assert [int(first) for first in stores["first"]] == TOUCHED, found
    assert set(stores["count"]) == {1}
    assert set(stores["flags"]) == {STORED}


def test_block_requests_name_the_file_and_take_time(record: Record, file: Path) -> None:
    # On some virtual machines, BPF programs do not run in interrupts of process 1, so a completion may be missed.
    for _ in range(4):
        drop(file)
        found = record("pread", block=True)
        if set(TOUCHED) <= set(found.blocks(BLOCK)):
            break
    requests = found.kind(BLOCK)
    assert set(TOUCHED) <= set(found.blocks(BLOCK)), found
    assert set(requests["flags"]) == {MATCHED}
    assert (requests["aux"] > 0).all()
    assert set(requests["miss"]) == {UNKNOWN}


def test_evictions_of_accessed_files_are_recorded(record: Record, file: Path) -> None:
    warm(file)
    found = record("direct-write", writes=True)
    # Direct writes drop the pages. The first eviction precedes all accesses of the file, so it is not recorded.
    assert found.blocks(EVICT) == TOUCHED[1:], found


@pytest.mark.fexit
@pytest.mark.parametrize("way", ["read", "pread", "readv", "uring", "mmap"])
def test_the_fexit_tier_distinguishes_hits_and_misses(way: str, record: Record, file: Path) -> None:
    found = record(way, kind=FexitSource)
    assert TOUCHED[0] in found.blocks(miss=MISS), found
    assert set(TOUCHED) <= set(found.blocks())
    warm(file)
    found = record(way, kind=FexitSource)
    assert set(TOUCHED) <= set(found.blocks(miss=HIT)) and not found.blocks(miss=MISS), found
    assert found.requests == 23


@pytest.mark.parametrize("way", ["read", "pread", "readv", "preadv", "preadv2", "threads", "direct"])
def test_the_system_call_tier_sees_requests_but_no_misses(way: str, record: Record, file: Path) -> None:
    found = record(way, kind=SyscallSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["miss"]) == {UNKNOWN}
    drop(file)
