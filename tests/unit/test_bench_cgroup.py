"""Cgroups and disks of benchmarks against made-up /proc and /sys trees; the real thing where we are root."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from llmcache.errors import EnvironmentProblem
from tests.mount.live import resident_bytes, wait_for
from tools.bench import cgroup, machine
from tools.bench.machine import Disk, disk_from_number


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with /proc and /sys."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYSFS", tmp_path / "sys")
    return tmp_path


def fake_mounts(tmp_path: Path, mounts: list[tuple[str, str, str]], positions: str) -> None:
    """Make /proc/self/{mountinfo,cgroup} below tmp_path; mounts are (directory, kind, super options)."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    rows = []
    for number, (name, kind, options) in enumerate(mounts, 30):
        (tmp_path / name).mkdir(parents=True)
        rows.append(f"{number} 1 0:{number} / {tmp_path / name} rw,relatime - {kind} {kind} {options}")
    (own / "mountinfo").write_text("\n".join(rows) + "\n")
    (own / "cgroup").write_text(positions)


def test_v1_controllers_have_their_own_hierarchies(faked: Path) -> None:
    mounts = [("cg/memory", "cgroup", "rw,memory"), ("cg/blkio", "cgroup", "rw,blkio")]
    fake_mounts(faked, mounts, "4:memory:/a\n7:blkio:/\n")
    (faked / "cg/memory/a").mkdir()
    memory, io = cgroup.find("memory"), cgroup.find("io")
    assert (memory.version, memory.root, memory.own) == (1, faked / "cg/memory", faked / "cg/memory/a")
    assert memory.parents == [memory.root, memory.own]
    assert (io.root, io.parents) == (faked / "cg/blkio", [faked / "cg/blkio"])


def test_v2_where_the_unified_tree_has_the_controllers(faked: Path) -> None:
    fake_mounts(faked, [("cg", "cgroup2", "rw")], "0::/user.slice\n")
    (faked / "cg/cgroup.controllers").write_text("cpu io memory pids\n")
    (faked / "cg/user.slice").mkdir()
    found = cgroup.find("memory")
    assert (found.version, found.own) == (2, faked / "cg/user.slice")
    assert cgroup.find("io") == found


def test_hybrid_takes_the_hierarchy_that_has_the_controller(faked: Path) -> None:
    mounts = [("cg/unified", "cgroup2", "rw"), ("cg/memory", "cgroup", "rw,memory")]
    fake_mounts(faked, mounts, "4:memory:/\n0::/\n")
    (faked / "cg/unified/cgroup.controllers").write_text("io\n")
    assert cgroup.find("memory").version == 1
    assert cgroup.find("io").version == 2


def test_a_position_outside_of_the_namespace_falls_back_to_the_root(faked: Path) -> None:
    fake_mounts(faked, [("cg", "cgroup", "rw,memory")], "4:memory:/docker/abc\n")
    assert cgroup.find("memory").own == faked / "cg"


def test_no_controller_says_what_to_do(faked: Path) -> None:
    fake_mounts(faked, [("cg", "cgroup2", "rw")], "0::/\n")
    (faked / "cg/cgroup.controllers").write_text("")
    with pytest.raises(EnvironmentProblem) as caught:
        cgroup.find("memory")
    assert "memory controller" in caught.value.message
    assert caught.value.hint is not None and "--privileged" in caught.value.hint


def fake_disk(tmp_path: Path) -> None:
    """Make a disk 8:0 with a partition 8:1, linked as in /sys/dev/block and /sys/class/block."""
    disk = tmp_path / "sys/devices/pci/sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1/dev").write_text("8:1\n")
    (disk / "sda1/partition").write_text("1\n")
    for folder, name, target in (
        ("dev/block", "8:0", disk),
        ("dev/block", "8:1", disk / "sda1"),
        ("class/block", "sda1", disk / "sda1"),
    ):
        (tmp_path / "sys" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / folder / name).symlink_to(target)


def test_a_partition_is_resolved_to_its_disk(faked: Path) -> None:
    fake_disk(faked)
    for number in ("8:1", "8:0"):
        assert disk_from_number(number, faked) == Disk("8:0", "sda")


def test_an_anonymous_device_is_found_through_the_mount_table(faked: Path) -> None:
    fake_disk(faked)
    info = faked / "proc/self/mountinfo"
    info.parent.mkdir(parents=True)
    info.write_text("40 1 0:41 / /data rw - btrfs /dev/sda1 rw\n41 1 0:42 / / rw - overlay overlay rw\n")
    assert disk_from_number("0:41", faked).number == "8:0"
    for number, said in (("0:42", "overlay"), ("0:43", "0:43")):
        with pytest.raises(EnvironmentProblem, match=said):
            disk_from_number(number, faked)


def test_read_ahead_is_put_back(faked: Path) -> None:
    fake_disk(faked)
    disk = Disk("8:0", "sda")
    disk.read_ahead_file.parent.mkdir()
    disk.read_ahead_file.write_text("8192\n")
    with pytest.raises(KeyboardInterrupt), disk.read_ahead(128):
        assert disk.read_ahead_file.read_text() == "128\n"
        raise KeyboardInterrupt
    assert disk.read_ahead_file.read_text() == "8192\n"


