"""Every byte is right by every way of reading, cold and while extents are pinned, evicted and prefetched.

LLMCACHE_SOAK_SECONDS sets how long the load lasts: 2 by default, 600 for a thorough run.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcache.mount.client import control
from llmcache.mount.engine.planner import BATCH_BYTES
from tests.mount.live import (
    MIB,
    OVERHEAD_BYTES,
    WAYS,
    Live,
    by_read,
    finish_reader,
    live,
    random_file,
    readers,
    resident_bytes,
)
from tools.bench.runner import crc_file

# much larger than the budget; sizes around blocks and extents, and odd ones
FILES = {
    "big.bin": 64 * MIB + 1234,
    "mid.bin": 33 * MIB + 3 * 4096 + 17,
    "extent.bin": MIB,
    "extent-1.bin": MIB - 1,
    "extent+1.bin": MIB + 1,
    "block-1.bin": 4095,
    "block.bin": 4096,
    "block+1.bin": 4097,
    "one.bin": 1,
    "empty.bin": 0,
}
CACHE = "36Mi"
LOAD_SECONDS = float(os.environ.get("LLMCACHE_SOAK_SECONDS", "2"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    (directory / "below").mkdir()
    for name, size in FILES.items():
        random_file(directory / name, size)
    random_file(directory / "below" / "deep.bin", 5 * MIB + 5)
    return directory


@pytest.fixture(scope="module")
def digests(source: Path) -> dict[str, str]:
    return {str(path.relative_to(source)): by_read(path) for path in source.rglob("*.bin")}


@pytest.fixture(scope="module")
def checks(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("crcs")
    return {name: crc_file(source / name, directory) for name in ("big.bin", "mid.bin")}


pytestmark = pytest.mark.timeout(LOAD_SECONDS + 240)


@pytest.fixture(params=["steer", "arena"])
def mounted(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Iterator[Live]:
    with live(source, tmp_path / "mnt", CACHE, "--mode", request.param) as mount:
        yield mount


@pytest.mark.parametrize("way", WAYS)
def test_cold_reads(mounted: Live, digests: dict[str, str], way: str) -> None:
    seen = {name: WAYS[way](mounted.mountpoint / name) for name in digests}
    assert seen == digests


def test_all_ways_under_load(mounted: Live, digests: dict[str, str], checks: dict[str, Path]) -> None:
    jobs = [(mounted.mountpoint / name, checks[name], how) for name in checks for how in ("read", "mmap")]
    with readers(jobs, LOAD_SECONDS) as running:
        rounds = 0
        while any(reader.poll() is None for reader in running):
            for name, expected in digests.items():
                for way, read in WAYS.items():
                    assert read(mounted.mountpoint / name) == expected, f"{name} by {way}, round {rounds}"
            rounds += 1
        results = [finish_reader(reader, 120) for reader in running]
    assert all(passes > 0 and wrong == 0 for passes, wrong in results), results


def test_threads_with_strides(mounted: Live, source: Path) -> None:
    """Several threads read the blocks of one file in orders that are neither forward nor backward."""
    size, block = FILES["big.bin"], 300_007
    count = -(-size // block)
    plain, through = (os.open(root / "big.bin", os.O_RDONLY) for root in (source, mounted.mountpoint))
    wrong: list[tuple[int, int]] = []

    def work(stride: int) -> None:
        for step in range(count):
            offset = (step * stride) % count * block
            if os.pread(through, block, offset) != os.pread(plain, block, offset):
                wrong.append((stride, offset))

    threads = [threading.Thread(target=work, args=(stride,)) for stride in (1, -1, 7, 113)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(plain)
    os.close(through)
    assert wrong == []


def test_while_the_budget_changes_and_files_are_warmed_and_evicted(mounted: Live, checks: dict[str, Path]) -> None:
    budgets = (24, 64, 48, 36)
    most_bytes = max(budgets) * MIB + OVERHEAD_BYTES
    samples: list[int] = []

    def used_bytes() -> int:
        return resident_bytes(*(mounted.mountpoint / name for name in FILES)) + mounted.memory_bytes()

    jobs = [(mounted.mountpoint / name, checks[name], how) for name in checks for how in ("read", "mmap", "direct")]
    with readers(jobs, LOAD_SECONDS) as running:
        turn = 0
        while any(reader.poll() is None for reader in running):
            mounted.resize(budgets[turn % len(budgets)] * MIB)
            operation = ("warmup", "evict", "warmup")[turn % 3]
            control.request(str(mounted.mountpoint), {"op": operation, "globs": ["*"]})
            turn += 1
            threading.Event().wait(0.3)
            samples.append(
                min(used_bytes(), used_bytes())
            )  # memory that moves to the page cache between the two counts appears twice
        results = [finish_reader(reader, 120) for reader in running]
    assert all(passes > 0 and wrong == 0 for passes, wrong in results), results
    # Under processor contention, the pages of one eviction batch may leave after new pages have arrived.
    assert statistics.median(samples) <= most_bytes and max(samples) <= most_bytes + BATCH_BYTES, samples
    mounted.resize(48 * MIB)
    assert mounted.stats()["budget_bytes"] == 48 * MIB
