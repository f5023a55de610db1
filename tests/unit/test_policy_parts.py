"""What policies are made of: compiled loops, the heap and the frequency sketch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from llmcache.cache.policies import heaps, lists, timeset
from llmcache.cache.policies.base import kernel, told_compiling
from llmcache.cache.policies.heaps import ITEM, grow, new_heap, push, take_out
from llmcache.cache.policies.sketch import MOST, SAMPLE, estimate, new_sketch, note
from llmcache.errors import EnvironmentProblem

STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "take", "least", "grow"]), st.integers(0, 19), st.integers(-9, 9)), max_size=200
)


@settings(deadline=None)  # the first example compiles
@given(STEPS)
def test_the_heap_always_has_the_least_row_on_top(steps: list[tuple[str, int, int]]) -> None:
    rows, at = new_heap(20, 20)
    keys: dict[int, tuple[int, int]] = {}
    size = 0
    for step, item, major in steps:
        if step == "push" and item not in keys:
            keys[item] = (major, -item)
            size = push(rows, at, size, major, -item, item)
        elif step == "grow" and item in keys:
            keys[item] = (keys[item][0] + abs(major), -item)
            grow(rows, at, size, item, keys[item][0])
        elif keys and step in ("take", "least"):
            leaving = min(keys, key=lambda key: keys[key]) if step == "least" or item not in keys else item
            size = take_out(rows, at, size, leaving)
            del keys[leaving]
        assert size == len(keys)
        assert set(np.flatnonzero(at != -1).tolist()) == set(keys)
        if keys:
            assert rows[0, ITEM] == min(keys, key=lambda key: keys[key])


def test_the_sketch_counts_up_to_sixteen() -> None:
    counters, door, sample = new_sketch(100)
    for times in range(1, 30):
        note(counters, door, sample, 5)
        assert estimate(counters, door, 5) == min(times, MOST + 1)  # the doorkeeper knows one more
    assert estimate(counters, door, 6) == 0


def test_the_sketch_is_never_too_low_and_seldom_too_high() -> None:
    counters, door, sample = new_sketch(1000)
    ids = (3000 * np.random.default_rng(3).random(SAMPLE * 1000 - 1) ** 2).astype(np.int64)
    for block in ids.tolist():
        note(counters, door, sample, block)
    true = Counter(ids.tolist())
    above = [estimate(counters, door, block) - min(true[block], MOST + 1) for block in range(3000)]
    assert min(above) >= 0
    assert sum(value > 0 for value in above) < 0.05 * len(above)


def test_a_full_sample_halves_the_counts_and_empties_the_doorkeeper() -> None:
    counters, door, sample = new_sketch(10)
    for _ in range(9):
        note(counters, door, sample, 1)
    for _ in range(SAMPLE * 10 - 10):
        note(counters, door, sample, 2)
    assert (estimate(counters, door, 1), estimate(counters, door, 2)) == (9, 16)
    note(counters, door, sample, 2)
    assert sample[0] == 0
    assert not door.any()
    assert (estimate(counters, door, 1), estimate(counters, door, 2)) == (4, 7)


@pytest.mark.parametrize("module", [heaps, lists, timeset], ids=lambda module: module.__name__)
def test_parts_are_compiled_only_within_the_policies_that_call_them(module: ModuleType) -> None:
    assert [name for name, value in vars(module).items() if isinstance(value, Dispatcher)] == []


def test_it_is_told_when_something_is_compiled_and_when_that_is_done() -> None:
    part: Callable[[float], float] = numba.njit(lambda value: value + 1)
    whole: Callable[[int], int] = numba.njit(lambda value: 2 * part(value))
    told: list[bool] = []
    with told_compiling(told.append):
        assert whole(1) == whole(2) - 2 == 4
    part(1.0)
    assert told == [True, False]


def test_a_kernel_that_can_be_kept_nowhere_names_the_cure() -> None:
    known: dict[str, Callable[[], None]] = {}
    exec("def loop():\n    return", known)  # has no file to be kept beside, nor one to be found again by
    with pytest.raises(EnvironmentProblem) as raised:
        kernel(known["loop"])
    assert "NUMBA_CACHE_DIR" in str(raised.value.hint)
