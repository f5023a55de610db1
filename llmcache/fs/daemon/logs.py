"""Where a daemon's log goes: a file that rotates, the journal of systemd, or (in the foreground) stderr.

Rotation on SIGHUP: a file that logrotate has moved away is opened anew under its name; one that is still there is moved
to `FILE.1` first. What libfuse and helpers print follows, where their stdout and stderr are the log.

A log names no file of a model and nothing of its content: other people get to read logs. Files go by the number of their
inode in SOURCE (`find SOURCE -inum N`), and of exceptions the places in our code and the kind are written, not the text.
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
        super().__init__(path, maxBytes=most_bytes, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(PrivateFormatter(FORMAT))
        self._streams = streams
        self._redirect()

    def renew(self) -> None:
        """Begins a new file; where that is not possible, the log goes on in the old one."""
        self.acquire()
        fd = os.dup(self._descriptor)
        try:
            if self._is_in_place():
                self.doRollover()
            else:
                self.close()
                self.stream = self._open()
                self._redirect()
        except OSError as error:  # no right to rename, no space, no such directory any more: the mount goes on
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


def open_own(path: str) -> int:
    """A descriptor to append to a file of this user, new (0600) or not; OSError for a link, and what is another user's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "it is not a file of this user")


def problem(path: str, error: OSError) -> EnvironmentProblem:
    """The error to raise where there can be no log at `path`."""
    return EnvironmentProblem(f"log: cannot write '{path}': {error.strerror}", "choose another file with --log")


class PrivateFormatter(logging.Formatter):
    """Writes of an exception what `without_text` leaves of it."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """Text of an exception."""
        return without_text(ei[1]) if ei[1] is not None else ""


def without_text(error: BaseException) -> str:
    """Where an exception came from, and of which kind it and those behind it are; its own text may name files."""
    parts = []
    behind: BaseException | None = error
    while behind is not None:
        said = f": {os.strerror(behind.errno)}" if isinstance(behind, OSError) and behind.errno else ""
        parts += ["Traceback:\n", *traceback.format_tb(behind.__traceback__), f"{type(behind).__name__}{said}\n"]
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return "".join(parts).rstrip()


def catch_all() -> None:
    """From now on exceptions that nobody handles, in threads and in callbacks of C, are logged without their text."""

    def said(error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            log.error("unexpected error", exc_info=error)

    logging.raiseExceptions = False  # a record that cannot be written would be shown whole on stderr, which is the log
    threading.excepthook = lambda args: said(args.exc_value)
    sys.unraisablehook = lambda args: said(args.exc_value)


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
            raise EnvironmentProblem(
                f"log: cannot reach the journal: {error.strerror}", "use --log FILE to write to a file"
            ) from error

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
    above, name = os.path.split(os.path.abspath(target))
    path = os.path.join(os.path.realpath(above), name)  # a link there may be another user's: it is not followed
    if not os.path.isdir(os.path.dirname(path)):
        raise UsageError(f"log: '{os.path.dirname(path)}' is not a directory", "create it first")
    if os.path.islink(path):
        raise UsageError(f"log: '{target}' is a symbolic link", "give the path of the file itself")
    if os.path.commonpath([path, point]) == point:
        raise UsageError(f"log: '{target}' is below the mount point", "choose a place outside the mount")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"log: '{target}' is not a file")
    return path


def handler(target: str | None) -> logging.Handler:
    """The handler of a daemon in the foreground; without a target the journal, where systemd has made that its stderr."""
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
