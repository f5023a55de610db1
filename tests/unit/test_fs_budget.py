"""How much memory there is, on recorded /proc and /sys trees, and which budgets and modes that allows."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from llmcache.errors import EnvironmentProblem
from llmcache.fs.engine.budget import DAEMON_BYTES, MIN_BUDGET_BYTES, settle_budget, settle_mode
from llmcache.memory import CAP_IPC_LOCK, GROUP_MARGIN_BYTES, MACHINE_MARGIN_BYTES, cgroup_memory, machine_memory, tightest
from tests.unit.recorded import GIB, MIB, v1_group, v2_group, write_machine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB with 10 GiB available and no cgroup controllers."""
    write_machine(tmp_path, 16 * GIB, 10 * GIB)
    return tmp_path


def test_the_machine(root: Path) -> None:
    memory = machine_memory(root)
    assert (memory.name, memory.total_bytes, memory.available_bytes) == ("machine", 16 * GIB, 10 * GIB)
    assert memory.margin_bytes >= MACHINE_MARGIN_BYTES
    assert memory.spare_bytes == memory.available_bytes - memory.margin_bytes
    assert cgroup_memory(root) == []
    assert tightest(root) == memory


def test_version_1_counts_children_and_clean_cache(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/box\n3:cpu,cpuacct:/box\n")
    v1_group(
        root, "box", 2 * GIB, 1500 * MIB, {"inactive_file": 1, "total_inactive_file": 300 * MIB, "total_active_file": MIB}
    )
    (found,) = cgroup_memory(root)
    assert (found.total_bytes, found.available_bytes) == (2 * GIB, 2 * GIB - 1500 * MIB + 301 * MIB)
    assert GROUP_MARGIN_BYTES <= found.margin_bytes <= 2 * GIB // 32
    assert "box" in found.name
    assert tightest(root) == found


def test_version_1_without_a_limit(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/box\n")
    v1_group(root, "box", 9223372036854771712, GIB, {"total_inactive_file": 0})
    assert cgroup_memory(root) == []


def test_version_2_takes_every_limit_on_the_way_up(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/slice/unit/leaf\n")
    v2_group(root, "slice", str(4 * GIB), 3 * GIB, {"inactive_file": 0, "active_file": 0})
    v2_group(root, "slice/unit", str(2 * GIB), GIB, {"inactive_file": 200 * MIB, "active_file": 100 * MIB})
    v2_group(root, "slice/unit/leaf", "max", GIB, {"inactive_file": 0})
    found = cgroup_memory(root)
    assert {memory.total_bytes: memory.available_bytes for memory in found} == {
        4 * GIB: GIB,
        2 * GIB: GIB + 300 * MIB,
    }
    assert tightest(root).total_bytes == 4 * GIB


def test_hybrid_reads_both_hierarchies(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/old\n1:name=systemd:/new\n0::/new\n")
    v1_group(root, "old", 3 * GIB, GIB, {"total_inactive_file": 0})
    v2_group(root, "unified/new", str(2 * GIB), GIB, {"inactive_file": 0})
    assert sorted(memory.total_bytes for memory in cgroup_memory(root)) == [2 * GIB, 3 * GIB]


def test_a_container_whose_path_is_not_visible_has_its_own_root(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("9:memory:/docker/abc\n")
    v1_group(root, "", 1 * GIB, 0, {"total_inactive_file": 0})
    assert [memory.total_bytes for memory in cgroup_memory(root)] == [GIB]


def test_a_group_that_ends_meanwhile_is_no_error(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/gone/soon\n")
    v2_group(root, "gone", str(GIB), 0, {})
    (root / "sys/fs/cgroup/gone/memory.current").unlink()
    assert cgroup_memory(root) == []


def test_a_budget_that_fits_is_taken_as_it_is(root: Path) -> None:
    assert settle_budget(GIB, root) == GIB
    assert settle_budget(MIN_BUDGET_BYTES, root) == MIN_BUDGET_BYTES


def test_no_budget_means_all_that_can_be_spared(root: Path) -> None:
    assert settle_budget(None, root) == machine_memory(root).spare_bytes - DAEMON_BYTES


def test_more_than_can_be_spared_is_reduced_and_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert settle_budget(12 * GIB, root) == machine_memory(root).spare_bytes - DAEMON_BYTES
    assert "--cache reduced" in caplog.text
    assert "machine" in caplog.text


def refusal(cache_bytes: int | None, root: Path) -> EnvironmentProblem:
    with pytest.raises(EnvironmentProblem) as caught:
        settle_budget(cache_bytes, root)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    return caught.value


def test_more_than_there_is_is_refused_with_what_is_possible(root: Path) -> None:
    error = refusal(64 * GIB, root)
    assert "does not fit" in error.message
    possible = int(str(error.hint).split()[1])
    assert settle_budget(possible, root) == possible


def test_a_tight_cgroup_is_named(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/unit\n")
    v2_group(root, "unit", str(GIB), 0, {"inactive_file": 0})
    assert "unit" in refusal(2 * GIB, root).message


def test_too_small_a_budget_is_refused(root: Path) -> None:
    error = refusal(MIN_BUDGET_BYTES - 1, root)
    assert "too small" in error.message
    assert "at least" in str(error.hint)


@pytest.mark.parametrize("cache_bytes", [None, 64 * MIB])
def test_a_full_machine_has_no_room(tmp_path: Path, cache_bytes: int | None) -> None:
    write_machine(tmp_path, GIB, MACHINE_MARGIN_BYTES + DAEMON_BYTES)
    assert "no memory" in refusal(cache_bytes, tmp_path).message


def status(root: Path, monkeypatch: pytest.MonkeyPatch, *, capable: bool, limit: int) -> None:
    """A process with or without CAP_IPC_LOCK, and its soft RLIMIT_MEMLOCK."""
    (root / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{int(capable) << CAP_IPC_LOCK:016x}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))


@pytest.mark.parametrize(
    ("capable", "limit", "chosen"),
    [(True, 0, "steer"), (False, 8 * MIB, "arena"), (False, GIB, "steer"), (False, resource.RLIM_INFINITY, "steer")],
)
def test_auto_steers_where_the_budget_may_be_locked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capable: bool, limit: int, chosen: str
) -> None:
    status(root, monkeypatch, capable=capable, limit=limit)
    assert settle_mode("auto", GIB, root) == chosen
    assert settle_mode("arena", GIB, root) == "arena"


def test_steer_without_locks_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status(root, monkeypatch, capable=False, limit=8 * MIB)
    with pytest.raises(EnvironmentProblem) as caught:
        settle_mode("steer", GIB, root)
    assert "--mode arena" in str(caught.value.hint)
