"""Output of the daemon: its rotating log or the journal, notifications of systemd, and the access log."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmcache.errors import MissingRequirement, UsageError
from llmcache.mount.daemon import accesslog, daemon, logs
from llmcache.mount.daemon.accesslog import AccessLog, check_path
from llmcache.mount.daemon.daemon import notify
from llmcache.trace.record import Trace
from tests.property.kernel import wait_until


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("llmcache.x", level, __file__, 1, text, None, None)


def lines(path: Path) -> list[str]:
    return [line.split(" ", 3)[3] for line in path.read_text().splitlines()]


def test_a_log_is_rotated_or_reopened_after_a_move(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log"
    path.parent.mkdir()
    handler = logs.LogFile(str(path), 0, streams=False)
    handler.emit(record("one"))
    handler.renew()
    handler.emit(record("two"))
    assert lines(path.with_suffix(".1")) == ["one"] and lines(path) == ["two"]
    path.rename(tmp_path / "moved")
    handler.emit(record("still here"))
    handler.renew()
    handler.emit(record("three"))
    assert lines(tmp_path / "moved") == ["two", "still here"] and lines(path) == ["three"]
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    path.parent.rename(tmp_path / "gone")
    handler.renew()
    handler.emit(record("continues"))
    assert lines(tmp_path / "gone" / "log") == ["three", "continues"], "lines survive the removal of the directory"


def test_the_journal_receives_whole_messages_with_their_priority(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        logs.Journal(str(tmp_path / "journal")).emit(record("two\nlines", logging.WARNING))
        sent = journal.recv(4096)
    head, _, rest = sent.partition(b"MESSAGE\n")
    assert head.splitlines() == [b"PRIORITY=4", b"SYSLOG_IDENTIFIER=llmcachefs", b"LOGGER=llmcache.x"]
    assert int.from_bytes(rest[:8], "little") == 9 and rest[8:] == b"two\nlines\n"
    with pytest.raises(MissingRequirement, match="cannot reach the journal") as caught:
        logs.Journal(str(tmp_path / "none"))
    assert caught.value.hint is not None and "--log FILE" in caught.value.hint


def test_log_targets_are_checked(tmp_path: Path) -> None:
    assert logs.check(None, "/mnt") is None
    assert logs.check("journal", "/mnt") == "journal"
    assert logs.check(str(tmp_path / "a"), "/mnt") == str(tmp_path / "a")
    for target, said in (("/nowhere/x", "/nowhere"), (str(tmp_path), "not a file"), (str(tmp_path / "m/x"), "mount")):
        (tmp_path / "m").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=f"log: .*{said}"):
            logs.check(target, str(tmp_path / "m"))


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified_over_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@llmcache-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0") if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    assert not notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not notify("READY=1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_files_planted_by_others_are_not_used_as_log(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    os.chown(tmp_path / "theirs", 65534, 65534)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "directory").mkdir()
    os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name in ("theirs", "pipe", "link", "directory", "device", "socket"):
        with pytest.raises(MissingRequirement, match=f"log: cannot write '{tmp_path / name}'"):
            logs.handler(str(tmp_path / name))
    with pytest.raises(UsageError, match=r"log: .* is a symbolic link"):
        logs.check(str(tmp_path / "link"), "/mnt")
    assert not (tmp_path / "elsewhere").exists()


def test_a_daemon_survives_the_end_of_its_starter() -> None:
    reading, writing = os.pipe()
    reporter = daemon._Reporter(writing)
    os.close(reading)
    for _ in range(2):
        reporter.handle(record("a warning", logging.WARNING))
        reporter.send(note="")
    reporter.finish()
    reporter.handle(record("later, on another thread", logging.WARNING))


ABOUT = {"command": "test", "extra": {"mode": "arena", "budget_bytes": 1}, "note": ""}


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the whole file, although a daemon that ends waits for a slow disk only for a limited time."""
    monkeypatch.setattr(accesslog, "END_TIMEOUT_S", 120.0)


class Stuck:
    """Stands in for a child that reads nothing: a write blocks until it is released, and then may fail."""

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


def test_appended_rows_and_events_are_in_the_file(tmp_path: Path) -> None:
    """The file holds the rows, the events with their positions, and the number of lost rows."""
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


def test_a_stuck_writer_does_not_block_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Stuck(dies=False)
    monkeypatch.setattr(accesslog, "start_writer", lambda _path: child)
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    begin = time.monotonic()
    for _ in range(accesslog.QUEUE_MAX + 5000):
        a_row(log)
    assert time.monotonic() - begin < 120  # a hang would last forever
    assert 0 < log.lost <= 5000 + accesslog.BATCH_ROWS
    assert log.rows + log.lost == accesslog.QUEUE_MAX + 5000
    child.go_on.set()
    log.close()
    assert child.written >= log.rows * accesslog.ROW.size


def test_rows_count_as_lost_when_the_writer_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = Stuck(dies=True)
    monkeypatch.setattr(accesslog, "start_writer", lambda _path: child)
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    for _ in range(50):
        a_row(log)
    child.go_on.set()
    wait_until(lambda: "the access log" in caplog.text, "the failure is logged")
    assert (log.rows, log.lost) == (50, 50)  # rows sent together and rows still in the queue


def test_a_writer_whose_daemon_is_gone_leaves_no_file(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "llmcache.mount.daemon.logwriter", str(tmp_path / "log.parquet")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, b"", [])


def test_paths_of_the_access_log_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingRequirement, match=r"--access-log: cannot write '/proc/log\.parquet'"):
        AccessLog("/proc/log.parquet", ABOUT)  # not even root can create files in /proc
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
