"""The contract of all policies, as functions that raise AssertionError; `test_policies.py` runs them on every policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from llmcache.arrays import Int64s
from llmcache.cache.policies import policy_class
from llmcache.cache.policies.base import Policy


@dataclass(frozen=True)
class Case:
    """A trace of runs (first, count) over the ids 0 .. blocks - 1, and the capacity of a cache for it."""

    capacity: int
    blocks: int
    runs: tuple[tuple[int, int], ...]

    @property
    def first(self) -> Int64s:
        return np.array([first for first, _ in self.runs], np.int64)

    @property
    def count(self) -> Int64s:
        return np.array([count for _, count in self.runs], np.int64)

    def references(self) -> list[int]:
        """Return all references, block by block."""
        return [block for first, count in self.runs for block in range(first, first + count)]

    def policy(self, name: str) -> Policy:
        return policy_class(name)(self.capacity, self.blocks)

    def hits(self, name: str) -> list[int]:
        """Return the hits of each run, from one call of `replay`."""
        return [int(hits) for hits in self.policy(name).replay(self.first, self.count)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Generate runs, single references and repeated stretches over at most 48 blocks."""
    blocks = draw(st.integers(1, 48))
    run = st.integers(0, blocks - 1).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, blocks - first)))
    single = st.tuples(st.integers(0, blocks - 1), st.just(1))
    stretch = st.tuples(st.lists(st.one_of(run, single), min_size=1, max_size=6), st.integers(1, 5))
    runs = [item for items, laps in draw(st.lists(stretch, min_size=1, max_size=5)) for item in items * laps]
    return Case(draw(st.integers(1, blocks + 4)), blocks, tuple(runs))


def long_case(capacity: int, seed: int) -> Case:
    """Return thousands of references over 600 blocks, enough to fill windows and ghosts: a loop, scans and hot blocks."""
    source = np.random.default_rng(seed)
    runs: list[tuple[int, int]] = []
    for _ in range(15):
        runs += [(at, 50) for at in range(0, 300, 50)]
        runs += [(int(block), 1) for block in source.integers(300, 340, 20)]
        start = int(source.integers(340, 560))
        runs.append((start, int(source.integers(1, 40))))
    return Case(capacity, 600, tuple(runs))


def resident_blocks_were_referenced_and_fit(name: str, case: Case) -> None:
    """The resident ids at the end are int64, ascending and unique, at most `capacity` of them."""
    policy = case.policy(name)
    policy.replay(case.first, case.count)
    resident = policy.resident()
    assert resident.dtype == np.int64
    assert len(resident) <= case.capacity
    assert (np.diff(resident) > 0).all()
    assert np.isin(resident, case.references()).all()


def resident_blocks_hit(name: str, case: Case) -> None:
    """A block hits if and only if it was resident; it is resident afterwards, and no other block was added."""
    policy = case.policy(name)
    one = np.ones(1, np.int64)
    before: set[int] = set()
    for block in case.references():
        hit = policy.replay(np.array([block], np.int64), one)
        after = set(policy.resident().tolist())
        assert hit[0] == (block in before)
        assert block in after
        assert after - before <= {block}
        assert len(after) <= case.capacity
        assert hit[0] or len(before) == case.capacity or not before - after, "evicted although the cache was not full"
        before = after


def calls_can_be_split(name: str, case: Case) -> None:
    """A trace cut into several calls of `replay` gives the same hits and the same contents."""
    whole, cut = case.policy(name), case.policy(name)
    hits = whole.replay(case.first, case.count).tolist()
    pieces: list[int] = []
    for part in np.array_split(np.arange(len(case.runs)), 1 + min(len(case.runs), 7)):
        pieces += cut.replay(case.first[part], case.count[part]).tolist()
    assert pieces == hits
    assert cut.resident().tolist() == whole.resident().tolist()
    assert cut.evictions == whole.evictions


def runs_count_as_their_blocks(name: str, case: Case) -> None:
    """The hits of a run are the sum of the hits of its blocks, replayed one by one."""
    blocks = np.array(case.references(), np.int64)
    single = case.policy(name).replay(blocks, np.ones_like(blocks))
    ends = np.cumsum(case.count)
    assert case.hits(name) == [int(single[end - count : end].sum()) for end, count in zip(ends, case.count, strict=True)]


def only_first_references_miss_if_all_fits(name: str, case: Case) -> None:
    """If all blocks fit, only the first reference to each misses, and nothing is evicted."""
    roomy = Case(len(set(case.references())), case.blocks, case.runs)
    policy = roomy.policy(name)
    misses = int((roomy.count - policy.replay(roomy.first, roomy.count)).sum())
    assert misses == roomy.capacity
    assert policy.resident().tolist() == sorted(set(case.references()))


def is_not_better_than_belady(name: str, case: Case) -> None:
    """No policy that inserts every missed block has more hits than Belady."""
    assert sum(case.hits(name)) <= sum(case.hits("belady"))


Clause = Callable[[str, Case], None]

ALWAYS: tuple[Clause, ...] = (
    resident_blocks_were_referenced_and_fit,
    runs_count_as_their_blocks,
    only_first_references_miss_if_all_fits,
    is_not_better_than_belady,
)
ONLINE: tuple[Clause, ...] = (resident_blocks_hit, calls_can_be_split)
"""Clauses for policies that do not need the whole trace at once."""


def clauses(name: str) -> tuple[Clause, ...]:
    """Return the clauses of the contract for the policy `name`."""
    return ALWAYS if policy_class(name).offline else ALWAYS + ONLINE
