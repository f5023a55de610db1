"""Linked lists over ids do what lists of Python do; the set of times finds what max() finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.cache.policies import lists, timeset

BLOCKS = 6
HEADS = (BLOCKS, BLOCKS + 1)
OPERATIONS = ("push_front", "push_back", "remove", "move_to_front", "pop_back", "pop_front", "insert_after")
STEPS = st.tuples(
    st.sampled_from(OPERATIONS), st.sampled_from((0, 1)), st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)
)


def apply(links: lists.Links, model: list[list[int]], step: tuple[str, int, int, int]) -> None:
    """Does one operation on both, where it is allowed."""
    operation, which, block, other = step
    function = getattr(lists, operation)
    held = next((number for number in (0, 1) if block in model[number]), None)
    if operation in ("pop_back", "pop_front"):
        if model[which]:
            expected = model[which].pop(-1 if operation == "pop_back" else 0)
            assert function(links, HEADS[which]) == expected
    elif operation in ("push_front", "push_back"):
        if held is None:
            function(links, HEADS[which], block)
            model[which].insert(0 if operation == "push_front" else len(model[which]), block)
    elif operation == "insert_after":
        if held is None and other in model[which]:
            function(links, other, block)
            model[which].insert(model[which].index(other) + 1, block)
    elif held is not None:
        model[held].remove(block)
        if operation == "move_to_front":
            function(links, HEADS[which], block)
            model[which].insert(0, block)
        else:
            function(links, block)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(deadline=None)
@given(steps=st.lists(STEPS, max_size=40))
def test_lists_do_what_lists_of_python_do(dtype: type, steps: list[tuple[str, int, int, int]]) -> None:
    links: lists.Links = lists.new_links(BLOCKS, 2).astype(dtype)
    model: list[list[int]] = [[], []]
    for step in steps:
        apply(links, model, step)
        for head, expected in zip(HEADS, model, strict=True):
            assert lists.members(links, head).tolist() == expected
            assert lists.is_empty(links, head) == (not expected)
            assert lists.front(links, head) == (expected[0] if expected else head)
            assert lists.back(links, head) == (expected[-1] if expected else head)
        present = sorted(model[0] + model[1])
        assert lists.linked(links, BLOCKS).tolist() == present
        assert [block for block in range(BLOCKS) if lists.is_linked(links, block)] == present


def test_links_take_eight_bytes_per_block() -> None:
    assert lists.new_links(1000, 1).nbytes == 8 * 1001


@pytest.mark.parametrize("times", [1, 32, 33, 1024, 1025, 40_000])
def test_timeset_finds_the_latest(times: int) -> None:
    source = np.random.default_rng(times)
    words, starts = timeset.new_timeset(times)
    model: set[int] = set()
    for time in [*source.integers(0, times, 400).tolist(), 0, times - 1]:
        assert timeset.contains(words, time) == (time in model)
        if time in model:
            timeset.discard(words, starts, time)
            model.remove(time)
        else:
            timeset.add(words, starts, time)
            model.add(time)
        assert timeset.latest(words, starts) == max(model, default=timeset.EMPTY)
    while model:
        latest = timeset.latest(words, starts)
        assert latest == max(model)
        timeset.discard(words, starts, latest)
        model.remove(latest)
    assert timeset.latest(words, starts) == timeset.EMPTY
    assert not words.any()


def test_timeset_takes_a_bit_per_time() -> None:
    words, _ = timeset.new_timeset(1_000_000)
    assert words.nbytes < 1.04 * 1_000_000 / 8
