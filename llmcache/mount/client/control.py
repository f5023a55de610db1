"""Client of a daemon's control socket, and the files of a daemon. The server is in `controlserver.py`.

Protocol: one JSON line with the request; any number of `{"progress": …}` lines; one JSON line with the reply.

Files are named after a hash of the mount point's real path, in /run/llmcache for root and in $XDG_RUNTIME_DIR/llmcache (or
/tmp/llmcache-UID) for other users: `.sock`, `.json` (pid, source, mount, started), `.lock` (locked by the daemon for its
life) and `.log`. All have mode 0600 in a directory of mode 0700.

A daemon serves its own user and root. Root's commands ignore files, links and sockets that other users own or can write to:
the directory, then each file in it, is opened without following links and checked before use. Neither side trusts the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmcache.errors import MissingRequirement, MountProblem
from llmcache.files import replacing
from llmcache.procfs import is_running

_LONGEST_REPLY = 1 << 28
RETRY_S = 0.1
_LONGEST_INFO = 1 << 16
_MOST_PIDS = 1 << 22
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoDaemon(MountProblem):
    """Nothing listens on the control socket of a mount."""


class NotTheirs(OSError):
    """A daemon's file has the wrong type, or other users own it or can write to it."""


class ControlFiles:
    """The files of one mount point and user."""

    def __init__(self, base: str, uid: int) -> None:
        self.base, self.uid = base, uid
        self.socket, self.info, self.lock, self.log = (base + end for end in (".sock", ".json", ".lock", ".log"))

    def describe(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            with open(self.open(self.info, os.O_RDONLY), encoding="utf-8") as file:
                found = json.loads(file.read(_LONGEST_INFO))
            return found if isinstance(found, dict) else {}
        return {}

    def open(self, path: str, flags: int) -> int:
        """Raise NotTheirs or another OSError; the socket is opened with O_PATH."""
        kind = stat.S_IFSOCK if flags & os.O_PATH else stat.S_IFREG
        with self._directory() as directory:
            fd = self._open(os.path.basename(path), kind, directory)
        if flags & os.O_PATH:
            return fd
        try:
            return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        fd = self._open(os.path.dirname(self.base), stat.S_IFDIR)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, name: str, kind: int, directory: int | None = None) -> int:
        """Open with O_PATH. NotTheirs: wrong type, another owner, or writable by others."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        status = os.fstat(fd)
        if stat.S_IFMT(status.st_mode) != kind or status.st_uid != self.uid or status.st_mode & _OTHERS_WRITE:
            os.close(fd)
            raise NotTheirs(errno.EPERM, "other users can change it")
        return fd

    def write_info(self, facts: dict[str, Any]) -> None:
        with replacing(self.info) as file:
            file.write(json.dumps(facts).encode())

    def remove(self) -> None:
        """Remove all files except the log. The caller must have the lock."""
        with contextlib.suppress(OSError), self._directory() as directory:
            for path in (self.socket, self.info, self.lock):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.basename(path), dir_fd=directory)


@dataclass(frozen=True)
class Process:
    """A process id, and its pidfd, which never refers to a later process with the same id."""

    pid: int
    fd: int

    def is_running(self) -> bool:
        """Return False for a zombie, too: its memory and descriptors are released."""
        end = select.poll()
        end.register(self.fd, select.POLLIN)
        return not end.poll(0) and is_running(self.pid)

    def signal(self, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True


def directory(uid: int) -> str:
    """Return the directory of a user's daemon files."""
    if uid == 0:
        return "/run/llmcache"
    own = (os.environ.get("XDG_RUNTIME_DIR") if uid == os.geteuid() else None) or f"/run/user/{uid}"
    if os.path.isdir(own):
        return os.path.join(own, "llmcache")
    return f"/tmp/llmcache-{uid}"


SESSION = "LLMCACHE_SESSION"
"""Environment variable in a private mount namespace of `llmcache run`: it distinguishes mounts on the same path."""


def files(point: str, uid: int | None = None) -> ControlFiles:
    """Return the files of a user's mount on a real path."""
    session = os.environ.get(SESSION, "")
    name = hashlib.sha256(os.fsencode(f"{session}\0{point}" if session else point)).hexdigest()[:16]
    uid = os.geteuid() if uid is None else uid
    return ControlFiles(os.path.join(directory(uid), name), uid)


def root_points() -> dict[str, dict[str, Any]]:
    """Return the info files of root's daemons, by mount point."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(directory(0)):
            base, kind = os.path.splitext(os.path.join(directory(0), name))
            facts = ControlFiles(base, 0).describe() if kind == ".json" else {}
            point = facts.get("mount")
            if isinstance(point, str) and files(point, 0).base == base:
                found[point] = facts
    return found


def make_directory() -> None:
    """Create this user's directory with mode 0700. MissingRequirement: it belongs to another user, or is a link."""
    path = directory(os.geteuid())
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise MissingRequirement(f"{path} is not a directory of this user", "remove it, or set XDG_RUNTIME_DIR")
        os.chmod(path, 0o700)
    except OSError as error:
        hint = "mount a tmpfs there" if os.geteuid() == 0 else "set XDG_RUNTIME_DIR to a directory of your own"
        raise MissingRequirement(f"cannot create {path}: {error.strerror}", hint) from error


