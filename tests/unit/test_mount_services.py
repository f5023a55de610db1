"""Service threads restart after failures, refused system calls are detected at start, the mount table is watched."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmcache.mount import services
from llmcache.mount.services import FAILURES_MAX, Services
from llmcache.mount.stats import ServiceStats
from llmcache.procfs import MountWatch, mounts
from tests.seccomp import without


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Services:
    """Return services that restart without a pause."""
    monkeypatch.setattr(services, "PAUSE_S", 0.0)
    return Services()


def test_a_service_that_fails_is_restarted(quick: Services, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([ValueError("one"), KeyError("two"), None])

    def work() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    with caplog.at_level(logging.ERROR):
        thread = quick.thread("loader", work)
        thread.start()
        thread.join(60)
    assert quick.stats() == ServiceStats(failures=2)
    assert "service loader" in caplog.text and "ValueError: one" in caplog.text and "Traceback" in caplog.text


def test_a_service_that_keeps_failing_is_stopped(quick: Services) -> None:
    broken = threading.Event()
    names: list[str] = []

    def on_broken(name: str) -> None:
        names.append(name)
        broken.set()

    quick.on_broken = on_broken
    thread = quick.thread("files", lambda: 1 // 0)  # type: ignore[arg-type]
    thread.start()
    assert broken.wait(60)
    thread.join(60)
    assert names == ["files"] and quick.stats() == ServiceStats(failures=FAILURES_MAX, ended=("files",))


@pytest.mark.parametrize(("number", "name"), [(434, "pidfd_open"), (440, "process_madvise"), (451, None), (9999, None)])
def test_refused_system_calls_are_detected_at_start(number: int, name: str | None) -> None:
    command = [sys.executable, "-c", "from llmcache.mount import syscalls; print(syscalls.refusal())"]
    done = subprocess.run(without(number, errno.EPERM, command), capture_output=True, text=True, check=True)
    expected = (
        "None" if name is None else f"the kernel or a seccomp filter refuses the system call {name}: Operation not permitted"
    )
    assert done.stdout.strip() == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_the_mount_table_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    looks: list[int] = []
    watch = MountWatch(lambda: looks.append(len(mounts())))

    def seen() -> bool:
        before = len(looks)
        watch.current()
        return len(looks) > before

    assert [seen(), seen()] == [True, False]
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        assert [seen(), seen()] == [True, False]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert [seen(), seen()] == [True, False]
    watch.close()
