"""Miss counts equal libCacheSim's, trace by trace and size by size; the yardstick has its own code for all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmcache.cache.policies import policy_class
from tests.property.yardstick import libcachesim_misses, sizes, traces

EXACT = {
    "lru": "LRU",
    "clock": "Clock",
    "lfu": "LFU",
    "arc": "ARC",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "belady": "Belady",
}
"""Policies without any difference, and what libCacheSim calls them."""


@pytest.mark.parametrize("trace", traces())
@pytest.mark.parametrize("name", EXACT)
def test_misses_are_those_of_libcachesim(name: str, trace: str, tmp_path: Path) -> None:
    ids = traces()[trace]
    ours, theirs = {}, {}
    for capacity in sizes(ids):
        policy = policy_class(name)(capacity, int(ids.max()) + 1)
        ours[capacity] = len(ids) - int(policy.replay(ids, np.ones_like(ids)).sum())
        theirs[capacity] = libcachesim_misses(EXACT[name], ids, capacity, tmp_path)
    assert ours == theirs
