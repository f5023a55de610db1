"""What policies are made of: the heap and the frequency sketch."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.cache.policies.heaps import ITEM, grow, new_heap, push, take_out
from llmcache.cache.policies.sketch import MOST, SAMPLE, estimate, new_sketch, note

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
