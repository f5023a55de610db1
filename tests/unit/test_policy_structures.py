"""What policies are made of: lists, heap, set of times and sketch do what Python's do; compiled loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from llmcache.cache.policies import structures
from llmcache.cache.policies.base import kernel, told_compiling
from llmcache.cache.policies.structures import ITEM, MOST, SAMPLE, estimate, grow, new_heap, new_sketch, note, push, take_out
from llmcache.errors import EnvironmentProblem

BLOCKS = 6
HEADS = (BLOCKS, BLOCKS + 1)
OPERATIONS = ("push_front", "push_back", "remove", "move_to_front")
LIST_STEPS = st.tuples(st.sampled_from(OPERATIONS), st.sampled_from((0, 1)), st.integers(0, BLOCKS - 1))


def members(links: structures.Links, head: int) -> list[int]:
    found, block = [], structures.front(links, head)
    while block != head:
        found.append(block)
        block = structures.front(links, block)
    return found


def apply(links: structures.Links, model: list[list[int]], step: tuple[str, int, int]) -> None:
    """Does one operation on both, where it is allowed."""
    operation, which, block = step
    function = getattr(structures, operation)
    held = next((number for number in (0, 1) if block in model[number]), None)
    if operation in ("push_front", "push_back"):
        if held is None:
            function(links, HEADS[which], block)
            model[which].insert(0 if operation == "push_front" else len(model[which]), block)
    elif held is not None:
        model[held].remove(block)
        if operation == "move_to_front":
            function(links, HEADS[which], block)
            model[which].insert(0, block)
        else:
            function(links, block)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(deadline=None)
@given(steps=st.lists(LIST_STEPS, max_size=40))
def test_lists_do_what_lists_of_python_do(dtype: type, steps: list[tuple[str, int, int]]) -> None:
    links: structures.Links = structures.new_links(BLOCKS, 2).astype(dtype)
    model: list[list[int]] = [[], []]
    for step in steps:
        apply(links, model, step)
        for head, expected in zip(HEADS, model, strict=True):
            assert members(links, head) == expected
            assert structures.is_empty(links, head) == (not expected)
            assert structures.front(links, head) == (expected[0] if expected else head)
            assert structures.back(links, head) == (expected[-1] if expected else head)
        present = sorted(model[0] + model[1])
        assert [block for block in range(BLOCKS) if structures.is_linked(links, block)] == present


def test_links_take_eight_bytes_per_block() -> None:
    assert structures.new_links(1000, 1).nbytes == 8 * 1001


@pytest.mark.parametrize("times", [1, 32, 33, 1024, 1025, 40_000])
def test_timeset_finds_the_latest(times: int) -> None:
    source = np.random.default_rng(times)
    found = structures.new_timeset(times)
    model: set[int] = set()
    for time in [*source.integers(0, times, 400).tolist(), 0, times - 1]:
        assert structures.contains(found, time) == (time in model)
        if time in model:
            structures.discard(found, time)
            model.remove(time)
        else:
            structures.add(found, time)
            model.add(time)
        assert structures.latest(found) == max(model, default=structures.EMPTY)
    while model:
        latest = structures.latest(found)
        assert latest == max(model)
        structures.discard(found, latest)
        model.remove(latest)
    assert structures.latest(found) == structures.EMPTY
    assert not found.words.any()


def test_timeset_takes_a_bit_per_time() -> None:
    words = structures.new_timeset(1_000_000).words
    assert words.nbytes < 1.04 * 1_000_000 / 8


STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "take", "least", "grow"]), st.integers(0, 19), st.integers(-9, 9)), max_size=200
)


@settings(deadline=None)  # the first example compiles
@given(STEPS)
def test_the_heap_always_has_the_least_row_on_top(steps: list[tuple[str, int, int]]) -> None:
    heap = new_heap(20, 20)
    keys: dict[int, tuple[int, int]] = {}
    for step, item, major in steps:
        if step == "push" and item not in keys:
            keys[item] = (major, -item)
            push(heap, major, -item, item)
        elif step == "grow" and item in keys:
            keys[item] = (keys[item][0] + abs(major), -item)
            grow(heap, item, keys[item][0])
        elif keys and step in ("take", "least"):
            leaving = min(keys, key=lambda key: keys[key]) if step == "least" or item not in keys else item
            take_out(heap, leaving)
            del keys[leaving]
        assert heap.size[0] == len(keys)
        assert set(np.flatnonzero(heap.at != -1).tolist()) == set(keys)
        if keys:
            assert heap.rows[0, ITEM] == min(keys, key=lambda key: keys[key])


def test_the_sketch_counts_up_to_sixteen() -> None:
    sketch = new_sketch(100)
    for times in range(1, 30):
        note(sketch, 5)
        assert estimate(sketch, 5) == min(times, MOST + 1)  # the doorkeeper knows one more
    assert estimate(sketch, 6) == 0


def test_the_sketch_is_never_too_low_and_seldom_too_high() -> None:
    sketch = new_sketch(1000)
    ids = (3000 * np.random.default_rng(3).random(SAMPLE * 1000 - 1) ** 2).astype(np.int64)
    for block in ids.tolist():
        note(sketch, block)
    true = Counter(ids.tolist())
    above = [estimate(sketch, block) - min(true[block], MOST + 1) for block in range(3000)]
    assert min(above) >= 0
    assert sum(value > 0 for value in above) < 0.05 * len(above)


def test_a_full_sample_halves_the_counts_and_empties_the_doorkeeper() -> None:
    sketch = new_sketch(10)
    for _ in range(9):
        note(sketch, 1)
    for _ in range(SAMPLE * 10 - 10):
        note(sketch, 2)
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (9, 16)
    note(sketch, 2)
    assert sketch.sample[0] == 0
    assert not sketch.door.any()
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (4, 7)


def test_parts_are_compiled_only_within_the_policies_that_call_them() -> None:
    compiled = [name for name, value in vars(structures).items() if isinstance(value, Dispatcher)]
    assert compiled == ["note", "estimate"]


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
