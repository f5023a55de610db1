"""What a daemon writes: its log, that rotates or is the journal's, what systemd is told, and the way of the access log."""

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

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.fs.daemon import accesslog, daemon, logs
from llmcache.fs.daemon.accesslog import AccessLog, check_path
from llmcache.fs.daemon.daemon import notify
from llmcache.trace.record import Trace
from tests.property.kernel import wait_until


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("llmcache.x", level, __file__, 1, text, None, None)


def lines(path: Path) -> list[str]:
    return [line.split(" ", 3)[3] for line in path.read_text().splitlines()]


def test_a_file_rotates_itself_or_is_opened_anew_where_it_was_moved_away(tmp_path: Path) -> None:
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
    handler.emit(record("goes on"))
    assert lines(tmp_path / "gone" / "log") == ["three", "goes on"], "a directory that has gone costs no lines"


def test_streams_follow_a_rotation(tmp_path: Path) -> None:
    code = f"""
import os
from llmcache.fs.daemon.logs import LogFile
handler = LogFile({str(tmp_path / "log")!r}, 0, streams=True)
os.write(2, b"before\\n")
handler.renew()
os.write(1, b"after\\n")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "log.1").read_text() == "before\n" and (tmp_path / "log").read_text() == "after\n"


def test_the_journal_gets_whole_messages_with_their_priority(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        logs.Journal(str(tmp_path / "journal")).emit(record("two\nlines", logging.WARNING))
        sent = journal.recv(4096)
    head, _, rest = sent.partition(b"MESSAGE\n")
    assert head.splitlines() == [b"PRIORITY=4", b"SYSLOG_IDENTIFIER=llmcachefs", b"LOGGER=llmcache.x"]
    assert int.from_bytes(rest[:8], "little") == 9 and rest[8:] == b"two\nlines\n"
    with pytest.raises(EnvironmentProblem, match="cannot reach the journal") as caught:
        logs.Journal(str(tmp_path / "none"))
    assert caught.value.hint is not None and "--log FILE" in caught.value.hint


def test_places_of_a_log(tmp_path: Path) -> None:
    assert logs.check(None, "/mnt") is None
    assert logs.check("journal", "/mnt") == "journal"
    assert logs.check(str(tmp_path / "a"), "/mnt") == str(tmp_path / "a")
    for target, said in (("/nowhere/x", "/nowhere"), (str(tmp_path), "not a file"), (str(tmp_path / "m/x"), "mount")):
        (tmp_path / "m").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=f"log: .*{said}"):
            logs.check(target, str(tmp_path / "m"))


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@llmcache-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0") if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    assert not notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not notify("READY=1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put another user's files there")
def test_what_others_have_put_there_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    os.chown(tmp_path / "theirs", 65534, 65534)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "directory").mkdir()
    os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name in ("theirs", "pipe", "link", "directory", "device", "socket"):
        with pytest.raises(EnvironmentProblem, match=f"log: cannot write '{tmp_path / name}'"):
            logs.handler(str(tmp_path / name))
    with pytest.raises(UsageError, match=r"log: .* is a symbolic link"):
        logs.check(str(tmp_path / "link"), "/mnt")
    assert not (tmp_path / "elsewhere").exists()


def test_a_daemon_outlives_who_started_it() -> None:
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
    monkeypatch.setattr(accesslog, "start_writer", lambda _path: child)
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
    monkeypatch.setattr(accesslog, "start_writer", lambda _path: child)
    log = AccessLog(str(tmp_path / "log.parquet"), ABOUT)
    for _ in range(50):
        a_row(log)
    child.go_on.set()
    wait_until(lambda: "the access log" in caplog.text, "it is given up")
    assert (log.rows, log.lost) == (50, 50)  # whether they were sent together, or still in the queue


def test_a_directory_that_cannot_be_written_is_named() -> None:
    path = "/proc/log.parquet"  # nobody can make files there, not even root
    with pytest.raises(EnvironmentProblem, match=r"--access-log: cannot write '/proc/log\.parquet'"):
        AccessLog(path, ABOUT)


def test_a_writer_whose_daemon_has_gone_before_it_could_serve_leaves_nothing(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "llmcache.fs.daemon.logwriter", str(tmp_path / "log.parquet")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, b"", [])


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
