"""What a mount keeps of its loops: shares of the budget, pins, and the machine that steers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.arbitration import Loop, Share, repin, share_budget, spread, window_for
from llmcache.cache.steering import HIT, LARGE_EXTENT, MISS, Steering
from llmcache.units import BLOCK_BYTES

MIB = 1 << 20

budgets = st.integers(16 * MIB, 4096 * MIB)
sizes = st.integers(1, 8192 * MIB)
periods = st.none() | st.integers(1, 10**12)


@st.composite
def loop_lists(draw: st.DrawFn, active: bool | None = None) -> list[Loop]:
    """Up to 8 loops; all active or all idle where `active` says so."""
    states = st.booleans() if active is None else st.just(active)
    return [Loop(key, draw(sizes), draw(periods), draw(states)) for key in range(draw(st.integers(1, 8)))]


def taken(share: Share) -> int:
    return share.pinned_bytes + share.window_bytes


@given(budgets, loop_lists())
def test_shares_fit_the_budget(budget: int, loops: list[Loop]) -> None:
    shares = share_budget(budget, loops)
    assert set(shares) == {loop.key for loop in loops}
    assert sum(taken(share) for share in shares.values()) <= budget
    for loop in loops:
        assert 0 <= shares[loop.key].pinned_bytes <= loop.size_bytes
        assert shares[loop.key].window_bytes >= 0


@given(budgets, loop_lists())
def test_active_loops_are_pinned_whole_or_have_a_window(budget: int, loops: list[Loop]) -> None:
    shares = share_budget(budget, loops)
    for loop in loops:
        share = shares[loop.key]
        whole = share.pinned_bytes == loop.size_bytes
        assert (share.window_bytes > 0) == (loop.active and not whole)


@given(budgets, loop_lists())
def test_shorter_periods_are_served_first(budget: int, loops: list[Loop]) -> None:
    shares = share_budget(budget, loops)
    for one in loops:
        for other in loops:
            better = (one.active, -(one.period or 1 << 62)) > (other.active, -(other.period or 1 << 62))
            if better and one.size_bytes <= other.size_bytes and shares[other.key].pinned_bytes == other.size_bytes:
                assert shares[one.key].pinned_bytes == one.size_bytes


@given(budgets, st.integers(0, 512 * MIB), loop_lists())
def test_more_budget_never_pins_less(budget: int, more: int, loops: list[Loop]) -> None:
    less, greater = share_budget(budget, loops), share_budget(budget + more, loops)
    pinned = sum(share.pinned_bytes for share in less.values())
    assert sum(share.pinned_bytes for share in greater.values()) >= pinned


def test_idle_loops_get_what_is_left() -> None:
    active, idle = Loop("active", 80 * MIB, 10**10, True), Loop("idle", 80 * MIB, 10**9, False)
    assert share_budget(100 * MIB, [idle, active]) == {"active": Share(80 * MIB, 0), "idle": Share(20 * MIB, 0)}


@given(sizes, budgets)
def test_a_window_leaves_half_for_pins(size: int, budget: int) -> None:
    assert 0 < window_for(size, budget) <= budget // 2


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


def _unevenness(places: list[int], pinned: set[int]) -> float:
    """Furthest that the number of pins among the first n places is from n's share of them."""
    share, so_far, worst = len(pinned) / len(places), 0, 0.0
    for index, place in enumerate(places):
        so_far += place in pinned
        worst = max(worst, abs(so_far - share * (index + 1)))
    return worst


@given(st.permutations(range(64)), st.lists(st.integers(0, 64), min_size=1, max_size=12))
def test_repin_reaches_the_count_with_the_difference_only(places: list[int], targets: list[int]) -> None:
    pinned: set[int] = set()
    for step, target in enumerate(targets):
        pin, unpin = repin(places, pinned, target)
        assert not set(pin) & pinned
        assert set(unpin) <= pinned
        assert len(pin) + len(unpin) == abs(target - len(pinned))
        pinned = (pinned | set(pin)) - set(unpin)
        assert len(pinned) == target
        assert _unevenness(places, pinned) <= step + 2  # each change adds at most about one place


def test_repin_leaves_other_groups_pins_alone() -> None:
    assert repin([1, 2, 3, 4], {2, 99}, 0) == ([], [2])
    pin, unpin = repin([1, 2, 3, 4], {2, 99}, 3)
    assert (set(pin) <= {1, 3, 4}, len(pin), unpin) == (True, 2, [])


BLOCKS = LARGE_EXTENT // BLOCK_BYTES


def core_with(limit_mib: int, **sizes_mib: int) -> Steering:
    """A core with believed loops of these sizes."""
    core = Steering(limit_mib * MIB)
    for key, size in sizes_mib.items():
        core.space(key, LARGE_EXTENT, [(size * MIB, 0, size)], "loop")
        core.guess(key, [], [], [(0, size)])
    return core


def wanted(core: Steering, key: str) -> list[int]:
    return [extent for extent in range(core.spaces[key].count) if core.wants(key, extent)]


def test_without_a_reference_a_plan_can_be_asked_for() -> None:
    core = core_with(20, a=40)
    assert not wanted(core, "a")
    core.plan()
    assert 12 <= len(wanted(core, "a")) <= 20
    assert core.clock == 0


def test_what_was_brought_in_hits_at_its_first_reference_and_counts_as_no_miss() -> None:
    core = core_with(20, a=40)
    core.plan()
    kept = wanted(core, "a")
    for extent in range(40):
        core.hold("a", extent)  # what is not wanted stays out
    assert core.held_blocks == len(kept) * BLOCKS and core.miss_blocks == 0
    verdicts = [core.reference("a", extent) for extent in range(40)]
    assert [extent for extent, verdict in enumerate(verdicts) if verdict == HIT] == kept
    assert verdicts.count(MISS) == 40 - len(kept)


def test_first_spaces_keep_their_room_closed_or_not() -> None:
    core = core_with(32, a=20, b=40)
    core.first("a")
    core.plan()
    for extent in range(20):
        core.hold("a", extent)
    core.close("a")
    for _ in range(4):
        for extent in range(40):
            core.reference("b", extent)
    assert core.held_blocks - len(core.spaces["b"].held) * BLOCKS == 20 * BLOCKS
    assert core.spaces["b"].held
