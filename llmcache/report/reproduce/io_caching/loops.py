"""The claim about pinned loops (section 4.1 of io_caching): S hits in every pass over a loop of N blocks. Modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmcache.cache.policies import policy_class
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.io_caching.evidence import AWARE, POLICIES

BLOCKS = 1000
PASSES, SETTLED = 220, 200  # the last ones count: without bypass no policy can hit more than N (S-1)/(N-1) for long
SIZES = (100, 250, 500, 750, 900)
LRU = "lru"


@dataclass(frozen=True)
class Loops:
    """Mean hits per settled pass over a loop of `blocks` blocks, by policy and cache size in blocks."""

    blocks: int
    hits: Mapping[str, Mapping[int, float]]


def replayed() -> Loops:
    """Returns the hits of every policy on a loop of 1000 blocks that nothing else disturbs."""
    first, count = np.zeros(PASSES, np.int64), np.full(PASSES, BLOCKS, np.int64)
    hits = {
        policy: {size: float(policy_class(policy)(size, BLOCKS).replay(first, count)[-SETTLED:].mean()) for size in SIZES}
        for policy in POLICIES
    }
    return Loops(BLOCKS, hits)


def pinned(data: Loops, aware: str) -> Finding:
    """Whether a pass hits as many blocks as the cache holds."""
    short = {size: size - hits for size, hits in data.hits[aware].items()}
    worst = max(short.values())
    held = [f"S = {size}: {hits:.4g}" for size, hits in data.hits[aware].items()]
    ours = f"hits per pass, N = {data.blocks}: " + ", ".join(held)
    return Finding(graded(worst <= 0, worst <= 1), ours, {f"S={size}": hits for size, hits in data.hits[aware].items()})


def lru_hits_nothing(data: Loops, variant: str) -> Finding:
    """Whether LRU hits nothing of a loop that is larger than its cache."""
    hits = data.hits[variant]
    none = [value == 0 for value in hits.values()]
    ours = f"hits per pass, N = {data.blocks}: " + ", ".join(f"S = {size}: {value:.4g}" for size, value in hits.items())
    return Finding(graded(all(none), any(none)), ours, {f"S={size}": value for size, value in hits.items()})


CLAIMS: tuple[Claim[Loops], ...] = (
    Claim(
        "pinned-loop",
        "4.1",
        "each cycle yields S cache hits",
        f"S hits in the mean of the last {SETTLED} of {PASSES} passes at every size; partly: at most one block fewer",
        pinned,
        AWARE,
    ),
)
LRU_CLAIMS: tuple[Claim[Loops], ...] = (
    Claim(
        "lru-evicts-loops",
        "4.1",
        "Standard LRU is problematic because loop blocks may be evicted before being reused, leading to repeated I/O",
        "LRU hits nothing of the loop at any size; partly: at some sizes",
        lru_hits_nothing,
        (LRU,),
    ),
)
