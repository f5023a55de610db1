"""The tiers without BPF count 23 requests as 23 too, in the ways that they say they see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcache.trace.record import HIT, MAP, MISS, READ, UNKNOWN, WRITE
from llmcache.trace.sources import strace
from llmcache.trace.sources.base import DIRECT, FILL, Source
from llmcache.trace.sources.faults import FaultSource
from llmcache.trace.sources.perf import PerfSource
from tests.trace.conftest import BLOCKS, TOUCHED, Recording, warm

Record = Callable[..., Recording]
BUFFERED = ["read", "pread", "readv", "preadv", "preadv2", "sendfile", "splice", "uring", "uring-async", "uring-sqpoll"]


@pytest.fixture(autouse=True)
def works_here(request: pytest.FixtureRequest) -> None:
    kind: type[Source] = PerfSource if "perf" in request.node.name else FaultSource
    if reason := kind.probe():
        pytest.skip(reason)
    if kind is FaultSource and not strace.installed():
        pytest.skip("strace is not installed")


@pytest.mark.parametrize("way", [*BUFFERED, "threads", "fork"])
def test_perf_sees_reads_of_cached_blocks(way: str, record: Record, file: Path) -> None:
    warm(file)
    found = record(way, PerfSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["miss"]) == {HIT}
    assert set(found.accesses["op"]) == {READ}
    assert found.requests == 23 and found.lost == 0


@pytest.mark.parametrize("way", ["read", "pread", "preadv", "sendfile", "uring", "threads", "fork"])
def test_perf_sees_what_comes_from_storage(way: str, record: Record) -> None:
    found = record(way, PerfSource)
    assert sorted(found.blocks(miss=MISS)) == TOUCHED, found
    assert set(TOUCHED) <= set(found.blocks(FILL))
    assert found.requests == 23


def test_perf_sees_direct_reads(record: Record) -> None:
    found = record("direct", PerfSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["flags"]) == {DIRECT} and set(found.accesses["miss"]) == {MISS}


def test_perf_sees_page_faults(record: Record, file: Path) -> None:
    warm(file)
    found = record("mmap", PerfSource)
    assert found.requests == 23, found
    assert set(found.accesses["op"]) == {MAP}
    assert set(TOUCHED) <= set(found.blocks()) and len(found.blocks()) <= 23 * 16


@pytest.mark.parametrize("coalesce", [True, False])
def test_perf_sees_every_block_of_a_file_that_is_read_from_end_to_end(coalesce: bool, record: Record, file: Path) -> None:
    found = record("sequential", PerfSource, coalesce=coalesce)
    assert found.blocks() == list(range(BLOCKS)), found


def test_perf_without_follow_sees_threads_but_no_children(record: Record, file: Path) -> None:
    warm(file)
    assert sorted(record("threads", PerfSource, follow=False).blocks()) == TOUCHED
    assert not record("fork", PerfSource, follow=False).blocks()


@pytest.mark.parametrize("way", ["read", "pread", "readv", "preadv", "preadv2", "sendfile", "splice", "threads", "fork"])
def test_strace_sees_calls(way: str, record: Record) -> None:
    found = record(way, FaultSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["miss"]) == {UNKNOWN}


@pytest.mark.parametrize("way", ["write", "pwrite", "writev", "pwritev", "pwritev2"])
def test_strace_sees_writes_where_they_are_wanted(way: str, record: Record) -> None:
    found = record(way, FaultSource, writes=True)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["op"]) == {WRITE}
    assert not record(way, FaultSource, writes=False).blocks()


def test_faults_tell_the_very_page(record: Record, file: Path) -> None:
    warm(file)
    found = record("mmap", FaultSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["op"]) == {MAP}
