"""What users ask of the deterministic core: files first, plans ahead of references, and extents brought in by a warm-up."""

from __future__ import annotations

from llmcache.cache.arbitration import Loop, share_budget
from llmcache.cache.steering import HIT, LARGE_EXTENT, MISS, Steering
from llmcache.units import BLOCK_BYTES

MIB = 1 << 20
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


def test_a_loop_that_is_wanted_first_is_served_before_shorter_periods_and_active_ones() -> None:
    loops = [Loop("quick", 80, 1, True), Loop("first", 80, None, False, first=True)]
    shares = share_budget(120, loops)
    assert shares["first"].pinned_bytes == 80 > shares["quick"].pinned_bytes


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
