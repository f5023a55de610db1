"""The `llmcache doctor` command: findings on simulated machines, and the report on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from llmcache.doctor import Diagnosis, examine, machine, memory, mounting, packages, tracing
from llmcache.doctor.check import FAILED, LIMITED, OK, SKIPPED, Check
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.mount.client import bandwidth
from llmcache.trace.kernel import SOURCES
from tests.unit.command_parts import called

GIB = 1 << 30


def made_up(root: Path, available: int, cgroup: str = "0::/", psi: bool = True) -> Path:
    """Write the files that the memory checks read and return their root."""
    files = {
        "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": cgroup + "\n",
        "proc/self/status": "CapEff:\t0000000000000000\n",
    }
    if cgroup.startswith("0::"):
        files["sys/fs/cgroup/cgroup.controllers"] = "memory\n"
    if psi:
        files["proc/pressure/memory"] = "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def named(findings: list[Check]) -> dict[str, Check]:
    return {finding.name: finding for finding in findings}


def test_the_report_on_this_machine_is_complete_and_sets_the_exit_code() -> None:
    command = [sys.executable, "-m", "llmcache", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert report["schema"] == "llmcache.doctor/1"
    names = [finding["name"] for finding in report["findings"]]
    wanted = "FUSE fusermount3 libfuse user_allow_other root RLIMIT_MEMLOCK BTF tracepoints tier PSI cgroup GPU storage"
    assert set(wanted.split()) | {"free memory", "numpy", "torch"} <= set(names)
    assert len(names) == len(set(names))
    assert done.returncode == (3 if report["failed"] else 0)
    assert report["mountable"] == (done.returncode == 0)
    assert all(finding["remedy"] for finding in report["findings"] if finding["status"] != OK)
    assert sum(report[status] for status in (OK, LIMITED, FAILED, SKIPPED)) == len(names)
    text = called("doctor")
    assert text.returncode == done.returncode and ("a mount is possible" in text.stdout) == report["mountable"]
    assert all(f" {name}" in text.stdout for name in names)


def test_a_directory_is_measured_or_the_obstacle_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "READ_S", 0.1)
    monkeypatch.setattr(bandwidth, "WRITTEN_BYTES", bandwidth.LEAST_BYTES)
    for directory in (tmp_path, Path("/dev/shm")):
        storage = named(machine.examine(str(directory)))["storage"]
        if storage.status == OK:
            assert directory == tmp_path and storage.facts["bandwidth"] > 0 and "(measured" in storage.found
        else:
            assert storage.status == LIMITED and storage.remedy
            assert "in memory" in storage.found and "--" not in storage.found


@pytest.mark.parametrize(("kib", "wanted"), [(32, OK), (128, OK), (129, LIMITED), (8192, LIMITED)])
def test_a_large_read_ahead_is_reported(kib: int, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "read_ahead_kb").write_text(f"{kib}\n")
    monkeypatch.setattr(machine, "read_ahead_file", lambda directory: tmp_path / "read_ahead_kb")
    monkeypatch.setattr(machine, "measure", Mock(side_effect=DataError("not now", "later")))
    found = named(machine.examine(str(tmp_path)))["read-ahead"]
    assert found.status == wanted and found.facts["read_ahead_bytes"] == kib << 10
    assert ("--read-ahead 32Ki" in (found.remedy or "")) == (wanted == LIMITED)


def test_a_path_that_is_not_a_directory_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="DIR: /nowhere"):
        examine("/nowhere")
    assert called("doctor", "/nowhere").returncode == 2


def test_memory_checks_pass_with_enough_memory_and_fail_without(tmp_path: Path) -> None:
    good, poor = made_up(tmp_path / "good", 6 * GIB), made_up(tmp_path / "poor", 100 << 20, psi=False)
    found = named(memory.examine(good))
    assert all(found[name].status == OK for name in ("free memory", "cgroup", "PSI"))
    assert found["RLIMIT_MEMLOCK"].status in (OK, LIMITED)  # depends on the limit of this process
    found = named(memory.examine(poor))
    assert found["free memory"].status == FAILED and found["free memory"].facts["available_bytes"] == 100 << 20
    assert found["PSI"].status == LIMITED
    assert Diagnosis({"memory": list(found.values())}).exit_code == MissingRequirement.exit_code


def test_checks_of_a_mount_depend_on_root_and_fuse_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = named(mounting.examine(root=tmp_path))
    assert found["root"].status == found["user_allow_other"].status == LIMITED
    assert found["fusermount3"].status == FAILED
    (tmp_path / "etc").mkdir()
    for text, wanted in (("# user_allow_other\nmount_max = 9\n", LIMITED), ("mount_max = 9\nuser_allow_other\n", OK)):
        (tmp_path / "etc/fuse.conf").write_text(text)
        assert named(mounting.examine(root=tmp_path))["user_allow_other"].status == wanted


def test_the_tracing_tier_is_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"filemap": "too old", "fexit": "needs root", "syscalls": None, "faults": None}
    for name, reason in reasons.items():
        monkeypatch.setitem(SOURCES, name, SimpleNamespace(probe=lambda reason=reason: reason))
    tier = named(tracing.examine())["tier"]
    assert tier.status == LIMITED and tier.facts["tier"] == "syscalls"
    assert tier.facts["passed_over"] == {"filemap": "too old", "fexit": "needs root"}


@pytest.mark.parametrize(
    ("version", "wanted"), [(None, FAILED), ("8.0.9", FAILED), ("8.1", OK), ("8.10.1+local", OK), ("9.0", LIMITED)]
)
def test_versions_are_compared_as_numbers(version: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(metadata, "requires", lambda _name: ["click<9,>=8.1"])
    assert named(packages.examine())["click"].status == wanted


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ImportError('no AVX2')", "ImportError: no AVX2"), ("import os; os.abort()", "killed by SIGABRT")],
)
def test_an_installed_package_that_cannot_be_imported_fails(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(metadata, "requires", lambda _name: ["numpy>=1", "click>=8"])
    found = named(packages.examine())
    assert found["numpy"].status == FAILED and said in found["numpy"].found and found["click"].status == OK


def test_a_missing_library_hides_only_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmcache.doctor.tracing", None)
    report = examine(None)
    assert set(report.areas) >= {"mount", "memory", "tracing", "machine", "packages"}
