"""Traces for comparing policies, the same on every machine and NumPy, and the misses of libCacheSim on them."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.arrays import Int64s
from llmcache.cache.policies import policy_class

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next_use", "<i8")])
"""The record of oracleGeneral, with an object of one byte per block, so that libCacheSim's cache size is in blocks."""
PERCENT = (2, 5, 10, 25, 50, 75, 90, 100)
"""Cache sizes to compare, in percent of the footprint."""


def numbers(seed: int, length: int) -> NDArray[np.uint64]:
    """Return pseudo-random 64-bit numbers by SplitMix64 (NumPy's own streams may change with its version)."""
    state = (np.arange(1, length + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def below(limit: int, seed: int, length: int) -> Int64s:
    """Return pseudo-random ids 0 .. limit - 1."""
    ids: Int64s = (numbers(seed, length) % np.uint64(limit)).astype(np.int64)
    return ids


def shuffle(seed: int, blocks: int) -> Int64s:
    """Return a pseudo-random order of the ids 0 .. blocks - 1."""
    return np.argsort(numbers(seed, blocks), kind="stable").astype(np.int64)


def zipf(seed: int, blocks: int, length: int) -> Int64s:
    """Return references with a probability of 1 / rank (integer weights, so that all machines round alike)."""
    bounds = np.cumsum(10_000_000 // np.arange(1, blocks + 1))
    ranks = np.searchsorted(bounds, below(int(bounds[-1]), seed, length), side="right")
    return shuffle(seed + 1, blocks)[ranks]


@cache
def traces() -> dict[str, Int64s]:
    """Return traces of single references to ids below 1500: random, skewed, looping, scanning and mixed."""
    loop = np.arange(1000)
    scans = [np.concatenate([zipf(seed, 600, 700), np.arange(600, 1500)]) for seed in range(10, 22)]
    nested = [np.concatenate([np.tile(np.arange(150), 4), np.arange(150, 1150)]) for _ in range(12)]
    hot = np.insert(loop, np.sort(below(1000, 30, 200)), 1000 + below(40, 31, 200))
    return {
        "random": below(1200, 1, 20_000),
        "zipf": zipf(2, 1500, 25_000),
        "loop": np.tile(loop, 15),
        "zipf and scans": np.concatenate(scans),
        "loop within a loop": np.concatenate(nested),
        "shuffled laps": np.concatenate([shuffle(seed, 800) for seed in range(40, 55)]),
        "loop and hot blocks": np.tile(hot, 12),
        "model switch": np.concatenate([np.tile(np.arange(500), 12), np.tile(np.arange(500, 1400), 10)]),
    }


def sizes(ids: Int64s) -> list[int]:
    """Return cache sizes in blocks; at least 20, below which libCacheSim's S3-FIFO admits nothing."""
    footprint = len(np.unique(ids))
    return [max(20, footprint * percent // 100) for percent in PERCENT]


def hits(policy: str, ids: Int64s, capacity: int) -> int:
    return int(policy_class(policy)(capacity, int(ids.max()) + 1).replay(ids, np.ones_like(ids)).sum())


def next_uses(ids: Int64s) -> Int64s:
    """Return for each reference the index of the next one to the same block, or -1."""
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    found = np.full(len(ids), -1, np.int64)
    found[order[:-1][same]] = order[1:][same]
    return found


def libcachesim_misses(policy: str, ids: Int64s, capacity: int, folder: Path) -> int:
    """Return the misses of libCacheSim's `policy`; skip the test if this machine has no wheel of libcachesim (dev extra)."""
    if platform.machine() != "x86_64":
        pytest.skip("libcachesim has wheels for x86-64 only")
    import libcachesim

    records = np.zeros(len(ids), RECORD)
    records["object"] = ids + 1
    records["size"] = 1
    uses = next_uses(ids)
    records["next_use"] = np.where(uses >= 0, uses + 1, -1)  # libCacheSim's clock starts at 1
    path = folder / "trace.oracleGeneral"
    records.tofile(path)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    ratio, _ = getattr(libcachesim, policy)(cache_size=capacity, hashpower=12).process_trace(reader)
    misses: int = round(ratio * len(ids))
    return misses
