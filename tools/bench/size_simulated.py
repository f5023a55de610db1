"""Where stalls begin according to the simulator: a loop replayed through a policy, at the smallest cache that keeps up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from llmcache.cache.policies import policy_class
from llmcache.cache.sizing import Setting, blocks_needed, need
from llmcache.fs.client.advice import mount_cache_bytes
from llmcache.units import BLOCK_BYTES

PASSES = 12
WARMUP = 6  # a policy that learns has seen the loop often enough by then


@dataclass(frozen=True)
class Case:
    """A loop (bytes) on storage (bytes/s) with a time per pass (ns)."""

    name: str
    loop_bytes: int
    bandwidth: int
    period_ns: int

    @property
    def loop_blocks(self) -> int:
        """Return N in blocks."""
        return -(-self.loop_bytes // BLOCK_BYTES)

    @property
    def formula_blocks(self) -> int:
        """Return S of formula (1)."""
        staged = Fraction(self.bandwidth * self.period_ns, 10**9 * BLOCK_BYTES)
        return blocks_needed(self.loop_blocks, staged)

    def setting(self) -> Setting:
        """Return it as the calculator takes it, without a hot set."""
        return Setting(self.bandwidth, self.period_ns, 0)


CASES = (
    Case("watch, section 4.2", 70 * 10**6, 100 * 10**6, 10**8),
    Case("phone, section 4.2", 612 * 10**6, 10**9, 10**8),
    Case("8 tokens/s at 500 MB/s", 300 * 10**6, 500 * 10**6, 125 * 10**6),
    Case("most of it streamed", 500 * 10**6, 10**9, 4 * 10**8),
)


@dataclass(frozen=True)
class Begin:
    """Where stalls begin with one policy, in blocks; all of it is modelled.

    `expected_blocks` is the formula's S; for llmcache, which pays a window from the same budget, what `llmcache size`
    advises for it.
    """

    case: Case
    policy: str
    simulated_blocks: int

    @property
    def expected_blocks(self) -> int:
        """Return where stalls should begin."""
        if self.policy != "llmcache":
            return self.case.formula_blocks
        pinned_bytes = need(self.case.loop_bytes, self.case.setting()).loop_cache_bytes
        return mount_cache_bytes(self.case.loop_bytes, pinned_bytes, 0) // BLOCK_BYTES

    @property
    def difference(self) -> float:
        """Return how far the simulator is from what is expected, as a share of it."""
        return self.simulated_blocks / self.expected_blocks - 1

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "kind": "modelled",
            **asdict(self),
            "loop_blocks": self.case.loop_blocks,
            "formula_blocks": self.case.formula_blocks,
            "expected_blocks": self.expected_blocks,
            "difference": self.difference,
        }


def missed_blocks(policy: str, capacity: int, loop_blocks: int) -> float:
    """Return the blocks that a pass over the loop misses, once the policy has settled."""
    first, count = np.zeros(PASSES, np.int64), np.full(PASSES, loop_blocks, np.int64)
    hits = policy_class(policy)(capacity, loop_blocks).replay(first, count)
    return float(loop_blocks - hits[WARMUP:].mean())


def stalls_begin(policy: str, case: Case) -> Begin:
    """Return the smallest cache with which what a pass misses is read within T: more cache never misses more."""
    low, high = 1, case.loop_blocks
    while low < high:
        middle = (low + high) // 2
        if missed_blocks(policy, middle, case.loop_blocks) * BLOCK_BYTES * 10**9 <= case.bandwidth * case.period_ns:
            high = middle
        else:
            low = middle + 1
    return Begin(case, policy, low)


def simulated(policies: Sequence[str], cases: Sequence[Case] = CASES) -> list[Begin]:
    """Return where stalls begin for each policy and case."""
    return [stalls_begin(policy, case) for case in cases for policy in policies]
