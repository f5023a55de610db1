"""States and charges of extents, the pin plan, the selection of files by loaders, and reader convoys."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.loops import RECENT, Cursor, Pass
from llmcache.mount.backends.fuse import FuseBackend
from llmcache.mount.engine.loader import Loader
from llmcache.mount.engine.planner import Planner
from llmcache.mount.state.accounting import Invalidation
from llmcache.mount.state.interfaces import PinStore
from llmcache.mount.state.space import MISSES_MAX, PINNED, READY, SPARSE, TOUCHED, LoopSpace, SpaceFile
from llmcache.mount.state.state import CacheState
from tests.mount.live import wait_for
from tests.unit.fs_parts import MIB, NoPinStore, bring, new_group, new_state, open_it

SIZE = 12


def test_extents_are_numbered_across_members() -> None:
    members = [SpaceFile("/a", 2 * MIB + 1, 0, 3), SpaceFile("/b", 5, 3, 1)]
    space = LoopSpace("shards", members, MIB)
    assert [space.member_of(extent).path for extent in range(4)] == ["/a", "/a", "/a", "/b"]
    assert [space.offset_of(space.member_of(extent), extent) for extent in range(4)] == [0, MIB, 2 * MIB, 0]
    assert [space.length_of(space.member_of(extent), extent) for extent in range(4)] == [MIB, MIB, 1, 5]


@given(st.lists(st.tuples(st.sampled_from(["charge", "forget", "touch", "ready"]), st.integers(0, SIZE - 1)), max_size=60))
def test_charges_are_bounded_and_add_up(steps: list[tuple[str, int]]) -> None:
    state = new_state(1 << 40)
    space = new_group(state, "file", SIZE)
    for now, (step, extent) in enumerate(steps):
        if step == "charge":
            state.memory.account(space, extent, MIB // 3)
        elif step == "touch":
            space.touch(extent, now)
        elif step == "ready":
            bring(state, space, [extent], READY, now)
        else:
            state.memory.forget(space, [extent])
            assert space.accounted_bytes[extent] == 0
        state.memory.verify([space])
    state.memory.forget(space, range(SIZE))
    assert state.memory.resident_bytes == 0
    assert not (space.ready or space.touched or space.partial_extents or space.trips)


def test_extents_that_are_repeatedly_dropped_untouched_are_not_prefetched() -> None:
    state = new_state(1 << 40)
    space = new_group(state, "loop", SIZE, looping=True)
    for _ in range(MISSES_MAX):
        assert space.next_absent(0, SIZE) == 1
        bring(state, space, [1], READY, 0)
        state.memory.forget(space, [1])
    assert space.state(1) == SPARSE
    assert space.next_absent(0, SIZE) == 2


def test_whole_passes_set_the_period_of_a_loop() -> None:
    space = new_group(new_state(1 << 40), "file", SIZE)
    whole = tuple(range(SIZE))
    assert not space.learn(Pass(whole[: SIZE // 2 - 1], 1000)), "a short pass does not count"
    assert space.learn(Pass(whole, 1000)) and space.looping
    assert (space.learner.passes, space.learner.period, space.loop_bytes) == (1, 1000, SIZE * MIB)
    assert not space.learn(Pass(whole, 3000)) and space.learner.period == 2000
    for _ in range(100):
        space.learn(Pass(whole, 3000))
    for extent in whole[: SIZE * 3 // 4]:
        space.set_state(extent, PINNED)
    for _ in range(RECENT):
        space.learn(Pass(whole[SIZE * 3 // 4 :], 1000))
    assert space.learner.period == 1000


@given(st.permutations(range(SIZE)))
def test_a_new_order_keeps_the_states_of_extents(seen: list[int]) -> None:
    state = new_state(1 << 40)
    space = new_group(state, "loop", SIZE, looping=True)
    bring(state, space, [0, 3], TOUCHED, 0)
    bring(state, space, [4], READY, 0)
    space.set_state(7, PINNED)
    before = [space.state(extent) for extent in range(SIZE)]
    for _ in range(2):
        space.learn(Pass(tuple(seen), 1000))
    assert [space.state(extent) for extent in range(SIZE)] == before


def test_extents_beyond_the_end_of_a_truncated_file_have_no_bytes() -> None:
    """A negative length would reduce the count of dropped bytes."""
    space = new_group(new_state(MIB), "file", SIZE)
    (member,) = space.members
    member.size_bytes = space.size_bytes = MIB + 5
    assert [space.length_of(member, extent) for extent in range(4)] == [MIB, 5, 0, 0]


# Files that loaders consider


class Asked(FuseBackend):
    """A backend that follows no space and records the spaces that loaders asked about."""

    def follows(self, space: LoopSpace) -> bool:
        self.asked = {*getattr(self, "asked", ()), space.key}
        return False


def test_loaders_skip_resident_files_and_files_without_readers() -> None:
    """Every open wakes all loaders: with 5000 files, checking each took a third of the daemon's CPU time."""
    state = new_state(10**8)
    for number in range(100):
        new_group(state, str(number), 4)
    for space in (state.spaces["7"], state.spaces["8"]):
        space.record_access(0, 1, True)
    for extent in range(4):
        state.spaces["8"].set_state(extent, PINNED)
    backend = Asked(state, cast(PinStore, None))
    loader = Loader(state, backend)
    loader.start()
    wait_for(lambda: hasattr(backend, "asked"), "loaders search for work")
    with state.lock:
        state.running = False
        state.work.notify_all()
        state.room.notify_all()
    loader.join()
    assert backend.asked == {"7"}


