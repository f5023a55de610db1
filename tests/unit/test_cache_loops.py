"""Learned visiting order: orders stay permutations, passes are cut where a loop comes round and nowhere else."""

from __future__ import annotations

import random
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.loops import LoopOrder, Pass, PassRecorder


@st.composite
def orders_and_passes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """An order of up to 40 extents and distinct extents that a pass touched, in any order."""
    size = draw(st.integers(1, 40))
    order = draw(st.permutations(range(size)))
    seen = draw(st.permutations(range(size)))
    return list(order), list(seen)[: draw(st.integers(0, size))]


def laps(length: int, stripes: int, jitter: int, rounds: int, seed: int) -> list[int]:
    """Touches of threads that each walk one stripe of the loop, none further than `jitter` steps ahead of the last."""
    source = random.Random(seed)
    steps = [0] * stripes
    touches = []
    while min(steps) < rounds * length:
        thread = source.choice([number for number, step in enumerate(steps) if step <= min(steps) + jitter])
        touches.append(thread * length + steps[thread] % length)
        steps[thread] += 1
    return touches


def passes_of(touches: list[int]) -> list[Pass]:
    recorder, clock = PassRecorder(), count()
    return [done for extent in touches if (done := recorder.note(extent, next(clock))) is not None]


@given(orders_and_passes())
def test_adopt_keeps_a_permutation(case: tuple[list[int], list[int]]) -> None:
    first, seen = case
    order = LoopOrder(len(first), first)
    old_ranks = order.adopt(seen)
    assert sorted(order.extent_at) == list(range(len(first)))
    assert all(order.extent_at[order.rank_of[extent]] == extent for extent in range(len(first)))
    assert [first[rank] for rank in old_ranks] == list(order.extent_at)


@given(orders_and_passes())
def test_adopt_follows_the_pass_and_keeps_the_unseen_behind_their_predecessor(case: tuple[list[int], list[int]]) -> None:
    first, seen = case
    order = LoopOrder(len(first), first)
    order.adopt(seen)
    touched = set(seen)
    assert [extent for extent in order.extent_at if extent in touched] == seen
    for before, after in pairwise(first):
        if after not in touched:
            assert order.rank_of[after] == order.rank_of[before] + 1


@given(orders_and_passes())
def test_adopting_twice_changes_nothing_more(case: tuple[list[int], list[int]]) -> None:
    first, seen = case
    order = LoopOrder(len(first), first)
    order.adopt(seen)
    once = list(order.extent_at)
    order.adopt(seen)
    assert list(order.extent_at) == once
    assert order.disorder(seen) == 0.0


@given(st.integers(2, 60), st.integers(0, 59))
def test_a_loop_entered_anywhere_is_in_order(size: int, start: int) -> None:
    order = LoopOrder(size)
    assert order.disorder([(start + step) % size for step in range(size)]) == 0.0


@given(st.integers(8, 60))
def test_a_loop_walked_backwards_is_out_of_order(size: int) -> None:
    assert LoopOrder(size).disorder(range(size - 1, -1, -1)) > 0.8


def test_a_guess_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="not a permutation of 3"):
        LoopOrder(3, [0, 1, 1])


@given(st.integers(12, 40), st.integers(1, 8), st.integers(0, 3), st.integers(2, 6), st.integers(0, 1 << 30))
def test_a_pass_is_cut_each_round(length: int, stripes: int, jitter: int, rounds: int, seed: int) -> None:
    size = length * stripes
    cut = passes_of(laps(length, stripes, jitter, rounds, seed))
    whole = [done for done in cut if len(done.extents) >= size // 2]
    # the beginning of the first pass may be cut into short ones (nothing is far away yet), and jitter at a seam may
    # make one more of a small loop
    assert rounds - 1 <= len(whole) <= rounds + 1
    assert all(len(done.extents) >= size - 2 * stripes * (jitter + 1) for done in whole)
    assert all(len(set(done.extents)) == len(done.extents) for done in cut)


@given(st.integers(16, 100), st.lists(st.tuples(st.integers(8, 99), st.integers(1, 1 << 20)), max_size=60))
def test_near_repeats_do_not_cut(size: int, repeats: list[tuple[int, int]]) -> None:
    """Threads on neighbouring stripes touch an extent again before half of what was seen lies between."""
    recorder = PassRecorder()
    for extent in range(size):
        assert recorder.note(extent, extent) is None
        for at, back in repeats:
            if at == extent:
                assert recorder.note(extent - back % ((extent + 1) // 2 - 1), extent) is None
    assert len(recorder) == size
    done = recorder.note(0, 1000)
    assert done is not None
    assert list(done.extents) == list(range(size))
    assert (done.started, done.duration) == (0, 1000)


def test_a_new_pass_begins_with_the_extent_that_ended_the_last() -> None:
    cut = passes_of([*range(10), *range(10), 0])
    assert [list(done.extents) for done in cut] == [list(range(10))] * 2
    assert cut[0].ended == cut[1].started == 10
