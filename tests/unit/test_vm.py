"""tools/vm without booting: usage errors, missing programs, QEMU ends with the run, outcomes and the table of checks."""

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.guests import checks, compare, images, machine, nightly
from tools.guests.__main__ import main
from tools.guests.images import GUESTS, TRIXIE
from tools.guests.machine import GuestFailure, Settings, booted


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMCACHE_VM", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def program(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def image(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image without content, which no program is needed for, and a directory of programs that replace the real ones."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(images, "ensure", lambda _image: tmp_path)
    monkeypatch.setattr(images, "key", lambda: tmp_path / "key")
    monkeypatch.setattr(machine, "make_payload", lambda _scratch: None)
    monkeypatch.setattr(machine, "choose_accelerator", lambda _kernel, _log: ("tcg", None))
    program(programs, "ssh", "exit 255")
    program(programs, "mke2fs", "")
    program(programs, "setpriv", 'shift 5; exec "$@"')  # without --pdeathsig KILL nice -n 2
    return programs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "potato", "--", "true"], "the guests are bookworm, trixie"),
        (["run", "trixie"], "tools/vm run NAME -- COMMAND"),
        (["nightly", "potato"], "there is no guest 'potato'"),
        (["compare", "potato"], "there is no guest 'potato'"),
    ],
)
def test_bad_usage_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_missing_programs_are_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "PATH", "/nowhere")
    assert main(["run", "trixie", "--", "true"]) == 3
    assert "ssh is not installed\nhint: apt-get install openssh-client" in capsys.readouterr().err


def test_an_image_is_built_anew_when_an_input_changes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "key").touch()
    before = images.directory(TRIXIE)
    assert images.directory(TRIXIE) == before
    monkeypatch.setattr(images, "PACKAGES", "other")
    assert images.directory(TRIXIE) != before


def test_qemu_that_exits_at_once_is_reported_with_its_console(
    image: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = cache / "log" / "trixie.console"
    program(
        image, "qemu-system-x86_64", f"echo '[ 1.0] Kernel panic - not syncing' >{console}; echo no such device >&2; exit 1"
    )
    with (
        pytest.raises(GuestFailure, match=r"does not boot \(Kernel panic - not syncing; QEMU exited with status 1\)"),
        booted(GUESTS["trixie"], Settings()),
    ):
        pass
    printed = capsys.readouterr().err
    assert "Kernel panic" in printed and "no such device" in printed
    assert console.exists() and not list(cache.glob("run-*"))


def test_qemu_ends_with_the_run_even_if_it_ignores_sigterm(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(image, "qemu-system-x86_64", f"trap '' TERM\necho $$ >{image}/pid\nwhile :; do sleep 0.1; done")
    program(image, "ssh", "")
    monkeypatch.setattr(machine, "STOP_SECONDS", 1)
    with pytest.raises(KeyboardInterrupt), booted(GUESTS["trixie"], Settings()) as guest:
        assert guest.process.poll() is None
        raise KeyboardInterrupt
    assert guest.process.poll() is not None
    assert not list(cache.glob("run-*"))


def test_directories_of_killed_runs_are_removed(cache: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (cache / f"run-{pid}-x").mkdir()
    machine.remove_old_runs()
    assert [path.name for path in cache.iterdir()] == [f"run-{os.getpid()}-x"]


def test_an_unusable_kvm_gives_tcg_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "setpriv", "echo failed to set MSR 0x10a >&2; kill -ABRT $$")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("os.access", lambda *_: True)
    assert machine.choose_accelerator(tmp_path / "kernel", tmp_path / "log") == ("tcg", "failed to set MSR 0x10a")
    program(tmp_path, "setpriv", "echo Linux version 6.12; exit 0")
    assert machine.choose_accelerator(tmp_path / "kernel", tmp_path / "log") == ("kvm", None)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "pass"), (checks.Failed("x"), "fail"), (checks.Unavailable("x"), "unavailable"), (OSError("x"), "fail")],
)
def test_unavailable_differs_from_pass(error: Exception | None, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(facts: dict[str, Any]) -> None:
        facts["seen"] = 1
        if error:
            raise error

    monkeypatch.setitem(checks.CHECKS, "doctor", check)
    result = checks.run("doctor")
    assert result["outcome"] == outcome
    assert bool(result["reason"]) == (outcome != "pass")
    assert result["facts"] == {"seen": 1}


def test_a_mount_that_this_system_cannot_make_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "llmcachefs", "echo 'llmcache: error: mode inplace is not possible: no BTF' >&2; exit 3")
    with pytest.raises(checks.Unavailable, match=r"^mode inplace is not possible: no BTF$"):
        checks.mount("--mode", "inplace")
    program(tmp_path, "llmcachefs", "echo Traceback >&2; exit 1")
    with pytest.raises(checks.Failed, match="exits with 1: Traceback"):
        checks.mount("--mode", "inplace")


