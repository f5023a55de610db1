"""Destinations of a daemon's log: a file that rotates, the journal of systemd, or stderr.

SIGHUP rotates: if logrotate has moved the file, a new one is opened; else the file is moved to `FILE.1` first.

Logs are often passed to other people, so they contain neither file names nor content: files are identified by their inode in
SOURCE (`find SOURCE -inum N`), exceptions by type and traceback.
"""

from __future__ import annotations

import errno
import io
import logging
import logging.handlers
import os
import socket
import stat
import sys
import threading
import traceback
from types import TracebackType

from llmcache.errors import MissingRequirement, UsageError
from llmcache.files import is_below

log = logging.getLogger("llmcache.logs")

JOURNAL = "journal"
JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "llmcachefs"
FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Syslog priorities.
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file (0600) of at most `most_bytes` (0: unlimited). `streams`: redirect stdout and stderr to it."""

    def __init__(self, path: str, most_bytes: int, streams: bool) -> None:
        super().__init__(path, maxBytes=most_bytes, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(PrivateFormatter(FORMAT))
        self._streams = streams
        self._redirect()

    def renew(self) -> None:
        """If that fails, continue with the old file."""
        self.acquire()
        fd = os.dup(self._descriptor)
        try:
            if self._is_in_place():
                self.doRollover()
            else:
                self.close()
                self.stream = self._open()
                self._redirect()
        except OSError as error:  # no right to rename, no space, or the directory was removed
            if self.stream is None:
                self.stream = self._open(os.dup(fd))
            log.warning("cannot rotate the log: %s", error.strerror)
        finally:
            os.close(fd)
            self.release()

    def _open(self, fd: int | None = None) -> io.TextIOWrapper:
        fd = open_own(self.baseFilename) if fd is None else fd
        return open(fd, "a", encoding=self.encoding, errors=self.errors)

    @property
    def _descriptor(self) -> int:
        assert self.stream is not None  # it is None only between two files, under the handler's lock
        return self.stream.fileno()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def doRollover(self) -> None:
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        os.fchmod(self._descriptor, 0o600)
        if self._streams:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(self._descriptor, 1)
            os.dup2(self._descriptor, 2)


def open_own(path: str) -> int:
    """Open a file (0600) of this user for appending. OSError: a link, or a file of another user."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "it is not a file of this user")


def problem(path: str, error: OSError) -> MissingRequirement:
    """Return the error for a log that cannot be written."""
    return MissingRequirement(f"log: cannot write '{path}': {error.strerror}", "choose another file with --log")


class PrivateFormatter(logging.Formatter):
    """Formatter that logs exceptions without their text."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return without_text(ei[1]) if ei[1] is not None else ""


def without_text(error: BaseException) -> str:
    """Return types and tracebacks of an exception and its causes; their texts may contain file names."""
    parts = []
    current: BaseException | None = error
    while current is not None:
        reason = f": {os.strerror(current.errno)}" if isinstance(current, OSError) and current.errno else ""
        parts += ["Traceback:\n", *traceback.format_tb(current.__traceback__), f"{type(current).__name__}{reason}\n"]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "".join(parts).rstrip()


def catch_all() -> None:
    """Log unhandled exceptions in threads and C callbacks, without their text."""

    def log_error(error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            log.error("unexpected error", exc_info=error)

    logging.raiseExceptions = False  # otherwise logging prints a failed record, with its text, on stderr, which is the log
    threading.excepthook = lambda args: log_error(args.exc_value)
    sys.unraisablehook = lambda args: log_error(args.exc_value)


class Journal(logging.Handler):
    """The journal of systemd, in its native protocol: a datagram of `FIELD=value` lines."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        super().__init__()
        self.setFormatter(PrivateFormatter())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise MissingRequirement(
                f"log: cannot reach the journal: {error.strerror}", "use --log FILE to write to a file"
            ) from error

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode(errors="replace")
        priority = _PRIORITIES.get(record.levelno, 6)
        head = f"PRIORITY={priority}\nSYSLOG_IDENTIFIER={IDENTIFIER}\nLOGGER={record.name}\n".encode()
        try:
            self._socket.send(head + b"MESSAGE\n" + len(text).to_bytes(8, "little") + text + b"\n")
        except OSError:
            self.handleError(record)


def check(target: str | None, point: str) -> str | None:
    """Return `target` for a daemon: None, JOURNAL or an absolute path. UsageError: the path cannot be a log."""
    if target is None or target == JOURNAL:
        return target
    above, name = os.path.split(os.path.abspath(target))
    path = os.path.join(os.path.realpath(above), name)  # does not follow a last link, which may be another user's
    if not os.path.isdir(os.path.dirname(path)):
        raise UsageError(f"log: '{os.path.dirname(path)}' is not a directory", "create it first")
    if os.path.islink(path):
        raise UsageError(f"log: '{target}' is a symbolic link", "give the path of the file itself")
    if is_below(path, point):
        raise UsageError(f"log: '{target}' is below the mount point", "choose a place outside the mount")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"log: '{target}' is not a file")
    return path


def handler(target: str | None) -> logging.Handler:
    """Return the log handler of a foreground daemon, by default the journal if stderr is the journal, else stderr."""
    if target is None:
        stderr = os.fstat(sys.stderr.fileno())
        if os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}":
            target = JOURNAL
    if target == JOURNAL:
        return Journal()
    if target is not None:
        try:
            return LogFile(target, 0, streams=False)
        except OSError as error:
            raise problem(target, error) from error
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(PrivateFormatter("llmcache: %(message)s"))
    return plain
