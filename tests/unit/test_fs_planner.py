"""The plan follows the budget and the loops: how much is wanted of whom, and that no more moves than has to."""

from __future__ import annotations

import time
from itertools import pairwise

from llmcache.cache.loops import Cursor
from llmcache.fs.engine.group import Group
from llmcache.fs.engine.planner import Planner
from llmcache.fs.engine.state import CacheState
from tests.unit.fs_parts import MIB, NoHolder, new_group, new_state


def looping(state: CacheState, name: str, extents: int, period_ns: int) -> Group:
    """An open loop whose readers are active."""
    group = new_group(state, name, extents, looping=True)
    group.learner.period, group.last_ns = period_ns, time.monotonic_ns()
    backing = object()
    state.opens[backing] = 1  # type: ignore[index]  # only its identity matters
    state.owners[backing] = (group, group.members[0])  # type: ignore[index]
    return group


def planned(state: CacheState) -> NoHolder:
    holder = NoHolder()
    with state.lock:
        Planner(state, holder).plan()  # type: ignore[arg-type]  # as much of a Holder as planning needs
    return holder


def wanted(group: Group) -> set[int]:
    return {extent for extent in range(group.count) if group.wanted[extent]}


def test_a_loop_that_fits_is_wanted_whole() -> None:
    state = new_state(100 * MIB)
    group = looping(state, "loop", 60, 10**9)
    planned(state)
    assert wanted(group) == set(range(60))
    assert group.window_bytes == 0


def test_a_larger_loop_is_pinned_in_part_and_moves_no_more_than_the_budget() -> None:
    state = new_state(128 * MIB)
    group = looping(state, "loop", 200, 10**9)
    planned(state)
    before = wanted(group)
    assert len(before) > 64 and group.window_bytes > 0 and len(before) * MIB + group.window_bytes <= 128 * MIB
    assert max(later - earlier for earlier, later in pairwise(sorted(before))) <= 3, "spread"
    assert planned(state).released == [] and wanted(group) == before, "stable"
    state.limit_bytes //= 2
    holder = planned(state)
    assert wanted(group) < before and set(holder.released) == before - wanted(group)
    assert len(wanted(group)) * MIB + group.window_bytes <= state.limit_bytes
    state.limit_bytes *= 2
    assert planned(state).released == [] and len(wanted(group)) == len(before)


def test_a_closed_loop_gives_way_to_an_open_one() -> None:
    state = new_state(64 * MIB)
    old = looping(state, "old", 60, 10**9)
    planned(state)
    assert wanted(old)
    state.opens.clear()
    new = looping(state, "new", 60, 10**10)
    holder = planned(state)
    assert wanted(new) == set(range(60))
    assert set(holder.released) == set(range(60)) - wanted(old)
    assert len(wanted(old)) <= 4


def test_a_refused_lock_costs_pins_and_no_window() -> None:
    """A kernel that locks nothing more leaves streaming as good as it can be."""
    state = new_state(100 * MIB)
    group = looping(state, "loop", 200, 10**9)
    planner = Planner(state, NoHolder())  # type: ignore[arg-type]
    planner.pinnable_bytes = 0
    with state.lock:
        planner.plan()
    assert not wanted(group)
    assert group.window_bytes >= 8 * MIB


TICK_NS = 100_000_000


def read_by(state: CacheState, programs: int) -> Group:
    """A loop of half a second that so many programs have open, of which two readers are at different places."""
    group = looping(state, "loop", 200, TICK_NS * 5)
    backing = next(iter(state.opens))
    state.opens[backing], group.members[0].backing = programs, backing
    group.cursors.live = [Cursor(10, 9, 0), Cursor(110, 9, 0)]
    return group


def watched(state: CacheState, group: Group, seconds: float, ages_ns: tuple[int, int], *, in_place: bool = True) -> int:
    """The convoy after `seconds` in which the readers were seen last so long before each look."""
    planner = Planner(state, NoHolder())  # type: ignore[arg-type]  # nothing is held or released here
    for now_ns in range(TICK_NS, int(seconds * 1e9), TICK_NS):
        for cursor, age_ns in zip(group.cursors.live, ages_ns, strict=True):
            cursor.last_ns = now_ns - age_ns
        planner.watch(group, now_ns, in_place=in_place)
    return group.convoy


def test_readers_of_several_programs_that_fall_apart_get_a_wider_window_and_lose_it_when_they_keep_together() -> None:
    state = new_state(100 * MIB)
    assert watched(state, read_by(state, 2), 0.9, (0, 0), in_place=False) == 1
    group = read_by(state, 2)
    assert watched(state, group, 0.9, (0, 0)) == 3
    assert watched(state, group, 59, (0, 10**9)) == 3
    assert watched(state, group, 190, (0, 10**9)) == 0


def test_where_a_pass_is_short_a_cursor_that_has_stood_for_part_of_it_is_nobody() -> None:
    state = new_state(100 * MIB)
    assert watched(state, read_by(state, 2), 9.0, (0, TICK_NS * 3 // 2)) == 0
