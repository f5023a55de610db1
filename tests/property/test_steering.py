"""The pins of loops in a mount: shares of the budget, and the deterministic core."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.cache.arbitration import Limits, Loop, plan, share_budget, spread
from llmcache.cache.space import LARGE_EXTENT, Space, SpacePart, extent_bytes_for
from llmcache.cache.steering import HIT, KEPT, MISS, Steering
from llmcache.units import BLOCK_BYTES
from tests.conftest import examples

MIB = 1 << 20
BLOCKS = LARGE_EXTENT // BLOCK_BYTES


def new_core(limit_mib: int, *sizes: int) -> Steering:
    """Return a core with files "0", "1", … of these sizes in bytes."""
    core = Steering(limit_mib * MIB)
    for number, size in enumerate(sizes):
        add(core, str(number), size)
    return core


def add(core: Steering, key: str, size: int) -> None:
    extent_bytes = extent_bytes_for(size)
    core.space(key, extent_bytes, [(size, 0, -(-size // extent_bytes))], "loop")


def one_pass(core: Steering, key: str) -> int:
    """Return the hits (extents) of one pass in file order."""
    return sum(core.reference(key, extent) == HIT for extent in range(core.spaces[key].count))


files = st.lists(st.integers(1, 60 * MIB), min_size=1, max_size=4)
steps = st.lists(
    st.tuples(
        st.sampled_from(["pass", "pass", "pass", "some", "limit", "close", "open", "end", "convoy", "guess", "lost"]),
        st.integers(0, 3),
        st.integers(0, 1 << 20),
    ),
    max_size=30,
)


def drive(core: Steering, sizes: list[int], plan: list[tuple[str, int, int]]) -> list[Any]:
    """Apply all kinds of events to the core; return its results, checking the budget after each step."""
    verdicts: list[Any] = []
    for kind, which, number in plan:
        key = str(which % len(sizes))
        if key not in core.spaces:
            add(core, key, sizes[int(key)])
        space, source = core.spaces[key], random.Random(number)
        if kind == "pass":
            verdicts += [core.reference(key, extent) for extent in range(space.count)]
        elif kind == "some":
            verdicts += [core.reference(key, source.randrange(space.count)) for _ in range(20)]
        elif kind == "limit":
            core.apply(["limit", number % 64 * MIB])
        elif kind == "convoy":
            core.apply(["convoy", key, number % 4])
        elif kind == "guess":
            core.apply(["guess", key, [[0, min(2, space.count)]], [[0, 1]], [[0, space.count]]])
        elif kind == "lost":
            core.apply(["lost", key, number % space.count])
        else:
            core.apply([kind, key])
        check_budget(core)
    return [*verdicts, core.hit_blocks, core.miss_blocks, core.evicted_blocks, core.held_blocks]


def check_budget(core: Steering) -> None:
    cached_blocks = sum(space.blocks(extent) for space in core.spaces.values() for extent in space.held)
    assert core.held_blocks == cached_blocks
    assert cached_blocks * BLOCK_BYTES <= core.limit_bytes
    for space in core.spaces.values():
        assert all(space.wanted[extent] and not space.single[extent] for extent in space.held)


@settings(deadline=None)
@given(st.integers(0, 64), files, steps)
def test_the_budget_holds_and_every_eviction_is_reported(
    limit: int, sizes: list[int], plan: list[tuple[str, int, int]]
) -> None:
    """The same sequence also gives the same results."""
    evicted: list[tuple[str, int]] = []
    core = Steering(limit * MIB, lambda key, extent: evicted.append((key, extent)))
    for number, size in enumerate(sizes):
        add(core, str(number), size)
    verdicts = drive(core, sizes, plan)
    pinned_count = verdicts[:-4].count(KEPT)
    cached = sum(len(space.held) for space in core.spaces.values())
    lost = sum(kind == "lost" for kind, _, _ in plan)
    assert cached + len(evicted) <= pinned_count <= cached + len(evicted) + lost
    assert drive(new_core(limit, *sizes), sizes, plan) == verdicts


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(33, 200), st.integers(1, 250))
def test_a_loop_hits_its_share_from_the_fourth_pass(extents: int, limit: int) -> None:
    core = new_core(limit, extents * LARGE_EXTENT)
    assert [one_pass(core, "0"), one_pass(core, "0")] == [0, 0]
    one_pass(core, "0")  # extents loaded before the second pass are not pinned yet, because that pass identifies the loop
    window = max(8, -(-6 * extents // 100))  # the largest window; 12 MiB of it are in addition to the budget
    for _ in range(4):
        hits = one_pass(core, "0")
        assert min(extents, limit + min(0, 12 - window)) <= hits <= min(extents, limit)


def test_warmed_extents_hit_at_their_first_reference() -> None:
    core = new_core(20, 40 * LARGE_EXTENT)
    core.guess("0", [], [], [(0, 40)])
    assert not any(core.spaces["0"].wanted[extent] for extent in range(40)), "without a reference, only plan() makes a plan"
    core.plan()
    wanted = [extent for extent in range(40) if core.spaces["0"].wanted[extent]]
    assert 12 <= len(wanted) <= 20
    for extent in range(40):
        core.hold("0", extent)  # unwanted extents are not cached
    assert (core.clock, core.held_blocks, core.miss_blocks) == (0, len(wanted) * BLOCKS, 0)
    verdicts = [core.reference("0", extent) for extent in range(40)]
    assert [extent for extent, verdict in enumerate(verdicts) if verdict == HIT] == wanted
    assert verdicts.count(MISS) == 40 - len(wanted)


def test_user_pinned_spaces_stay_pinned_when_closed() -> None:
    core = new_core(32, 20 * LARGE_EXTENT, 40 * LARGE_EXTENT)
    core.guess("0", [], [], [(0, 20)])
    core.first("0")
    core.plan()
    for extent in range(20):
        core.hold("0", extent)
    core.close("0")
    for _ in range(4):
        one_pass(core, "1")
    assert len(core.spaces["0"].held) == 20 and core.spaces["1"].held


def interleaved(core: Steering, rounds: int) -> None:
    """A loop of 40 extents makes three passes during one pass of a loop of 120."""
    for step in range(rounds * 120):
        core.reference("0", step % 120)
        core.reference("1", step % 40)


def test_the_shorter_period_is_served_first() -> None:
    core = new_core(50, 120 * LARGE_EXTENT, 40 * LARGE_EXTENT)
    interleaved(core, 4)
    assert len(core.spaces["1"].held) == 40
    assert 0 < len(core.spaces["0"].held) <= 14
    assert core.spaces["1"].learner.period == 80
    assert core.spaces["0"].learner.period == 240


def test_an_idle_loop_loses_its_pins_and_regains_them() -> None:
    core = new_core(40, 100 * LARGE_EXTENT, 60 * LARGE_EXTENT)
    for _ in range(4):
        one_pass(core, "0")
    assert len(core.spaces["0"].held) > 30
    for _ in range(5):
        one_pass(core, "1")
    assert len(core.spaces["1"].held) > 30 and len(core.spaces["0"].held) < 10
    for _ in range(5):
        one_pass(core, "0")
    assert len(core.spaces["0"].held) > 30


def test_alternating_loops_are_both_active() -> None:
    """A draft model makes eight passes, then its target model one; both loops continue."""
    core = new_core(48, 40 * LARGE_EXTENT, 100 * LARGE_EXTENT)
    for turn in range(6 * 9):
        one_pass(core, "1" if turn % 9 == 8 else "0")
    assert len(core.spaces["0"].held) == 40
    assert one_pass(core, "0") == 40


def test_a_closed_loop_loses_its_pins_at_once() -> None:
    core = new_core(40, 100 * LARGE_EXTENT, 60 * LARGE_EXTENT)
    for _ in range(4):
        one_pass(core, "0")
    core.apply(["close", "0"])
    assert len(core.spaces["0"].held) > 30, "no other loop needs the memory yet"
    core.apply(["guess", "1", [], [], [[0, 60]]])
    one_pass(core, "1")
    assert len(core.spaces["1"].held) > 30


def test_a_scan_is_not_pinned_and_displaces_nothing() -> None:
    core = new_core(40, 100 * LARGE_EXTENT, 500 * LARGE_EXTENT)
    for _ in range(4):
        one_pass(core, "0")
    before = set(core.spaces["0"].held)
    one_pass(core, "1")
    assert core.spaces["0"].held == before and not core.spaces["1"].held


def test_extents_of_single_pages_are_evicted_once_a_header_names_them() -> None:
    core = new_core(40, 36 * LARGE_EXTENT)
    for _ in range(3):
        one_pass(core, "0")
    assert len(core.spaces["0"].held) == 36
    core.apply(["guess", "0", [[0, 4]], [[0, 1]], [[0, 36]]])
    assert core.spaces["0"].held == set(range(4, 36))
    core.page("0", 0, BLOCKS)
    assert core.is_single("0", 3) and not core.is_single("0", 4)


# Shares and pins

loop_lists = st.lists(
    st.tuples(st.integers(1, 8192 * MIB), st.none() | st.integers(1, 10**12), st.booleans()), min_size=1, max_size=8
)


@given(st.integers(16 * MIB, 4096 * MIB), st.integers(0, 512 * MIB), loop_lists)
def test_shares_fit_the_budget_and_shorter_periods_are_served_first(
    budget: int, more: int, facts_of_loops: list[tuple[int, int | None, bool]]
) -> None:
    """An active loop is pinned whole or has a window; a larger budget never pins less."""
    loops = [Loop(key, *facts) for key, facts in enumerate(facts_of_loops)]
    shares, larger = share_budget(budget, loops), share_budget(budget + more, loops)
    assert set(shares) == {loop.key for loop in loops}
    assert sum(share.pinned_bytes + share.window_bytes for share in shares.values()) <= budget
    assert sum(share.pinned_bytes for share in larger.values()) >= sum(share.pinned_bytes for share in shares.values())
    for loop in loops:
        share = shares[loop.key]
        assert 0 <= share.pinned_bytes <= loop.size_bytes and 0 <= share.window_bytes <= budget // 2
        assert (share.window_bytes > 0) == (loop.active and share.pinned_bytes < loop.size_bytes)
        for other in loops:
            better = (loop.active, -(loop.period or 1 << 62)) > (other.active, -(other.period or 1 << 62))
            if better and loop.size_bytes <= other.size_bytes and shares[other.key].pinned_bytes == other.size_bytes:
                assert share.pinned_bytes == loop.size_bytes


@given(st.integers(0, 300), st.integers(0, 320))
def test_spread_is_even(total: int, count: int) -> None:
    places = list(range(1000, 1000 + total))
    chosen = spread(places, count)
    assert len(chosen) == len(set(chosen)) == min(count, total)
    assert set(chosen) <= set(places)
    assert chosen == sorted(chosen)
    if 0 < count <= total:
        gaps = [later - earlier for earlier, later in zip(chosen, [*chosen[1:], chosen[0] + total], strict=True)]
        assert max(gaps) - min(gaps) <= 1


def unevenness(places: list[int], pinned: set[int]) -> float:
    """Return the largest difference between the pins among the first n extents and n's share of the pins."""
    share, count, worst = len(pinned) / len(places), 0, 0.0
    for index, place in enumerate(places):
        count += place in pinned
        worst = max(worst, abs(count - share * (index + 1)))
    return worst


@given(st.permutations(range(64)), st.lists(st.integers(0, 64), min_size=1, max_size=12))
def test_a_plan_changes_only_the_difference(places: list[int], targets: list[int]) -> None:
    space = Space("loop", MIB, [SpacePart(64 * MIB, 0, 64)])
    space.learner.set_predicted_order(())
    space.learner.order.adopt(places)
    pinned = set[int]()
    for step, target in enumerate(targets):
        made = plan([space], {"loop": False}, Limits(target * MIB, target * MIB)).spaces["loop"]
        space.adopt(made)
        before, pinned = pinned, {place for place in places if space.wanted[place]}
        assert set(made.unpin) == before - pinned and set(made.pin) == pinned - before
        assert pinned <= before or before <= pinned
        assert made.pinned == len(pinned) == target
        assert unevenness(places, pinned) <= step + 2  # each change adds at most about one extent
