"""How good llmcache's policy is, on traces that are the same everywhere."""

from __future__ import annotations

import pytest

from tools.bench.policybench import OURS, Ratios, bars, groups, measure

RIVALS = ("lru", "lecar", "wtinylfu", "lirs", "belady")


@pytest.fixture(scope="module")
def ratios() -> Ratios:
    return measure((*RIVALS, OURS))


def test_every_bar_is_reached(ratios: Ratios) -> None:
    missed = [bar for bar in bars(ratios) if not bar.passed]
    assert not missed


@pytest.mark.parametrize("group", ["on_device", "hard"])
def test_no_other_policy_is_better_in_a_group_with_loops(ratios: Ratios, group: str) -> None:
    means = groups(ratios)[group]
    assert all(means[OURS] > means[rival] for rival in RIVALS if rival != "belady")


def test_it_is_nowhere_much_worse_than_lru(ratios: Ratios) -> None:
    """The shadow LRU bounds what a wrong plan costs, on every single shape."""
    behind = {name: row["lru"] - row[OURS] for name, row in ratios.items() if row[OURS] < row["lru"] - 0.01}
    assert not behind
