"""The contract, on every policy of the table; Belady against all that could be kept; how good our own policy is."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from llmcache.cache.plan import AUTO
from llmcache.cache.policies import POLICIES, policy_class
from llmcache.cache.policies.base import Policy
from llmcache.errors import UsageError
from tests.conftest import examples
from tests.property.contract import ALWAYS, DIFFERENT, ONLINE, Case, Clause, cases, clauses, long_case
from tools.bench.policies import OURS, Ratios, bars, groups, ratios_of

NAMES = [clause.__name__ for clause in ALWAYS + ONLINE]
# Compiling may take seconds in the first example.
SETTINGS = settings(max_examples=examples(60), deadline=None)


@pytest.mark.parametrize("name", POLICIES)
@SETTINGS
@given(case=cases())
def test_contract_on_short_traces(name: str, case: Case) -> None:
    for clause in clauses(name):
        clause(name, case)


@pytest.mark.parametrize("capacity", [1, 2, 20, 150, 320])
@pytest.mark.parametrize("name", POLICIES)
def test_contract_on_long_traces(name: str, capacity: int) -> None:
    for clause in clauses(name):
        clause(name, long_case(capacity, seed=capacity))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_introduces_itself(name: str) -> None:
    policy = policy_class(name)
    assert issubclass(policy, Policy)
    assert policy.name == name
    assert policy.title
    assert "Source:" in (policy.__doc__ or "") or name.startswith("llmcache")


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_from_the_contract_is_documented(name: str) -> None:
    assert set(DIFFERENT[name]) <= set(NAMES)
    assert "Differs from" in (policy_class(name).__doc__ or "")


def breaks(name: str, clause: Clause, case: Case) -> bool:
    try:
        clause(name, case)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("name", "clause"), [(name, clause) for name in DIFFERENT for clause in DIFFERENT[name]])
def test_no_exception_from_the_contract_is_out_of_date(name: str, clause: str) -> None:
    function = next(function for function in ALWAYS + ONLINE if function.__name__ == clause)
    # Raises NoSuchExample when nothing breaks the clause. The first one will do: nobody reads it.
    found = settings(SETTINGS, max_examples=1000, derandomize=True, phases=[Phase.generate])
    find(cases(), lambda case: breaks(name, function, case), settings=found)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("capacity", "blocks"), [(0, 5), (5, 0)])
def test_no_cache_of_nothing(name: str, capacity: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="capacity" if not capacity else "blocks"):
        policy_class(name)(capacity, blocks)


def test_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="policy: there is no policy 'fifo'"):
        policy_class("fifo")


@SETTINGS
@given(references=st.lists(st.integers(0, 5), min_size=1, max_size=14), capacity=st.integers(1, 4))
def test_belady_has_the_most_hits_of_all_choices(references: list[int], capacity: int) -> None:
    @cache
    def most_hits(now: int, held: frozenset[int]) -> int:
        if now == len(references):
            return 0
        block = references[now]
        if block in held:
            return 1 + most_hits(now + 1, held)
        if len(held) < capacity:
            return most_hits(now + 1, held | {block})
        return max(most_hits(now + 1, held - {victim} | {block}) for victim in held)

    case = Case(capacity, 6, tuple((block, 1) for block in references))
    assert sum(case.hits("belady")) == most_hits(0, frozenset())


def test_belady_takes_the_whole_trace_in_one_call() -> None:
    policy = policy_class("belady")(4, 8)
    policy.replay(np.array([0]), np.array([8]))
    with pytest.raises(ValueError, match="replay: Belady takes the whole trace in one call"):
        policy.replay(np.array([0]), np.array([8]))


RIVALS = ("lru", "belady")


@pytest.fixture(scope="module")
def ratios() -> Ratios:
    """Over every other size of those that the benchmark has: the largest, the whole footprint, is everybody's."""
    return ratios_of((*RIVALS, OURS), sizes=AUTO[::2])


@pytest.mark.long
def test_every_bar_is_reached(ratios: Ratios) -> None:
    missed = [bar for bar in bars({"ratios": ratios, "groups": groups(ratios)}) if not bar.passed]
    assert not missed
