"""Cursors: readers in convoy share one, readers far apart do not, and a loop's end is no wall."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.loops import MAX_CURSORS, CursorTable

COUNT, REACH = 300, 20


def test_a_convoy_shares_one_cursor() -> None:
    table = CursorTable(COUNT, REACH, loops=False)
    for step in range(100):
        for lag in (0, 7, 15):
            if step >= lag:
                table.note(step - lag, step)
    assert len(table.live) == 1
    assert table.live[0].head == 99
    assert table.live[0].moves == 99


@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_jitter_within_reach_makes_no_cursor(seed: int, lags: list[int]) -> None:
    source = random.Random(seed)
    table = CursorTable(COUNT, REACH, loops=True)
    for step in range(2 * COUNT):
        source.shuffle(lags)
        for lag in lags:
            table.note((step + lag) % COUNT, step)
    assert len(table.live) == 1


@given(st.integers(1, 4), st.booleans())
def test_far_readers_have_their_own(readers: int, loops: bool) -> None:
    table = CursorTable(COUNT, REACH, loops)
    starts = [reader * 3 * REACH for reader in range(readers)]
    for step in range(10):
        for start in starts:
            table.note(start + step, step)
    assert sorted(cursor.head for cursor in table.live) == [start + 9 for start in starts]


def test_a_cursor_goes_round_a_loop() -> None:
    table = CursorTable(COUNT, REACH, loops=True)
    for step in range(3 * COUNT):
        table.note(step % COUNT, step)
    assert len(table.live) == 1
    assert table.live[0].moves == 3 * COUNT - 1


def test_the_end_of_a_file_that_does_not_loop_is_a_new_start() -> None:
    table = CursorTable(COUNT, REACH, loops=False)
    table.note(COUNT - 1, 0)
    table.note(0, 1)
    assert sorted(cursor.head for cursor in table.live) == [0, COUNT - 1]


@given(st.integers(1, 500), st.integers(0, 499), st.integers(0, 499), st.booleans())
def test_distance_goes_forward(size: int, start: int, end: int, loops: bool) -> None:
    table = CursorTable(size, REACH, loops)
    start, end = start % size, end % size
    distance = table.distance(start, end)
    if loops or end >= start:
        assert 0 <= distance < size
        assert (start + distance) % size == end
    else:
        assert distance == size


@given(st.integers(1, 20), st.lists(st.integers(0, 19), max_size=60), st.booleans())
def test_small_files_work_too(size: int, touches: list[int], loops: bool) -> None:
    """Reach is no more than a third of the ranks: else everything would be near everything."""
    table = CursorTable(size, REACH, loops)
    assert 1 <= table.reach <= max(1, size // 3)
    for now, touch in enumerate(touches):
        cursor = table.note(touch % size, now)
        assert cursor in table.live
        assert cursor.last_ns == now


@given(st.lists(st.integers(0, 99_999), max_size=400))
def test_heads_are_ranks_and_few(touches: list[int]) -> None:
    table = CursorTable(100_000, REACH, loops=True)
    for now, touch in enumerate(touches):
        table.note(touch, now)
    assert len(table.live) <= MAX_CURSORS
    assert {cursor.head for cursor in table.live} <= set(touches)


def test_the_least_recent_cursor_makes_room() -> None:
    table = CursorTable(100_000, REACH, loops=False)
    for number in range(MAX_CURSORS + 1):
        table.note(number * 100, number)
    heads = {cursor.head for cursor in table.live}
    assert len(heads) == MAX_CURSORS
    assert 0 not in heads


def test_cursors_expire() -> None:
    table = CursorTable(COUNT, REACH, loops=False)
    table.note(0, 10)
    table.note(100, 20)
    table.expire(15)
    assert [cursor.head for cursor in table.live] == [100]
