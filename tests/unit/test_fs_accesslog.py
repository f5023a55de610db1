"""The way of the access log: readers never wait for it, what does not fit is counted, what arrived is in the file."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.fs.daemon import accesslog
from llmcache.fs.daemon.accesslog import AccessLog, check_path
from llmcache.trace.record import Trace

ABOUT = {"command": "test", "extra": {"mode": "arena", "budget_bytes": 1}, "note": ""}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that ends waits for a slow disk only so long; these tests wait for the whole file."""
    monkeypatch.setattr(accesslog, "END_TIMEOUT_S", 120.0)


class Stuck:
    """Stands in for a child that reads nothing: writing to it waits until it is let go, and then may fail."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies
        self.go_on = threading.Event()
        self.stdin = Mock(write=self.write)
        self.wait = Mock(return_value=0)
        self.written = 0

    def write(self, data: bytes) -> None:
        if b"about" in data:
            return
        assert self.go_on.wait(240)
        if self.dies:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.written += len(data)


def a_row(log: AccessLog, number: int = 0) -> None:
    log.row(0, number, 1, 0, 1, os.getpid())


def test_what_was_appended_is_in_the_file(tmp_path: Path) -> None:
    """Rows, events in their places between them, and how many rows were lost."""
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    log.event(("space", "0", 1 << 20, [(1 << 20, 0, 1)], "loop"))
    log.file(0, "/file", 1, 2, 3, 1 << 30)
    for number in range(10_000):
        if number % 100 == 0:
            log.event(("convoy", "0", number))
        a_row(log, number)
    log.lost += 3
    log.close()
    trace = Trace.load(tmp_path / "log.parquet")
    assert trace.first.tolist() == list(range(10_000))
    assert set(trace.pid.tolist()) == {os.getpid()}
    assert (trace.files[0].path, trace.files[0].generation) == ("/file", 3)
    first, *events = json.loads(trace.provenance.extra["events"])
    assert first == [0, ["space", "0", 1 << 20, [[1 << 20, 0, 1]], "loop"]]
    assert events == [[number, ["convoy", "0", number]] for number in range(0, 10_000, 100)]
    assert (trace.provenance.lost_events, trace.provenance.clock) == (3, "monotonic")


def test_nobody_waits_for_a_child_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Stuck(dies=False)
    monkeypatch.setattr(accesslog, "_start", lambda _path: child)
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    begin = time.monotonic()
    for _ in range(accesslog.QUEUE_MAX + 5000):
        a_row(log)
    assert time.monotonic() - begin < 120  # or for ever
    assert 0 < log.lost <= 5000 + accesslog.BATCH_ROWS
    assert log.rows + log.lost == accesslog.QUEUE_MAX + 5000
    child.go_on.set()
    log.close()
    assert child.written >= log.rows * accesslog.ROW.size


def test_rows_that_a_dead_child_did_not_take_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = Stuck(dies=True)
    monkeypatch.setattr(accesslog, "_start", lambda _path: child)
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    for _ in range(50):
        a_row(log)
    child.go_on.set()
    log._thread.join(60)
    assert (log.rows, log.lost) == (50, 50)  # whether they were sent together, or still in the queue
    assert "the access log" in caplog.text


def test_a_directory_that_cannot_be_written_is_named() -> None:
    path = "/proc/log.parquet"  # nobody can make files there, not even root
    with pytest.raises(EnvironmentProblem, match=r"--access-log: cannot write '/proc/log\.parquet'"):
        AccessLog(path, ABOUT)


def test_paths_are_checked_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to("mnt")
    (tmp_path / "old.parquet").touch()
    assert check_path("log.parquet", "/mnt") == str(tmp_path.resolve() / "log.parquet")
    point = str(tmp_path.resolve() / "mnt")
    for path, said in (
        ("a.csv", "parquet"),
        ("x/a.parquet", "directory"),
        ("link/a.parquet", "below"),
        ("old.parquet", "exists"),
    ):
        with pytest.raises(UsageError, match=f"--access-log: .*{said}"):
            check_path(path, point)