def test_v1_files(tmp_path: Path) -> None:
    cgroup.V1(tmp_path).set_memory(1000)
    cgroup.V1(tmp_path).set_read_bps("8:0", 5)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == "1000"
    assert (tmp_path / "blkio.throttle.read_bps_device").read_text() == "8:0 5"
    cgroup.V1(tmp_path).set_read_bps("8:0", None)
    assert int((tmp_path / "blkio.throttle.read_bps_device").read_text().split()[1]) > 10**12
    (tmp_path / "blkio.throttle.io_service_bytes").write_text("8:0 Read 10\n8:0 Write 3\n9:0 Read 7\nTotal 20\n")
    assert cgroup.V1(tmp_path).io_bytes("8:0") == (10, 3)
    (tmp_path / "memory.usage_in_bytes").write_text("5\n")
    (tmp_path / "memory.max_usage_in_bytes").write_text("6\n")
    (tmp_path / "memory.failcnt").write_text("2\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "memory.stat").write_text("cache 1\nrss 2\ntotal_cache 3\ntotal_rss 4\n")
    assert cgroup.V1(tmp_path).memory() == {
        "current_bytes": 5, "peak_bytes": 6, "anon_bytes": 4, "file_bytes": 3, "limit_hits": 2, "oom_kills": 1,
    }  # fmt: skip


def test_v2_files(tmp_path: Path) -> None:
    cgroup.V2(tmp_path).set_memory(None)
    cgroup.V2(tmp_path).set_read_bps("8:0", 5)
    assert (tmp_path / "memory.max").read_text() == "max"
    assert (tmp_path / "io.max").read_text() == "8:0 rbps=5"
    cgroup.V2(tmp_path).set_read_bps("8:0", None)
    assert (tmp_path / "io.max").read_text() == "8:0 rbps=max"
    (tmp_path / "io.stat").write_text("8:16 rbytes=1 wbytes=2\n8:0 rbytes=10 wbytes=3 rios=1\n")
    assert cgroup.V2(tmp_path).io_bytes("8:0") == (10, 3)
    assert cgroup.V2(tmp_path).io_bytes("7:0") == (0, 0)
    (tmp_path / "memory.current").write_text("5\n")
    (tmp_path / "memory.events").write_text("low 0\nmax 2\noom 1\noom_kill 1\n")
    (tmp_path / "memory.stat").write_text("anon 4\nfile 3\n")
    assert cgroup.V2(tmp_path).memory() == {
        "current_bytes": 5, "peak_bytes": 5, "anon_bytes": 4, "file_bytes": 3, "limit_hits": 2, "oom_kills": 1,
    }  # fmt: skip
    cgroup.V2(tmp_path / "missing").reclaim(1)


def test_v2_controllers_that_are_there_are_left_alone(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("io memory\n")
    done = cgroup.Delegation(tmp_path)
    done.hand_down(["memory", "io"])
    assert (done.enabled, done.leaf, control.read_text()) == ([], None, "io memory\n")


def test_v2_parent_with_processes_is_emptied_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.procs").write_text("11\n12\n")
    real = Path.write_text
    wrote: list[tuple[Path, str]] = []

    moved: list[str] = []

    def write(path: Path, text: str, *more: object) -> int:
        wrote.append((path, text))
        if path.name == "cgroup.procs":
            moved.append(text)
        elif not moved:
            raise OSError(errno.EBUSY, "busy")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    done = cgroup.Delegation(tmp_path)
    done.hand_down(["memory"])
    assert done.leaf is not None and done.enabled == ["memory"]
    assert [text for path, text in wrote if path == done.leaf / "cgroup.procs"] == ["11", "12"]
    wrote.clear()
    monkeypatch.setattr(Path, "rmdir", lambda path: wrote.append((path, "rmdir")))
    done.undo()
    assert [(path.name, text) for path, text in wrote] == [
        ("cgroup.subtree_control", "-memory"), ("cgroup.procs", "12"), (done.leaf.name, "rmdir"),
    ]  # fmt: skip


def test_only_processes_with_our_mark_are_ours(faked: Path) -> None:
    for pid, environment in ((1, b"A=1\0LLMCACHE_CGROUP=x\0"), (2, b"LLMCACHE_CGROUP=xy\0"), (3, b"")):
        (faked / "proc" / str(pid)).mkdir(parents=True)
        (faked / "proc" / str(pid) / "environ").write_bytes(environment)
    assert [cgroup.is_ours(pid, "x") for pid in (1, 2, 3, 4)] == [True, False, False, False]


def left_of(path: Path) -> int:
    """Drop what may be dropped of a file; returns the bytes that are still in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_bytes(path)


@pytest.mark.cgroup
def test_a_real_group_caps_counts_and_is_removed(tmp_path: Path) -> None:
    data = Path("/var/tmp") / f"llmcache-cgroup-{os.getpid()}"  # /tmp may be a tmpfs
    data.write_bytes(os.urandom(1 << 20) * 32)
    try:
        group = cgroup.Cgroup("unit", directory=data, memory_bytes=16 << 20)
        with group:
            paths = group.paths
            with data.open("rb") as file:
                os.fsync(file.fileno())
            wait_for(lambda: not left_of(data), "nothing of it is in memory")
            subprocess.run(group.wrap(["cat", data]), stdout=subprocess.DEVNULL, check=True)
            usage = group.usage()
            assert usage.read_bytes >= 32 << 20
            assert usage.current_bytes <= 16 << 20 and usage.peak_bytes <= 17 << 20
            group.reclaim()
            assert group.usage().file_bytes < usage.file_bytes
            ours = subprocess.Popen(group.wrap(["sleep", "1000"]))
            other = subprocess.Popen(["sleep", "1000"])
            group.add(other.pid)
            wait_for(lambda: {ours.pid, other.pid} <= set(group.processes()), "both are in the group")
        assert not any(path.exists() for path in paths)
        assert ours.wait(120) == -9
        assert other.poll() is None
        other.kill()
        other.wait(120)
    finally:
        data.unlink()
