"""A daemon's log: files that rotate, the journal's protocol, and what systemd is told."""

from __future__ import annotations

import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.fs.daemon import daemon, logs
from llmcache.fs.daemon.daemon import notify


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
    with pytest.raises(EnvironmentProblem, match="no journal") as caught:
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
        with pytest.raises(EnvironmentProblem, match=f"log: '{tmp_path / name}' cannot be written"):
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
