"""Available memory on recorded /proc and /sys, the budgets that it allows, and their reduction under pressure."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmcache.errors import MissingRequirement
from llmcache.memory import (
    CAP_IPC_LOCK,
    GROUP_MARGIN_BYTES,
    MACHINE_MARGIN_BYTES,
    cgroup_memory,
    limits_apart,
    limits_of_process_apart,
    machine_memory,
    tightest,
)
from llmcache.mount import budget
from llmcache.mount.budget import (
    DAEMON_BYTES,
    LEAST_LIMIT_BYTES,
    MIN_BUDGET_BYTES,
    PressureGauge,
    settle_budget,
    settle_mode,
)
from llmcache.units import parse_size

MIB = 1 << 20
GIB = 1 << 30


def write_machine(root: Path, total: int, available: int) -> None:
    """Write proc/meminfo, and proc/self/cgroup of a process in the root cgroup."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    meminfo = f"MemTotal: {total // 1024:>12} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024:>12} kB\n"
    (root / "proc/meminfo").write_text(meminfo + "HugePages_Total: 0\n")
    if not (root / "proc/self/cgroup").exists():
        (root / "proc/self/cgroup").write_text("0::/\n")


def write_stalls(root: Path, total_us: int) -> None:
    """Write proc/pressure/memory."""
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    lines = [f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\n" for kind in ("some", "full")]
    (root / "proc/pressure/memory").write_text("".join(lines))


def v1_group(root: Path, path: str, limit: int, usage: int, stat: dict[str, int]) -> None:
    """Write a memory cgroup of version 1."""
    _group(root / "sys/fs/cgroup/memory" / path, stat, {"limit_in_bytes": str(limit), "usage_in_bytes": str(usage)})


def v2_group(root: Path, path: str, limit: str, usage: int, stat: dict[str, int], high: str = "max") -> None:
    """Write a cgroup of version 2."""
    _group(root / "sys/fs/cgroup" / path, stat, {"max": limit, "high": high, "current": str(usage)})


def _group(directory: Path, stat: dict[str, int], values: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / f"memory.{name}").write_text(value + "\n")
    (directory / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a machine of 16 GiB with 10 GiB available and no cgroup controllers."""
    write_machine(tmp_path, 16 * GIB, 10 * GIB)
    return tmp_path


def test_machine_memory_is_read_from_meminfo(root: Path) -> None:
    memory = machine_memory(root)
    assert (memory.name, memory.total_bytes, memory.available_bytes) == ("machine", 16 * GIB, 10 * GIB)
    assert memory.margin_bytes >= MACHINE_MARGIN_BYTES
    assert memory.spare_bytes == memory.available_bytes - memory.margin_bytes
    assert cgroup_memory(root) == []
    assert tightest(root) == memory


CLEAN = {"inactive_file": 1, "total_inactive_file": 300 * MIB, "total_active_file": MIB}
# The content of /proc/self/cgroup, the spaces, and total to available bytes of each limit.
CGROUPS: dict[str, tuple[str, list[tuple[Any, ...]], dict[int, int]]] = {
    "version 1 counts children and clean cache": (
        "9:memory:/box\n3:cpu,cpuacct:/box\n",
        [(v1_group, "box", 2 * GIB, 1500 * MIB, CLEAN)],
        {2 * GIB: 2 * GIB - 1500 * MIB + 301 * MIB},
    ),
    "version 1 without a limit": ("9:memory:/box\n", [(v1_group, "box", 9223372036854771712, GIB, CLEAN)], {}),
    "version 2 takes every limit on the way up": (
        "0::/slice/unit/leaf\n",
        [
            (v2_group, "slice", str(4 * GIB), 3 * GIB, {"inactive_file": 0, "active_file": 0}),
            (v2_group, "slice/unit", str(2 * GIB), GIB, {"inactive_file": 200 * MIB, "active_file": 100 * MIB}),
            (v2_group, "slice/unit/leaf", "max", GIB, {"inactive_file": 0}),
        ],
        {4 * GIB: GIB, 2 * GIB: GIB + 300 * MIB},
    ),
    "version 2 slows down above what is high": (
        "0::/unit/leaf\n",
        [
            (v2_group, "unit", str(4 * GIB), 3 * GIB, {"inactive_file": 0}, str(3 * GIB)),
            (v2_group, "unit/leaf", "max", GIB, {"active_file": 100 * MIB}, str(2 * GIB)),
        ],
        {3 * GIB: 0, 2 * GIB: GIB + 100 * MIB},
    ),
    "hybrid reads both hierarchies": (
        "9:memory:/old\n1:name=systemd:/new\n0::/new\n",
        [
            (v1_group, "old", 3 * GIB, GIB, {"total_inactive_file": 0}),
            (v2_group, "unified/new", str(2 * GIB), GIB, {"inactive_file": 0}),
        ],
        {3 * GIB: 2 * GIB, 2 * GIB: GIB},
    ),
    "a container whose path is not visible has its own root": (
        "9:memory:/docker/abc\n",
        [(v1_group, "", GIB, 0, {"total_inactive_file": 0})],
        {GIB: GIB},
    ),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_cgroup_limits_are_those_of_the_kernel(root: Path, case: str) -> None:
    own, spaces, expected = CGROUPS[case]
    (root / "proc/self/cgroup").write_text(own)
    for make, *facts in spaces:
        make(root, *facts)
    found = cgroup_memory(root)
    assert {memory.total_bytes: memory.available_bytes for memory in found} == expected
    assert all(GROUP_MARGIN_BYTES <= memory.margin_bytes <= memory.total_bytes // 32 for memory in found)
    assert tightest(root) == min([*found, machine_memory(root)], key=lambda memory: memory.spare_bytes)


@pytest.mark.parametrize("own", ["0::/unit\n", "9:memory:/unit\n0::/\n"])
def test_no_limit_is_known_without_a_visible_cgroup(root: Path, own: str) -> None:
    (root / "proc/self/cgroup").write_text(own)
    assert limits_apart(7, root) == []


@pytest.mark.parametrize(
    ("own", "make", "top"), [("0::/unit\n", v2_group, ""), ("9:memory:/unit\n0::/\n", v1_group, "memory")]
)
def test_limits_of_another_process_exclude_shared_ones(root: Path, own: str, make: Callable[..., None], top: str) -> None:
    (root / "proc/self/cgroup").write_text(own)
    free = {"inactive_file": 0, "total_inactive_file": 0}
    for name, limit in (("unit", 4 * GIB), ("unit/below", 2 * GIB), ("box", 3 * GIB), ("box/leaf", GIB)):
        make(root, name, limit if top else str(limit), 0, free)
    if not top:
        (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory\n")

    def totals(name: str) -> list[int] | None:
        found = limits_apart((root / "sys/fs/cgroup" / top / name).stat().st_ino, root)
        return None if found is None else [memory.total_bytes for memory in found]

    assert [totals(name) for name in ("box/leaf", "box", "unit/below", "unit")] == [[GIB, 3 * GIB], [3 * GIB], [2 * GIB], []]
    assert limits_apart((root / "proc").stat().st_ino, root) is None
    (root / "proc/7").mkdir()
    (root / "proc/7/cgroup").write_text(own.replace("/unit", "/box"))
    assert [memory.total_bytes for memory in limits_of_process_apart(7, root)] == [3 * GIB]


def test_a_budget_that_does_not_fit_is_reduced_with_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert settle_budget(GIB, root) == GIB
    assert settle_budget(MIN_BUDGET_BYTES, root) == MIN_BUDGET_BYTES
    spare = machine_memory(root).spare_bytes - DAEMON_BYTES
    assert settle_budget(None, root) == spare and not caplog.text
    with caplog.at_level(logging.WARNING):
        assert settle_budget(12 * GIB, root) == spare
    assert "--cache is reduced" in caplog.text and "machine" in caplog.text


def refusal(cache_bytes: int | None, root: Path) -> MissingRequirement:
    with pytest.raises(MissingRequirement) as caught:
        settle_budget(cache_bytes, root)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    return caught.value


def test_an_impossible_budget_is_refused_with_a_possible_one(root: Path) -> None:
    error = refusal(64 * GIB, root)
    assert "does not fit" in error.message
    possible = parse_size(str(error.hint).split()[1])
    assert settle_budget(possible, root) == possible
    (root / "proc/self/cgroup").write_text("0::/unit\n")
    v2_group(root, "unit", str(GIB), 0, {"inactive_file": 0})
    assert "unit" in refusal(2 * GIB, root).message


@pytest.mark.parametrize("cache_bytes", [None, 64 * MIB])
def test_a_mount_on_a_full_machine_is_refused(tmp_path: Path, cache_bytes: int | None) -> None:
    write_machine(tmp_path, GIB, MACHINE_MARGIN_BYTES + DAEMON_BYTES)
    assert "not enough memory" in refusal(cache_bytes, tmp_path).message


@pytest.mark.parametrize(
    ("capable", "limit", "chosen"),
    [(True, 0, "steer"), (False, 8 * MIB, "arena"), (False, GIB, "steer"), (False, resource.RLIM_INFINITY, "steer")],
)
def test_auto_mode_steers_if_the_budget_may_be_locked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capable: bool, limit: int, chosen: str
) -> None:
    """CAP_IPC_LOCK or the soft RLIMIT_MEMLOCK allow locks; without locks, steer mode is refused."""
    (root / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{int(capable) << CAP_IPC_LOCK:016x}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert settle_mode("auto", GIB, root) == chosen
    assert settle_mode("arena", GIB, root) == "arena"
    if chosen == "arena":
        with pytest.raises(MissingRequirement) as caught:
            settle_mode("steer", GIB, root)
        assert "--mode arena" in str(caught.value.hint)


BUDGET = GIB
TOTAL = 4 * GIB  # the margin is MACHINE_MARGIN_BYTES
TICK_S = 0.25


class Watched:
    """A gauge on a recorded machine, with its own clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now_s = 1000.0
        self.stalled_us = 0
        monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.spare(GIB)
        self.gauge = PressureGauge(BUDGET, root)

    def spare(self, spare_bytes: int) -> None:
        """Set the memory beyond the margin (negative: less than the margin)."""
        write_machine(self.root, TOTAL, MACHINE_MARGIN_BYTES + spare_bytes)

    def limit(self, held_bytes: int = BUDGET, stalled: float = 0.0) -> int:
        """Return the limit one tick later; `stalled` is the share of that time in which a task stalled."""
        self.now_s += TICK_S
        self.stalled_us += int(stalled * TICK_S * 1e6)
        write_stalls(self.root, self.stalled_us)
        return self.gauge.limit(held_bytes)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_missing_memory_is_released_at_once(watched: Watched) -> None:
    assert {watched.limit() for _ in range(50)} == {BUDGET}
    watched.spare(-100 * MIB)
    assert BUDGET - 150 * MIB < watched.limit() <= BUDGET - 100 * MIB
    assert 150 * MIB < watched.limit(held_bytes=300 * MIB) <= 200 * MIB


def test_a_budget_that_causes_pressure_grows_ever_more_rarely(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A neighbor lacks memory whenever the budget is used in full, until the neighbor ends."""
    limits = [BUDGET]
    for _ in range(int(600 / TICK_S)):
        watched.spare(-100 * MIB if limits[-1] == BUDGET else 300 * MIB)
        limits.append(watched.limit(held_bytes=limits[-1]))
    assert 3 <= sum(before < after == BUDGET for before, after in pairwise(limits)) <= 15
    assert 3 <= len(caplog.records) <= 11, "at most one message a minute"
    watched.spare(GIB)
    for _ in range(int(300 / TICK_S)):
        watched.limit()
    watched.spare(-100 * MIB)
    watched.limit()
    watched.spare(GIB)
    assert [watched.limit() for _ in range(int(10 / TICK_S))][-1] == BUDGET, "a long calm resets the backoff"


def test_changes_of_the_limit_are_logged_at_most_once_a_minute(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A mount without --cache has all spare memory, of which another program uses a little more every second."""
    for second in range(120):
        watched.spare(-MIB if second else GIB)
        watched.limit(held_bytes=BUDGET - second * MIB)
        watched.now_s += 1
    watched.spare(GIB)
    for _ in range(int(120 / TICK_S)):
        watched.limit(held_bytes=BUDGET)
    texts = [record.message for record in caplog.records]
    assert len(texts) <= 5, texts
    assert texts[0].startswith("memory pressure (free memory is") and "reductions" in texts[1]
    assert texts[-1].startswith("memory pressure is over")


def test_less_spare_memory_means_more_frequent_checks(watched: Watched) -> None:
    pauses = []
    for spare in (-MIB, 0, 20 * MIB, 40 * MIB, GIB):
        watched.spare(spare)
        watched.limit()
        pauses.append(watched.gauge.pause_s)
    assert pauses == sorted(pauses) and pauses[0] == pauses[1] < pauses[2] < pauses[3] < pauses[4]


def test_the_limit_recovers_slowly(watched: Watched) -> None:
    watched.spare(-200 * MIB)
    low = watched.limit()
    watched.spare(GIB)
    limits = [watched.limit(held_bytes=low) for _ in range(100)]
    calm = int(2 / TICK_S)
    assert limits[:calm] == [low] * calm
    assert limits == sorted(limits)
    assert max(after - before for before, after in pairwise(limits)) <= BUDGET // 20
    assert limits[-1] == BUDGET


def test_the_limit_does_not_grow_beyond_what_can_be_spared(watched: Watched) -> None:
    """Pins follow a limit only when clients read; a limit far above what can be spared would be lowered far below it."""
    watched.spare(-200 * MIB)
    watched.limit()
    watched.spare(60 * MIB)
    limits = [watched.limit(held_bytes=100 * MIB) for _ in range(400)]
    assert limits == sorted(limits), "it never falls"
    assert limits[-1] <= 160 * MIB


def test_streamed_pages_in_a_cgroup_are_not_spare_memory(watched: Watched) -> None:
    """The kernel would reclaim fetched pages before they are read."""
    (watched.root / "proc/self/cgroup").write_text("0::/unit\n")
    v2_group(watched.root, "unit", str(2 * GIB), 2 * GIB, {"inactive_file": 40 * MIB})
    assert watched.gauge.limit(BUDGET) == BUDGET
    assert watched.gauge.limit(BUDGET, window_bytes=30 * MIB) < BUDGET - 20 * MIB


def test_the_limit_never_falls_below_the_floor(watched: Watched) -> None:
    watched.spare(-MACHINE_MARGIN_BYTES)
    assert min(watched.limit(held_bytes=20 * MIB) for _ in range(20)) == LEAST_LIMIT_BYTES


def test_stalls_on_a_scarce_machine_lower_the_limit_in_steps(watched: Watched) -> None:
    watched.spare(32 * MIB)
    watched.limit()
    used, limits = BUDGET, []
    for _ in range(3):
        used = watched.limit(used, stalled=0.5)
        limits.append(used)
    assert BUDGET > limits[0] > limits[1] > limits[2] >= BUDGET * 8 // 10


@pytest.mark.parametrize(("spare", "stalled"), [(GIB, 0.5), (32 * MIB, 0.05)])
def test_harmless_stalls_keep_the_limit(watched: Watched, spare: int, stalled: float) -> None:
    watched.now_s += 1
    assert watched.gauge.limit(BUDGET) == BUDGET, "without PSI"
    watched.spare(spare)
    watched.stalled_us = 10**12
    watched.limit()
    assert {watched.limit(stalled=stalled) for _ in range(10)} == {BUDGET}


def test_a_new_budget_is_checked_against_the_memory(watched: Watched) -> None:
    watched.spare(100 * MIB)
    watched.gauge.check(BUDGET + 50 * MIB, held_bytes=BUDGET)
    for budget_bytes in (BUDGET + 150 * MIB, MIB):
        with pytest.raises(MissingRequirement) as caught:
            watched.gauge.check(budget_bytes, held_bytes=BUDGET)
        assert caught.value.exit_code == 3
    watched.gauge.reset(BUDGET // 2)
    assert watched.limit() == BUDGET // 2
