"""Order and period of loops derived from passes, unused extents, and the positions of readers."""

from __future__ import annotations

import random
from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmcache.cache.loops import (
    MAX_CURSORS,
    OCTAVES,
    PROOF,
    CursorTable,
    Intervals,
    LoopOrder,
    Pass,
    PassRecorder,
    Period,
    RecentUse,
)


def of(*blocks: int) -> Intervals:
    intervals = Intervals()
    for each in blocks:
        intervals.add(each * 1000, each)
    return intervals


def test_a_pause_does_not_change_the_period() -> None:
    assert (Intervals().period(), Intervals().rhythms(), Intervals().regularity()) == (None, (), 0)
    intervals = of(*[100] * 10)
    intervals.add(60_000_000_000, 100)  # a pause of 60 s without accesses
    assert intervals.period() == Period(100_000, 100)
    intervals.add(100_000_000, 100_000)  # another model ran in between
    assert intervals.period() == Period(100_000, 100)
    assert intervals.regularity() == pytest.approx(11 / 12)


@pytest.mark.parametrize("border", [64, 1024, 1 << 20])
def test_a_period_at_an_octave_border_is_one_period(border: int) -> None:
    period = of(border - 1, border + 1, border - 1, border + 1, border * 40, border * 40, border * 40).period()
    assert period is not None
    assert period.blocks == border


def test_a_layer_read_twice_a_pass_has_two_rhythms() -> None:
    intervals = of(*[200, 7800] * 10, 100_000)  # the last interval is an outlier
    assert [rhythm.blocks for rhythm in intervals.rhythms()] == [200, 7800]
    assert intervals.period() == Period(7_800_000, 7800)  # of equally frequent rhythms, the longest


@given(st.lists(st.tuples(st.integers(-5, 1 << 63), st.integers(-5, 1 << 63)), max_size=300))
def test_intervals_are_bounded_and_the_period_is_within_their_range(added: list[tuple[int, int]]) -> None:
    intervals = Intervals()
    for ns, blocks in added:
        intervals.add(ns, blocks)
    assert len(intervals) == len(added)
    assert len(intervals.rhythms()) <= OCTAVES
    period = intervals.period()
    if added:
        assert period is not None
        assert min(max(1, blocks) for _, blocks in added) <= period.blocks <= max(max(1, blocks) for _, blocks in added)
        assert 0 < intervals.regularity() <= 1


