"""States and charges of extents: charges are upper bounds, follow the extents, and come back to zero."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.loops import RECENT, Pass
from llmcache.fs.engine.group import ABSENT, LOADING, MISSES_MAX, PINNED, READY, SINGLE, SPARSE, TOUCHED, Group, Member
from llmcache.fs.engine.state import CacheState
from tests.unit.fs_parts import MIB, bring, new_group, new_state, stray

SIZE = 12


def whole_pass(extents: list[int], period_ns: int = 1000) -> Pass:
    return Pass(tuple(extents), 0, period_ns)


def held(state: CacheState) -> int:
    return sum(sum(group.charge) for group in state.groups.values())


def test_a_new_group_is_absent_and_charged_nothing() -> None:
    group = new_group(new_state(MIB), "file", SIZE)
    assert {group.state(extent) for extent in range(SIZE)} == {ABSENT}
    assert list(group.charged_extents()) == []
    assert group.loop_bytes == 0


def test_members_share_one_numbering() -> None:
    members = [Member("/a", 2 * MIB + 1, 0, 3), Member("/b", 5, 3, 1)]
    group = Group("shards", members, MIB, None)
    assert [group.member_of(extent).path for extent in range(4)] == ["/a", "/a", "/a", "/b"]
    assert [group.offset_of(group.member_of(extent), extent) for extent in range(4)] == [0, MIB, 2 * MIB, 0]
    assert [group.length_of(group.member_of(extent), extent) for extent in range(4)] == [MIB, MIB, 1, 5]


@given(st.lists(st.tuples(st.sampled_from(["charge", "forget", "touch", "ready"]), st.integers(0, SIZE - 1)), max_size=60))
def test_charges_are_bounded_and_add_up(steps: list[tuple[str, int]]) -> None:
    state = new_state(1 << 40)
    group = new_group(state, "file", SIZE)
    for now, (step, extent) in enumerate(steps):
        if step == "charge":
            state.charge(group, extent, MIB // 3)
        elif step == "touch":
            group.touch(extent, now)
        elif step == "ready":
            bring(state, group, [extent], READY, now)
        else:
            state.resident_bytes -= group.forget(extent)
            assert group.charge[extent] == 0
        assert state.resident_bytes == held(state)
        assert all(charge <= MIB for charge in group.charge)
    for extent in range(SIZE):
        state.resident_bytes -= group.forget(extent)
    assert state.resident_bytes == 0
    assert not (group.ready or group.touched or group.strays or group.trips)


def test_forgetting_makes_absent_and_single_stays_single() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "file", SIZE)
    group.set_state(1, SINGLE)
    stray(state, group, [1])
    bring(state, group, [0], TOUCHED, 1)
    assert group.forget(0) == MIB
    assert group.forget(1) == 4096
    assert (group.state(0), group.state(1)) == (ABSENT, SINGLE)


def test_what_is_dropped_untouched_again_and_again_is_not_fetched_ahead() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "loop", SIZE, looping=True)
    for _ in range(MISSES_MAX):
        assert group.next_absent(0, SIZE) == 1
        bring(state, group, [1], READY, 0)
        state.resident_bytes -= group.forget(1)
    assert group.state(1) == SPARSE
    assert group.next_absent(0, SIZE) == 2


def test_touching_makes_the_latest() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "file", SIZE)
    bring(state, group, [0, 1], TOUCHED, 1)
    bring(state, group, [2], READY, 1)
    group.touch(0, 2)
    group.touch(2, 3)
    assert list(group.touched.items()) == [(1, 1), (0, 2), (2, 3)]
    assert not group.ready


def test_next_absent_looks_ahead_only_and_goes_round_a_loop() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "file", SIZE)
    bring(state, group, [5, 6], TOUCHED, 0)
    assert group.next_absent(4, 3) == 7
    assert group.next_absent(4, 2) is None
    assert group.next_absent(SIZE - 1, SIZE) is None
    group.believe([])
    assert group.next_absent(SIZE - 1, 3) == 0


@given(st.integers(0, SIZE - 1), st.integers(1, SIZE - 1), st.sets(st.integers(0, SIZE - 1)))
def test_next_absent_is_the_first_within_its_span(head: int, span: int, present: set[int]) -> None:
    state = new_state(1 << 40)
    group = new_group(state, "loop", SIZE, looping=True)
    bring(state, group, sorted(present), TOUCHED, 0)
    ahead = [(head + step) % SIZE for step in range(1, span + 1)]
    assert group.next_absent(head, span) == next((extent for extent in ahead if extent not in present), None)


def test_waiting_counts_what_lies_between_round_the_end_too() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "loop", SIZE, looping=True)
    bring(state, group, [SIZE - 1, 0], READY, 0)
    bring(state, group, [1], LOADING, 0)
    bring(state, group, [2], TOUCHED, 0)
    assert group.waiting(SIZE - 2, 3) == 3
    assert group.waiting(0, 3) == 1


def test_a_second_pass_makes_a_loop_and_its_period() -> None:
    group = new_group(new_state(MIB), "file", SIZE)
    assert group.learn(whole_pass(list(range(SIZE)), 1000))
    assert group.looping
    assert (group.learner.passes, group.learner.period, group.loop_bytes) == (1, 1000, SIZE * MIB)
    assert not group.learn(whole_pass(list(range(SIZE)), 3000))
    assert group.learner.period == 2000


def test_the_period_follows_when_more_of_the_loop_is_pinned() -> None:
    group = new_group(new_state(1 << 40), "loop", SIZE, looping=True)
    for _ in range(100):
        group.learn(whole_pass(list(range(SIZE)), 3000))
    for extent in range(SIZE * 3 // 4):
        group.set_state(extent, PINNED)
    for _ in range(RECENT):
        group.learn(whole_pass(list(range(SIZE * 3 // 4, SIZE)), 1000))
    assert group.learner.period == 1000


def test_a_short_pass_is_no_evidence() -> None:
    group = new_group(new_state(MIB), "file", SIZE)
    assert not group.learn(whole_pass(list(range(SIZE // 2 - 1))))
    assert not group.looping


@given(st.permutations(range(SIZE)))
def test_states_follow_their_extents_into_a_new_order(seen: list[int]) -> None:
    state = new_state(1 << 40)
    group = new_group(state, "loop", SIZE, looping=True)
    bring(state, group, [0, 3], TOUCHED, 0)
    bring(state, group, [4], READY, 0)
    group.set_state(7, PINNED)
    before = [group.state(extent) for extent in range(SIZE)]
    group.learn(whole_pass(seen))
    group.learn(whole_pass(seen))
    assert [group.state(extent) for extent in range(SIZE)] == before


def test_a_written_file_grows() -> None:
    state = new_state(1 << 40)
    group = new_group(state, "file", 1)
    group.status = bytearray([SINGLE])
    stray(state, group, [0], MIB)
    group.grow(3 * MIB + 1)
    assert (group.count, group.members[0].count, group.size_bytes) == (4, 4, 3 * MIB + 1)
    assert [group.state(extent) for extent in range(4)] == [SINGLE] * 4
    state.charge(group, 3, 4096)
    assert state.resident_bytes == held(state) == MIB + 4096


def test_neighbours_are_dropped_together() -> None:
    state = new_state(MIB)
    group = new_group(state, "file", SIZE)
    found = [(offset, length) for _, offset, length in state.ranges(group, [4, 2, 3, 9])]
    assert found == [(2 * MIB, 3 * MIB), (9 * MIB, MIB)]


def test_what_lies_behind_the_end_of_a_file_that_was_cut_has_no_bytes() -> None:
    """It had less than none: they were taken off the count of bytes that were dropped."""
    group = new_group(new_state(MIB), "file", SIZE)
    (member,) = group.members
    member.size_bytes = group.size_bytes = MIB + 5
    assert [group.length_of(member, extent) for extent in range(4)] == [MIB, 5, 0, 0]
