"""Cgroups and disks of benchmarks on simulated /proc and /sys trees, and on real ones when run as root."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from llmcache import cgroup, storage
from tests.mount.live import resident_bytes, wait_for
from tools.bench.runner import forget


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that stands in for /proc and /sys."""
    monkeypatch.setattr(storage, "PROC", tmp_path / "proc")
    monkeypatch.setattr(storage, "SYSFS", tmp_path / "sys")
    return tmp_path


def fake_mounts(tmp_path: Path, mounts: list[tuple[str, str, str]], positions: str) -> None:
    """Write /proc/self/{mountinfo,cgroup} below tmp_path; mounts are (directory, kind, super options)."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    rows = []
    for number, (name, kind, options) in enumerate(mounts, 30):
        (tmp_path / name).mkdir(parents=True)
        rows.append(f"{number} 1 0:{number} / {tmp_path / name} rw,relatime - {kind} {kind} {options}")
    (own / "mountinfo").write_text("\n".join(rows) + "\n")
    (own / "cgroup").write_text(positions)


@pytest.mark.parametrize(
    ("mounts", "positions", "memory", "io"),
    [
        ([("memory", "cgroup", "rw,memory"), ("blkio", "cgroup", "rw,blkio")], "4:memory:/a\n7:blkio:/\n",
         (1, "memory", "memory/a"), (1, "blkio", "blkio")),
        ([("cg", "cgroup2", "rw")], "0::/a\n", (2, "cg", "cg/a"), (2, "cg", "cg/a")),
        ([("unified", "cgroup2", "rw"), ("memory", "cgroup", "rw,memory")], "4:memory:/\n0::/a\n",
         (1, "memory", "memory"), (2, "unified", "unified/a")),
        ([("cg", "cgroup", "rw,memory,blkio")], "4:memory,blkio:/docker/abc\n", (1, "cg", "cg"), (1, "cg", "cg")),
    ],
    ids=["v1", "v2", "hybrid", "outside of the namespace"],
)  # fmt: skip
def test_find_returns_the_hierarchy_that_has_the_controller(
    faked: Path, mounts: list[tuple[str, str, str]], positions: str, memory: tuple[int, str, str], io: tuple[int, str, str]
) -> None:
    fake_mounts(faked, mounts, positions)
    for name, kind, _ in mounts:
        (faked / name / "a").mkdir()
        if kind == "cgroup2":
            (faked / name / "cgroup.controllers").write_text("cpu io pids" + " memory" * (len(mounts) == 1))
    for controller, (version, root, own) in (("memory", memory), ("io", io)):
        assert cgroup.find(controller) == cgroup.Hierarchy(version, faked / root, faked / own)


V1 = {
    "memory.limit_in_bytes": "1000", "blkio.throttle.read_bps_device": "8:0 5", "memory.usage_in_bytes": "5\n",
    "blkio.throttle.io_service_bytes": "8:0 Read 10\n8:0 Write 3\n9:0 Read 7\nTotal 20\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "memory.stat": "cache 1\nrss 2\ntotal_cache 3\ntotal_rss 4\n",
}  # fmt: skip
V2 = {
    "memory.max": "1000", "io.max": "8:0 rbps=5", "memory.current": "5\n",
    "io.stat": "8:16 rbytes=1 wbytes=2\n8:0 rbytes=10 wbytes=3 rios=1\n",
    "memory.events": "low 0\nmax 2\noom 1\noom_kill 1\n", "memory.stat": "anon 4\nfile 3\n",
}  # fmt: skip
UNLIMITED = {
    1: {"memory.limit_in_bytes": "-1", "blkio.throttle.read_bps_device": f"8:0 {1 << 50}"},
    2: {"memory.max": "max", "io.max": "8:0 rbps=max"},
}


@pytest.mark.parametrize(("version", "files"), [(1, V1), (2, V2)])
def test_limits_are_written_and_counters_are_read(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    group, limits = cgroup.Controllers(version, tmp_path), UNLIMITED[version]
    for memory, bps, expected in ((1000, 5, {name: files[name] for name in limits}), (None, None, limits)):
        group.set_memory(memory)
        group.set_read_bps("8:0", bps)
        assert {name: (tmp_path / name).read_text() for name in limits} == expected
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert group.read_bytes("8:0") == 10 and group.read_bytes("7:0") == 0
    assert group.memory() == {"current_bytes": 5, "anon_bytes": 4, "oom_kills": 1}


@pytest.mark.parametrize("busy", [False, True])
def test_controllers_are_disabled_again_if_the_kernel_refuses_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """`busy`: the parent has processes, which are moved to a leaf first."""
    enabled: list[str] = []
    moved: list[Path] = []

    def write(_path: Path, text: str) -> int:
        if text == "+io":
            raise OSError(errno.EINVAL, "refused")
        if busy and not moved:
            raise OSError(errno.EBUSY, "busy")
        (enabled.append if text[0] == "+" else enabled.remove)(text[1:])
        return 1

    (tmp_path / "cgroup.subtree_control").touch()
    monkeypatch.setattr(cgroup, "_move_all", lambda _source, target: moved.append(target))
    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="refused"):
        cgroup.Delegation(tmp_path).hand_down(["memory", "io"])
    assert enabled == [] and moved[1:] == ([tmp_path] if busy else [])
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


def left_of(path: Path) -> int:
    """Drop the clean pages of a file and return the bytes that are still in memory."""
    forget(path)
    return resident_bytes(path)


@pytest.mark.cgroup
def test_a_real_cgroup_limits_memory_counts_reads_and_is_removed(tmp_path: Path) -> None:
    data = Path("/var/tmp") / f"llmcache-cgroup-{os.getpid()}"  # /tmp may be a tmpfs
    data.write_bytes(os.urandom(1 << 20) * 32)
    try:
        group = cgroup.Cgroup("unit", directory=data, memory_bytes=16 << 20)
        with group:
            paths = group.paths
            wait_for(lambda: not left_of(data), "nothing of it is in memory")
            subprocess.run(group.wrap(["cat", data]), stdout=subprocess.DEVNULL, check=True)
            usage = group.usage()
            assert usage.read_bytes >= 32 << 20
            assert 0 < usage.current_bytes <= 16 << 20 and not usage.oom_kills
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


@pytest.mark.cgroup
def test_a_process_inside_execve_is_killed_with_its_cgroup(tmp_path: Path) -> None:
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    for _ in range(20):
        children: list[subprocess.Popen[bytes]] = []
        with cgroup.Cgroup("exec", directory=None) as group:
            children += [subprocess.Popen(group.wrap([script])) for _ in range(16)]
            while not {child.pid for child in children} <= set(group.processes()):
                time.sleep(0.01)
        try:
            assert {child.wait(20) for child in children} == {-9}
        finally:
            for child in children:
                child.kill()
                child.wait()