@st.composite
def orders_and_passes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Generate an order of up to 40 extents and the distinct extents that a pass touched, in any order."""
    size = draw(st.integers(1, 40))
    order = draw(st.permutations(range(size)))
    seen = draw(st.permutations(range(size)))
    return list(order), list(seen)[: draw(st.integers(0, size))]


def laps(length: int, stripes: int, jitter: int, rounds: int, seed: int) -> list[int]:
    """Return touches of threads that each walk one stripe of the loop, at most `jitter` steps ahead of the slowest."""
    source = random.Random(seed)
    steps = [0] * stripes
    touches = []
    while min(steps) < rounds * length:
        thread = source.choice([number for number, step in enumerate(steps) if step <= min(steps) + jitter])
        touches.append(thread * length + steps[thread] % length)
        steps[thread] += 1
    return touches


def passes_of(touches: list[int], least: int = 2) -> list[Pass]:
    recorder, clock = PassRecorder(least), count()
    return [done for extent in touches if (done := recorder.record_access(extent, next(clock))) is not None]


@given(orders_and_passes())
def test_an_adopted_order_keeps_unseen_extents_after_their_predecessors(case: tuple[list[int], list[int]]) -> None:
    first, seen = case
    order = LoopOrder(len(first))
    order.adopt(first)
    old_ranks = order.adopt(seen)
    assert sorted(order.extent_at) == list(range(len(first)))
    assert all(order.extent_at[order.rank_of[extent]] == extent for extent in range(len(first)))
    assert [first[rank] for rank in old_ranks] == list(order.extent_at)
    assert [extent for extent in order.extent_at if extent in set(seen)] == seen
    for before, after in pairwise(first):
        if after not in seen:
            assert order.rank_of[after] == order.rank_of[before] + 1


@given(st.integers(12, 40), st.integers(1, 8), st.integers(0, 3), st.integers(2, 6), st.integers(0, 1 << 30))
def test_each_round_of_a_loop_ends_one_pass(length: int, stripes: int, jitter: int, rounds: int, seed: int) -> None:
    size = length * stripes
    cut = passes_of(laps(length, stripes, jitter, rounds, seed))
    whole = [done for done in cut if len(done.extents) >= size // 2]
    # The recorder may split the first pass, because it has seen nothing far away yet, and jitter at the seam of a small
    # loop may add one pass.
    assert rounds - 1 <= len(whole) <= rounds + 1
    assert all(len(done.extents) >= size - 2 * stripes * (jitter + 1) for done in whole)
    assert all(len(set(done.extents)) == len(done.extents) for done in cut)


@given(st.integers(16, 100), st.dictionaries(st.integers(8, 99), st.integers(1, 1 << 20), max_size=60))
def test_near_repeats_do_not_end_a_pass(size: int, repeats: dict[int, int]) -> None:
    """Threads on neighboring stripes touch an extent again before half of the seen extents lie in between."""
    recorder = PassRecorder()
    for extent in range(size):
        assert recorder.record_access(extent, extent) is None
        if extent in repeats:
            assert recorder.record_access(extent - repeats[extent] % ((extent + 1) // 2 - 1), extent) is None
    assert len(recorder) == size
    done = recorder.record_access(0, 1000)
    assert done is not None
    assert list(done.extents) == list(range(size))
    assert done.duration == 1000


@example(72, 1, 52, 3)
@given(st.integers(64, 400), st.integers(1, 45), st.integers(0, 55), st.integers(3, 6))
def test_a_loop_over_part_of_a_file_is_found_after_a_full_read(size: int, share: int, start: int, rounds: int) -> None:
    """Loading reads a whole file; the loop that follows may cover less than half of it, but an eighth at least."""
    part = range(size * start // 100, size * start // 100 + max(8, size // PROOF, size * share // 100))
    cut = passes_of([*range(size), *list(part) * rounds], least=4)
    assert list(cut[0].extents) == list(range(size))
    assert rounds - 2 <= sum(set(done.extents) == set(part) for done in cut[1:]) <= rounds


def test_the_extent_that_ends_a_pass_begins_the_next() -> None:
    cut = passes_of([*range(10), *range(10), 0])
    assert [list(done.extents) for done in cut] == [list(range(10))] * 2
    assert [done.duration for done in cut] == [10, 10]


def test_an_extent_is_unused_after_two_whole_passes_without_a_touch() -> None:
    use = RecentUse(2)
    for _ in range(3):
        use.touch(0)
        use.touch(1)
        use.end_pass()
    found = []
    for _ in range(3):
        use.touch(0)
        use.end_pass()
        found.append(use.judge(range(2)))
    assert found == [[], [1], []]
    assert list(use.unused) == [0, 1]
    use.touch(1)
    assert list(use.unused) == [0, 1], "a single touch may be a row of a table"
    use.end_pass()
    use.touch(1)
    assert list(use.unused) == [0, 0]


def test_a_run_of_touches_marks_extents_as_used_at_once() -> None:
    use = RecentUse(8)
    use.passes = 20
    assert use.judge(range(8)) == list(range(8))
    for extent in range(3, 8):
        use.touch(extent)
    assert list(use.unused) == [1, 1, 1, 1, 1, 0, 0, 0]
    assert use.returned == 3


def test_extents_of_a_slow_reader_stay_in_use() -> None:
    """The slow reader returns once in five passes of a fast one; the scan's extents have no such rhythm."""
    use = RecentUse(12)
    dropped = []
    for number in range(60):
        use.touch(0)
        for extent in range(1, 6) if number % 5 == 0 else range(6, 12) if number in (0, 1, 30) else ():
            use.touch(extent)
        use.end_pass()
        dropped += [(number, extent) for extent in use.judge(range(12))]
    assert not any(extent in (3, 4, 5) for number, extent in dropped if number > 15)
    assert not any(use.unused[:1]) and all(use.unused[6:])


def test_excused_extents_are_not_judged_unused() -> None:
    use = RecentUse(1)
    use.touch(0)
    use.passes = 10
    use.excuse([0])
    assert use.judge([0]) == []
    use.end_pass()
    use.end_pass()
    assert use.judge([0]) == [0]


COUNT, REACH = 300, 20


@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_a_convoy_of_readers_has_one_cursor(seed: int, lags: list[int]) -> None:
    source = random.Random(seed)
    table = CursorTable(COUNT, REACH, loops=True)
    for step in range(2 * COUNT):
        source.shuffle(lags)
        for lag in lags:
            table.record_access((step + lag) % COUNT, step)
    (cursor,) = table.live
    assert cursor.moves >= 2 * COUNT - 1


def test_the_least_recent_cursor_is_replaced_and_old_ones_expire() -> None:
    table = CursorTable(100_000, REACH, loops=False)
    for number in range(MAX_CURSORS + 1):
        table.record_access(number * 100, number)
    heads = {cursor.head for cursor in table.live}
    assert len(heads) == MAX_CURSORS and 0 not in heads
    table.expire(MAX_CURSORS)
    assert [cursor.head for cursor in table.live] == [100 * MAX_CURSORS]
    ended = CursorTable(COUNT, REACH, loops=False)
    ended.record_access(COUNT - 1, 0)
    ended.record_access(0, 1)
    assert sorted(cursor.head for cursor in ended.live) == [0, COUNT - 1], "without loops, the end does not wrap around"
