"""The tier without BPF counts 23 requests as 23, in the ways of access that it claims to see."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcache.trace.faults import FaultSource
from llmcache.trace.record import MAP, UNKNOWN, WRITE
from tests.trace.conftest import TOUCHED, Recording, warm

Record = Callable[..., Recording]


@pytest.fixture(autouse=True)
def works_here() -> None:
    if reason := FaultSource.probe():
        pytest.skip(reason)
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")


@pytest.mark.parametrize("way", ["read", "pread", "readv", "preadv", "preadv2", "sendfile", "splice", "threads", "fork"])
def test_strace_sees_calls(way: str, record: Record) -> None:
    found = record(way, FaultSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["miss"]) == {UNKNOWN}


@pytest.mark.parametrize("way", ["write", "pwrite", "writev", "pwritev", "pwritev2"])
def test_strace_sees_writes_if_requested(way: str, record: Record) -> None:
    found = record(way, FaultSource, writes=True)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["op"]) == {WRITE}
    assert not record(way, FaultSource, writes=False).blocks()


def test_faults_name_the_exact_page(record: Record, file: Path) -> None:
    warm(file)
    found = record("mmap", FaultSource)
    assert sorted(found.blocks()) == TOUCHED, found
    assert set(found.accesses["op"]) == {MAP}
