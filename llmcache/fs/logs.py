"""Where a daemon's log goes: a file that rotates, the journal of systemd, or (in the foreground) stderr.

Rotation on SIGHUP: a file that logrotate has moved away is opened anew under its name; one that is still there is moved
to `FILE.1` first. What libfuse and helpers print follows, where their stdout and stderr are the log.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import sys

from llmcache.errors import EnvironmentProblem, UsageError

log = logging.getLogger("llmcache.logs")

JOURNAL = "journal"
JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "llmcachefs"
FORMAT = "%(asctime)s %(levelname)s %(message)s"
# of syslog
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file (0600); `streams`: this process' stdout and stderr go there as well. `most_bytes` 0: as long as it gets."""

    def __init__(self, path: str, most_bytes: int, streams: bool) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        super().__init__(path, maxBytes=most_bytes, backupCount=1, encoding="utf-8")
        self.setFormatter(logging.Formatter(FORMAT))
        self._streams = streams
        self._redirect()

    def renew(self) -> None:
        """Begins a new file."""
        self.acquire()
        try:
            if self._is_in_place():
                self.doRollover()
            else:
                self.close()
                self.stream = self._open()
                self._redirect()
        except OSError as error:  # no right to rename, no space: the mount goes on, and so does its log
            self.stream = self.stream or self._open()
            log.warning("the log cannot be rotated: %s", error.strerror)
        finally:
            self.release()

    @property
    def _descriptor(self) -> int:
        assert self.stream is not None  # closed only between two files, with the handler's lock held
        return self.stream.fileno()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def doRollover(self) -> None:
        """Moves the file to `FILE.1` and begins a new one, also when it has grown to `most_bytes`."""
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        os.fchmod(self._descriptor, 0o600)
        if self._streams:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(self._descriptor, 1)
            os.dup2(self._descriptor, 2)


class Journal(logging.Handler):
    """The journal of systemd, in its native protocol: a datagram of `FIELD=value` lines."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise EnvironmentProblem(f"log: no journal answers: {error.strerror}", "--log FILE writes to a file") from error

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record; a message of several lines with its length, as the protocol wants."""
        text = self.format(record).encode(errors="replace")
        priority = _PRIORITIES.get(record.levelno, 6)
        head = f"PRIORITY={priority}\nSYSLOG_IDENTIFIER={IDENTIFIER}\nLOGGER={record.name}\n".encode()
        try:
            self._socket.send(head + b"MESSAGE\n" + len(text).to_bytes(8, "little") + text + b"\n")
        except OSError:
            self.handleError(record)


def check(target: str | None, point: str) -> str | None:
    """`target` as a daemon can use it: None, JOURNAL or an absolute path. UsageError for a path that cannot be a log."""
    if target is None or target == JOURNAL:
        return target
    path = os.path.realpath(target)
    if not os.path.isdir(os.path.dirname(path)):
        raise UsageError(f"log: '{os.path.dirname(path)}' is not a directory", "make it first")
    if os.path.commonpath([path, point]) == point:
        raise UsageError(f"log: '{target}' is below the mount point", "name a place outside of it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"log: '{target}' is not a file")
    return path


def handler(target: str | None) -> logging.Handler:
    """The handler of a daemon in the foreground; without a target the journal, where systemd has made that its stderr."""
    if target == JOURNAL or (target is None and _is_stderr_the_journal()):
        return Journal()
    if target is not None:
        return LogFile(target, 0, streams=False)
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter("llmcache: %(message)s"))
    return plain


def _is_stderr_the_journal() -> bool:
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