def test_drops_wake_only_loaders_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle loaders that wake up take CPU time from those with work."""
    state, woken = new_state(10**8), list[int]()
    loader = Loader(state, FuseBackend(state, cast(PinStore, None)))
    monkeypatch.setattr(state.work, "notify", woken.append)
    loader._drop([Invalidation(1, 0, 4096)])
    assert not woken
    space = looping(state, "loop", 4, 1)
    space.record_access(0, time.monotonic_ns(), True)
    state.memory.pend(1, 0, 0, 2 * state.memory.room_bytes)
    with state.lock:
        assert loader._soonest() is None and state.crowded
    loader._drop([Invalidation(1, 0, 4096), Invalidation(2, 0, 4096)])
    assert woken == [2] and not state.crowded


def looping(state: CacheState, name: str, extents: int, period_ns: int) -> LoopSpace:
    """Return an open loop with active readers."""
    space = new_group(state, name, extents, looping=True)
    space.learner.period, space.last_ns = period_ns, time.monotonic_ns()
    open_it(state, space)
    return space


def planned(state: CacheState) -> NoPinStore:
    pin_store = NoPinStore()
    with state.lock:
        Planner(state, pin_store).plan()  # type: ignore[arg-type]  # implements what planning needs of a pin store
    return pin_store


def wanted(space: LoopSpace) -> set[int]:
    return {extent for extent in range(space.count) if space.wanted[extent]}


def test_a_larger_loop_is_pinned_in_part_within_the_budget() -> None:
    state = new_state(128 * MIB)
    space = looping(state, "loop", 200, 10**9)
    planned(state)
    before = wanted(space)
    assert len(before) > 64 and space.plan.window_bytes > 0 and len(before) * MIB + space.plan.window_bytes <= 128 * MIB
    assert max(later - earlier for earlier, later in pairwise(sorted(before))) <= 3, "spread"
    assert planned(state).released == [] and wanted(space) == before, "stable"
    state.memory.limit_bytes //= 2
    pin_store = planned(state)
    assert wanted(space) < before and set(pin_store.released) == before - wanted(space)
    assert len(wanted(space)) * MIB + space.plan.window_bytes <= state.memory.limit_bytes
    state.memory.limit_bytes *= 2
    assert planned(state).released == [] and len(wanted(space)) == len(before)


def test_an_open_loop_replaces_a_closed_one() -> None:
    state = new_state(64 * MIB)
    old = looping(state, "old", 60, 10**9)
    planned(state)
    assert wanted(old)
    state.opens.clear()
    new = looping(state, "new", 60, 10**10)
    pin_store = planned(state)
    assert wanted(new) == set(range(60))
    assert set(pin_store.released) == set(range(60)) - wanted(old)
    assert len(wanted(old)) <= 4


def test_a_refused_lock_keeps_the_window() -> None:
    """If the kernel locks no more memory, the loop is still streamed."""
    state = new_state(100 * MIB)
    space = looping(state, "loop", 200, 10**9)
    planner = Planner(state, NoPinStore())  # type: ignore[arg-type]
    planner.pinnable_bytes = 0
    with state.lock:
        planner.plan()
    assert not wanted(space)
    assert space.plan.window_bytes >= 8 * MIB


TICK_NS = 100_000_000


def read_by(state: CacheState, programs: int) -> LoopSpace:
    """Return a loop with a period of 0.5 s, opened by `programs` clients, with two readers at different positions."""
    space = looping(state, "loop", 200, TICK_NS * 5)
    backing = next(iter(state.opens))
    state.opens[backing], space.members[0].backing = programs, backing
    space.cursors.live = [Cursor(10, 9, 0), Cursor(110, 9, 0)]
    return space


def watched(state: CacheState, space: LoopSpace, seconds: float, ages_ns: tuple[int, int], *, in_place: bool = True) -> int:
    """Return the convoy after `seconds`, where `ages_ns` is the time since each reader was last seen."""
    planner = Planner(state, NoPinStore())  # type: ignore[arg-type]  # nothing is pinned or released here
    for now_ns in range(TICK_NS, int(seconds * 1e9), TICK_NS):
        for cursor, age_ns in zip(space.cursors.live, ages_ns, strict=True):
            cursor.last_ns = now_ns - age_ns
        planner.watch(space, now_ns, in_place=in_place)
    return space.convoy


def test_readers_that_drift_apart_get_a_wider_window_until_they_converge() -> None:
    state = new_state(100 * MIB)
    assert watched(state, read_by(state, 2), 0.9, (0, 0), in_place=False) == 1
    space = read_by(state, 2)
    assert watched(state, space, 0.9, (0, 0)) == 3
    assert watched(state, space, 59, (0, 10**9)) == 3
    assert watched(state, space, 190, (0, 10**9)) == 0


def test_a_cursor_that_stands_still_for_part_of_a_short_pass_is_ignored() -> None:
    state = new_state(100 * MIB)
    assert watched(state, read_by(state, 2), 9.0, (0, TICK_NS * 3 // 2)) == 0


def test_reads_of_the_header_do_not_end_a_pass() -> None:
    """Otherwise a client that reads the header every second ends passes, and half of a loop counts as unused."""
    state = new_state(10**8)
    space = looping(state, "loop", 40, 0)
    passes = []
    for now_ns in range(5 * 40):
        passes.append(space.record_access(now_ns % 40, now_ns, True, pid=1))
        if now_ns % 7 == 0:
            passes.append(space.record_access(0, now_ns, False, pid=2))
    ended = [done for done in passes if done is not None]
    assert [len(done.extents) for done in ended] == [40, 40, 40, 40]
