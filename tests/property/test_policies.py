"""The contract on every policy, Belady against all possible choices, and the hit ratio of our own policy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.cache.plan import AUTO
from llmcache.cache.policies import POLICIES, policy_class
from llmcache.cache.simulate import simulate
from llmcache.trace.record import Trace
from tests.conftest import examples
from tests.property.contract import Case, cases, clauses, long_case

OURS = "llmcache"
LRU_MARGIN = 0.01
# the first example may take seconds to compile
SETTINGS = settings(max_examples=examples(60), deadline=None)


@pytest.mark.parametrize("name", POLICIES)
@SETTINGS
@given(case=cases())
def test_contract_on_short_traces(name: str, case: Case) -> None:
    for clause in clauses(name):
        clause(name, case)


@pytest.mark.parametrize("capacity", [20, 320])
@pytest.mark.parametrize("name", POLICIES)
def test_contract_on_long_traces(name: str, capacity: int) -> None:
    for clause in clauses(name):
        clause(name, long_case(capacity, seed=capacity))


def test_a_cache_without_room_and_a_second_call_of_belady_are_refused() -> None:
    for capacity, blocks, name in ((0, 5, "capacity"), (5, 0, "blocks")):
        with pytest.raises(ValueError, match=name):
            policy_class("lru")(capacity, blocks)
    policy = policy_class("belady")(4, 8)
    policy.replay(np.array([0]), np.array([8]))
    with pytest.raises(ValueError, match="replay: Belady needs the whole trace in one call"):
        policy.replay(np.array([0]), np.array([8]))


@SETTINGS
@given(references=st.lists(st.integers(0, 5), min_size=1, max_size=14), capacity=st.integers(1, 4))
def test_belady_has_the_most_hits_of_all_possible_choices(references: list[int], capacity: int) -> None:
    @cache
    def most_hits(now: int, resident: frozenset[int]) -> int:
        if now == len(references):
            return 0
        block = references[now]
        if block in resident:
            return 1 + most_hits(now + 1, resident)
        if len(resident) < capacity:
            return most_hits(now + 1, resident | {block})
        return max(most_hits(now + 1, resident - {victim} | {block}) for victim in resident)

    case = Case(capacity, 6, tuple((block, 1) for block in references))
    assert sum(case.hits("belady")) == most_hits(0, frozenset())


SAMPLES = Path(__file__).resolve().parents[2] / "traces"
LOOPS = (
    *("ai_notes", "ai_translate", "text_classification", "text_embedder", "interleave", "noisy", "model_switch"),
    *("moe_routing", "multi_loop", "prefill_decode", "llama-arena", "llama-mmap", "llama-no-mmap"),
)


def test_llmcache_on_the_samples_is_hardly_below_lru_and_good_on_loops() -> None:
    found: dict[str, float] = {}
    for path in sorted(SAMPLES.glob("*.parquet")):
        rows = simulate(Trace.load(path), ("lru", OURS), AUTO)
        lru, ours = ([row.hit_ratio for row in rows if row.policy == name] for name in ("lru", OURS))
        assert all(our > its - LRU_MARGIN for our, its in zip(ours, lru, strict=True)), path.stem
        found[path.stem] = fmean(ours)
    assert fmean(found[name] for name in LOOPS) > 0.455
