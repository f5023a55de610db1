"""Hits stay what they were, by trace and size, and misses equal libCacheSim's; the yardstick has its own code for all of it.

`python -m tests.property.test_policies_libcachesim` writes the counts, which were taken when the policies agreed with
libCacheSim exactly. A change there is a change of what users measured.
"""

from __future__ import annotations

import json
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


PATH = Path(__file__).with_name("golden_hits.json")


def hits(name: str, trace: str) -> dict[str, int]:
    """Returns the hits on a trace of single references; also at sizes of a few blocks, which libCacheSim cannot do."""
    ids = traces()[trace]
    found = {}
    for capacity in (1, 3, *sizes(ids)):
        policy = policy_class(name)(capacity, int(ids.max()) + 1)
        found[str(capacity)] = int(policy.replay(ids, np.ones_like(ids)).sum())
    return found


GOLDEN: dict[str, dict[str, dict[str, int]]] = json.loads(PATH.read_text())


def test_every_policy_and_trace_has_golden_counts() -> None:
    assert set(GOLDEN) == set(EXACT)
    assert all(set(counts) == set(traces()) for counts in GOLDEN.values())


@pytest.mark.parametrize(("name", "trace"), [(name, trace) for name in GOLDEN for trace in GOLDEN[name]])
def test_hits_are_the_golden_ones(name: str, trace: str) -> None:
    assert hits(name, trace) == GOLDEN[name][trace]


def main() -> None:
    """Writes the counts of all policies."""
    counts = {name: {trace: hits(name, trace) for trace in traces()} for name in EXACT}
    PATH.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