def test_the_reader_of_checks_reads_a_file_as_often_as_wanted(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(range(256)) * 8192)
    for how in ("mmap", "read"):
        command = [sys.executable, *checks.reader(file, 3, how)[1:]]
        done = subprocess.run(command, cwd=images.ROOT, capture_output=True, text=True, check=True)
        assert len(done.stdout.split()) == 3 and len(set(done.stdout.split())) == 1


def guest_result(system: str, kernel: str, **outcomes: str) -> dict[str, Any]:
    checked = [
        {"check": name, "outcome": outcome, "reason": f"{name} reason", "date": "2026-11-29"}
        for name, outcome in outcomes.items()
    ]
    return {"name": system, "system": system, "kernel": kernel, "checks": checked}


def test_the_table_has_a_column_for_each_guest_and_the_reasons() -> None:
    failed = {"name": "backports", "system": "Debian 13", "checks": [], "failure": "guest backports does not boot"}
    old = guest_result("Debian 12", "6.1.0-50-cloud-amd64", inplace="unavailable", steer="pass")
    new = guest_result("Debian 13", "6.12.118+deb13-cloud-amd64", inplace="pass", steer="fail")
    lines = nightly.table({"guests": [old, new, failed]}).splitlines()
    assert lines[0] == "| check | Debian 12, Linux 6.1.0 | Debian 13, Linux 6.12.118 |"
    assert {"| inplace | unavailable | pass |", "| steer | pass | fail |"} <= set(lines)
    assert "- Debian 13, Linux 6.12.118, steer: fail: steer reason" in lines
    assert "- backports: fail: guest backports does not boot" in lines


def test_the_comparison_takes_the_better_page_cache_as_the_opponent() -> None:
    cell = {
        "cell": "MoE, 30% in memory",
        "mglru": True,
        "storage_bytes": {"kernel": 90e6, "kernel-32": 60e6, "inplace": 45e6, "steer": 66e6},
        "problems": {},
    }
    whole = {"cell": "fits", "mglru": None, "storage_bytes": {"kernel": 0.0, "inplace": 0.0, "steer": 1e6}, "problems": {}}
    lines = compare.table({"cells": [cell, whole]}).splitlines()
    assert lines[2] == "| MoE, 30% in memory | on | 60.0 MB | 45.0 MB (0.75) | 66.0 MB (1.10) |"
    assert lines[3] == "| fits | none | 0 B | 0 B | 1.00 MB |"


class Booted:
    """A guest that answers nothing."""

    accelerator = "tcg"

    def output(self, _words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout="")


def test_results_of_earlier_runs_are_kept_and_a_crashed_guest_is_booted_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots: list[str] = []

    @contextlib.contextmanager
    def boot(guest: images.Guest, _settings: Settings) -> Iterator[Booted]:
        boots.append(guest.name)
        yield Booted()

    def check(_machine: object, name: str) -> dict[str, Any]:
        if name == "inplace":
            raise GuestFailure("guest trixie does not answer (Kernel panic)")
        return {"check": name, "outcome": "pass", "reason": "", "facts": {}}

    monkeypatch.setattr(nightly, "booted", boot)
    monkeypatch.setattr(nightly, "run_check", check)
    monkeypatch.setattr(nightly, "kernel_version", lambda _guest: "6.12.118+deb13-cloud-amd64")
    file = cache / "results.json"
    assert nightly.nightly([GUESTS["trixie"]], Settings(), ["doctor", "inplace", "steer"], file) == 1
    assert boots == ["trixie", "trixie"]
    assert nightly.nightly([GUESTS["bookworm"]], Settings(), ["doctor"], file) == 0
    guests = {one["name"]: one for one in json.loads(file.read_text())["guests"]}
    kept = {name: {each["check"]: each["outcome"] for each in one["checks"]} for name, one in guests.items()}
    assert kept == {"trixie": {"doctor": "pass", "inplace": "fail", "steer": "pass"}, "bookworm": {"doctor": "pass"}}
