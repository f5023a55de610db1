"""Hit counts of policies on the traces of `yardstick`, by size in blocks: `python -m tests.property.golden` writes them.

They were written when the policies agreed with libCacheSim exactly. A change here is a change of what users measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from llmcache.cache.policies import policy_class
from tests.property.yardstick import sizes, traces

PATH = Path(__file__).with_name("golden_hits.json")
POLICIES = ("lru", "clock", "lfu", "arc", "sieve", "s3fifo", "belady")


def hits(name: str, trace: str) -> dict[str, int]:
    """Returns the hits on a trace of single references; also at sizes of a few blocks, which libCacheSim cannot do."""
    ids = traces()[trace]
    found = {}
    for capacity in (1, 3, *sizes(ids)):
        policy = policy_class(name)(capacity, int(ids.max()) + 1)
        found[str(capacity)] = int(policy.replay(ids, np.ones_like(ids)).sum())
    return found


def main() -> None:
    """Writes the counts of all policies."""
    counts = {name: {trace: hits(name, trace) for trace in traces()} for name in POLICIES}
    PATH.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