@contextlib.contextmanager
def daemon(point: str, uid: int | None = None) -> Iterator[Process | None]:
    """Yield the running daemon of a mount, always a process of that user."""
    found = files(point, uid)
    pid = found.describe().get("pid")
    if type(pid) is not int or not 0 < pid < _MOST_PIDS:
        yield None
        return
    try:
        process = Process(pid, os.pidfd_open(pid))
    except OSError:  # it has ended, or is a thread
        yield None
        return
    try:
        yield process if _is_daemon(process, found) else None
    finally:
        os.close(process.fd)


def _is_daemon(process: Process, found: ControlFiles) -> bool:
    try:
        owner = os.stat(f"/proc/{process.pid}").st_uid
    except FileNotFoundError:
        return False
    return is_locked(found) and found.describe().get("pid") == process.pid and process.is_running() and owner == found.uid


def daemon_pid(point: str, uid: int | None = None) -> int | None:
    """Return the process id of a mount's daemon, only for display, because the id may be reused."""
    with daemon(point, uid) as process:
        return None if process is None else process.pid


def is_locked(found: ControlFiles) -> bool:
    """Return True if a daemon has the lock file locked."""
    try:
        fd = found.open(found.lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent checks do not conflict
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_left(found: ControlFiles) -> None:
    """Remove a dead daemon's files. The lock prevents a race with a new daemon."""
    try:
        lock = found.open(found.lock, os.O_RDWR)
    except FileNotFoundError:  # the daemon has removed its files; any present ones are those of a new daemon
        return
    except OSError:  # no daemon can lock such a file
        found.remove()
        return
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(found.lock), os.fstat(lock)):
            found.remove()
    os.close(lock)


@contextlib.contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Turn OSErrors into MissingRequirement."""
    try:
        yield
    except OSError as error:
        raise MissingRequirement(
            f"cannot create {path}: {error.strerror}", "remove the file or directory of this name"
        ) from error


def request(
    point: str,
    message: dict[str, Any],
    *,
    uid: int | None = None,
    timeout_s: float = 30.0,
    on_progress: Callable[[dict[str, Any]], None] = lambda _progress: None,
) -> dict[str, Any]:
    """Send a request to the daemon of the mount on a real path; return its reply.

    NoDaemon: no daemon listens; MountProblem: the daemon refuses (with the exit code of its reason). `timeout_s`: the
    longest time without a line from the daemon.
    """
    found = files(point, uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, found, timeout_s)
            other = peer(connection)
        except NotTheirs:
            raise _not_theirs(found, point) from None
        except PermissionError:
            raise MountProblem(f"the daemon of {point} belongs to another user", "use sudo") from None
        except TimeoutError:
            raise MountProblem(f"the daemon of {point} has too many clients", "try again later") from None
        except OSError as error:
            raise NoDaemon(f"no daemon answers for {point}: {error.strerror}") from None
        if other != found.uid:
            raise _not_theirs(found, point)
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while "progress" in (reply := _checked(lines.readline(_LONGEST_REPLY), point)):
                    on_progress(reply["progress"])
        except TimeoutError:
            raise MountProblem(f"the daemon of {point} did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise NoDaemon(f"the daemon of {point} ended: {error.strerror}") from None
    return reply


def peer(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _connect(connection: socket.socket, found: ControlFiles, timeout_s: float) -> None:
    """Connect, and retry while the daemon's queue is full; TimeoutError if it stays full."""
    end = time.monotonic() + timeout_s
    fd = found.open(found.socket, os.O_PATH)
    try:
        while True:
            try:
                connection.connect(f"/proc/self/fd/{fd}")  # the checked socket, even if its name was reused
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError from None
                time.sleep(RETRY_S)
    finally:
        os.close(fd)


def _not_theirs(found: ControlFiles, point: str) -> MountProblem:
    hint = f"check {found.socket} and its directory: only the user of the mount should be able to change them"
    return MountProblem(f"the process that answers for {point} is not the daemon of the mount's user", hint)


def _checked(line: bytes, point: str) -> dict[str, Any]:
    """NoDaemon: no line; MountProblem: an error, or an invalid reply."""
    if not line:
        raise NoDaemon(f"the daemon of {point} ended before it answered")
    found: dict[str, Any] = {"error": None}
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(line) if line.endswith(b"\n") else None
        found = parsed if isinstance(parsed, dict) else found
    match found:
        case {"progress": dict(sizes)} if all(type(one) in (int, float) and abs(one) < 1 << 63 for one in sizes.values()):
            return found
        case {"error": str(message)} if "progress" not in found:
            hint, code = found.get("hint"), found.get("exit_code", MountProblem.exit_code)
            if isinstance(hint, str | None) and type(code) is int and 0 < code < 6:
                refusal = MountProblem(message, hint)
                refusal.exit_code = code
                raise refusal
        case _ if not {"progress", "error"} & found.keys():
            return found
    hint = "the daemon may be of another version: unmount and mount again"
    raise MountProblem(f"the daemon of {point} sent an invalid reply", hint)


def wait_until_gone(found: ControlFiles, timeout_s: float, process: Process | None = None) -> bool:
    """Wait until no daemon has the lock and `process` has ended; return False after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while is_locked(found) or (process is not None and process.is_running()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def reply_errors(mount: str) -> Iterator[None]:
    """Turn errors of reading a reply into MountProblem."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        hint = "the daemon may be of another version: unmount and mount again"
        raise MountProblem(f"{mount}: this version of llmcache does not understand the reply of the daemon", hint) from error
