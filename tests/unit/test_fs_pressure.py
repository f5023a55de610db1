"""The pressure gauge gives way at once, comes back slowly, and never goes below its floor."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcache.errors import EnvironmentProblem
from llmcache.fs.engine import budget
from llmcache.fs.engine.budget import LEAST_LIMIT_BYTES, PressureGauge
from llmcache.memory import MACHINE_MARGIN_BYTES
from tests.unit.recorded import GIB, MIB, write_machine, write_stalls

BUDGET = GIB
TOTAL = 4 * GIB  # the margin is MACHINE_MARGIN_BYTES
TICK_S = 0.25


class Watched:
    """A gauge on a recorded machine, with a clock of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now_s = 1000.0
        self.stalled_us = 0
        monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.spare(GIB)
        self.gauge = PressureGauge(BUDGET, root)

    def spare(self, spare_bytes: int) -> None:
        """Memory beyond the margin (negative: short of it)."""
        write_machine(self.root, TOTAL, MACHINE_MARGIN_BYTES + spare_bytes)

    def limit(self, used_bytes: int = BUDGET, stalled: float = 0.0) -> int:
        """The limit a tick later; `stalled` is the share of that time in which a task stalled."""
        self.now_s += TICK_S
        self.stalled_us += int(stalled * TICK_S * 1e6)
        write_stalls(self.root, self.stalled_us)
        return self.gauge.limit(used_bytes)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_what_is_missing_is_given_back_at_once_from_what_is_used(watched: Watched) -> None:
    assert {watched.limit() for _ in range(50)} == {BUDGET}
    watched.spare(-100 * MIB)
    assert BUDGET - 150 * MIB < watched.limit() <= BUDGET - 100 * MIB
    assert 150 * MIB < watched.limit(used_bytes=300 * MIB) <= 200 * MIB


def test_the_less_is_left_the_sooner_it_looks_again(watched: Watched) -> None:
    pauses = []
    for spare in (-MIB, 0, 20 * MIB, 40 * MIB, GIB):
        watched.spare(spare)
        watched.limit()
        pauses.append(watched.gauge.pause_s)
    assert pauses == sorted(pauses) and pauses[0] == pauses[1] < pauses[2] < pauses[3] < pauses[4]


def test_it_comes_back_slowly(watched: Watched) -> None:
    watched.spare(-200 * MIB)
    low = watched.limit()
    watched.spare(GIB)
    limits = [watched.limit(used_bytes=low) for _ in range(100)]
    calm = int(2 / TICK_S)
    assert limits[:calm] == [low] * calm
    assert limits == sorted(limits)
    assert max(after - before for before, after in pairwise(limits)) <= BUDGET // 20
    assert limits[-1] == BUDGET


def test_never_below_the_floor(watched: Watched) -> None:
    watched.spare(-MACHINE_MARGIN_BYTES)
    assert min(watched.limit(used_bytes=20 * MIB) for _ in range(20)) == LEAST_LIMIT_BYTES


def test_stalls_on_a_scarce_machine_lower_the_limit_in_steps(watched: Watched) -> None:
    watched.spare(32 * MIB)
    watched.limit()
    used, limits = BUDGET, []
    for _ in range(3):
        used = watched.limit(used, stalled=0.5)
        limits.append(used)
    assert BUDGET > limits[0] > limits[1] > limits[2] >= BUDGET * 8 // 10


@pytest.mark.parametrize(("spare", "stalled"), [(GIB, 0.5), (32 * MIB, 0.05)])
def test_stalls_alone_or_short_ones_or_earlier_ones_do_not(watched: Watched, spare: int, stalled: float) -> None:
    watched.now_s += 1
    assert watched.gauge.limit(BUDGET) == BUDGET, "a kernel without PSI"
    watched.spare(spare)
    watched.stalled_us = 10**12
    watched.limit()
    assert {watched.limit(stalled=stalled) for _ in range(10)} == {BUDGET}


def test_a_new_budget_is_checked(watched: Watched) -> None:
    watched.spare(100 * MIB)
    watched.gauge.check(BUDGET + 50 * MIB, used_bytes=BUDGET)
    for budget_bytes in (BUDGET + 150 * MIB, MIB):
        with pytest.raises(EnvironmentProblem) as caught:
            watched.gauge.check(budget_bytes, used_bytes=BUDGET)
        assert caught.value.exit_code == 3
    watched.gauge.reset(BUDGET // 2)
    assert watched.limit() == BUDGET // 2
