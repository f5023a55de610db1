"""Sampled accessed bits show exactly the pages that the given processes touched in the interval."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmcache.arrays import Records
from llmcache.bpf.pagetables import Unreadable
from llmcache.procfs import descendants, mappings
from llmcache.trace import rerefs
from llmcache.trace.kernel import FilemapSource
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.records import SAMPLED, Scope
from llmcache.trace.rerefs import Sampler
from llmcache.units import BLOCK_BYTES
from tests.mount.live import wait_for
from tests.trace.conftest import BLOCKS, TOUCHED, warm

pytestmark = [
    pytest.mark.filemap,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="page tables of x86-64 are read"),
]
TRIES = 50  # DAMON and reclaim may clear an accessed bit, but never set one


@contextmanager
def mapped(file: Path, offset: int = 0) -> Iterator[Callable[[int], int]]:
    """Yield a function that touches a block of the file; all its pages are mapped."""
    warm(file)
    with file.open("rb") as handle:
        size = BLOCKS * BLOCK_BYTES - offset
        memory = mmap.mmap(handle.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        for at in range(0, size, BLOCK_BYTES):
            assert memory[at] >= 0
        yield lambda block: memory[block * BLOCK_BYTES - offset]
        memory.close()


def blocks(records: Records, file: Path) -> list[int]:
    own = records[(records["inode"] == file.stat().st_ino) & (records["dev"] == file.stat().st_dev)]
    assert set(own["kind"]) <= {SAMPLED}
    assert set(own["op"]) <= {MAP}
    assert set(own["miss"]) <= {UNKNOWN}
    assert set(own["pid"]) <= {os.getpid()}
    return [block for row in own for block in range(int(row["first"]), int(row["first"] + row["count"]))]


@pytest.mark.parametrize("offset", [0, 3 * BLOCK_BYTES])
def test_a_sample_has_the_pages_touched_since_the_last_one(file: Path, offset: int) -> None:
    with mapped(file, offset) as touch:
        sampler = Sampler([os.getpid()], 0.0)
        for _ in range(2):
            # The processor does not mark a page whose translation it has cached, so a page may take several tries.
            seen: set[int] = set()
            for _ in range(TRIES):
                seen |= set(touched_blocks(sampler, touch, file))
                if seen == set(TOUCHED):
                    break
            assert seen == set(TOUCHED)
            assert blocks(sampler.sample(), file) == []
        sampler.close()


def touched_blocks(sampler: Sampler, touch: Callable[[int], int], file: Path) -> list[int]:
    for block in TOUCHED:
        touch(block)
    found = blocks(sampler.sample(), file)
    assert set(found) <= set(TOUCHED)
    return found


def test_samples_are_taken_at_their_interval(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], monotonic_ns=lambda: int(now_s[0] * 1e9))
    monkeypatch.setattr(rerefs, "time", clock)
    with mapped(file) as touch:
        sampler = Sampler([os.getpid()], 0.2)
        found: list[int] = []
        for _ in range(TRIES):
            touch(5)
            now_s[0] += 0.1
            assert not len(sampler.sample())
            now_s[0] += 0.15
            found = blocks(sampler.sample(), file)
            if found:
                break
        assert found == [5]
        sampler.close()


def test_the_records_of_a_source_contain_samples(file: Path) -> None:
    with mapped(file) as touch:
        source = FilemapSource()
        source.start(Scope([os.getpid()], rerefs_s=0.001))
        found = []

        def sampled() -> bool:
            touch(7)
            found.append(source.drain())
            return 7 in blocks(found[-1][found[-1]["kind"] == SAMPLED], file)

        wait_for(sampled, "a sample has the touched page")
        source.stop()
        records = np.concatenate([*found, source.drain()])
        assert source.remarks == []
    assert (np.diff(records["t_ns"].astype(np.int64)) >= 0).all()


def test_an_ended_process_gives_no_samples() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert list(mappings(process.pid)) == []
    sampler = Sampler([process.pid], 0.0)
    assert not len(sampler.sample())
    sampler.close()


def test_children_are_found() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        # /proc lists all children only while none starts or ends
        wait_for(lambda: {os.getpid(), child.pid} <= set(descendants(os.getpid())), "the child is found")
        child.kill()


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(Unreadable, match="aarch64"):
        Sampler([os.getpid()], 1.0)
