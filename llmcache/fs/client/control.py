"""The control socket of a daemon for its clients: one JSON line in, one JSON line out, and before it as many
`{"progress": …}` as the operation sends; and the files beside it. The daemon's end is in `controlserver.py`.

Files are named after a hash of the mount point's real path, in /run/llmcache for root and in $XDG_RUNTIME_DIR/llmcache
(or /tmp/llmcache-UID) for others: `.sock`, `.json` (pid, source, mount, started), `.lock` (held by the daemon as long
as it lives, so two never share a mount point) and `.log`, all 0600 in a directory of 0700.

A daemon answers its own user and root. Root's commands on a user's mount believe what that user's files say of that
user's processes, and nothing more: files, links and sockets of anybody else there do not count, nor does what others may
write to. The directory is opened first, then what is in it, both without following a link, and each is looked at before
anything is done with it; a process is held by a descriptor from when it was known to be the daemon.

Neither side trusts the other: a daemon outlives any client, and root asks daemons of other users. What is no reply is
refused as such.
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

from llmcache.errors import EnvironmentProblem, MountProblem
from llmcache.files import replacing
from llmcache.procfs import status_of

_LONGEST_REPLY = 1 << 28
RETRY_S = 0.1
_LONGEST_INFO = 1 << 16
_MOST_PIDS = 1 << 22
_MOST_S = 1e12  # what is shown in nanoseconds stays a number
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoDaemon(MountProblem):
    """Nothing listens on the control socket of a mount."""


class NotTheirs(OSError):
    """What lies at the name of a daemon's directory or file is no such thing, or not its user's alone."""


class ControlFiles:
    """The files of one mount point, of the user with that id: `base` with an ending for each."""

    def __init__(self, base: str, uid: int) -> None:
        self.base, self.uid = base, uid
        self.socket, self.info, self.lock, self.log = (base + end for end in (".sock", ".json", ".lock", ".log"))

    def describe(self) -> dict[str, Any]:
        """Contents of the info file; empty if there is none."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            with open(self.open(self.info, os.O_RDONLY), encoding="utf-8") as file:
                found = json.loads(file.read(_LONGEST_INFO))
            return found if isinstance(found, dict) else {}
        return {}

    def open(self, path: str, flags: int) -> int:
        """A descriptor of one of these files, with O_PATH of the socket; NotTheirs, or another OSError."""
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
        """NotTheirs if it is of something else than that kind, or not of their user alone."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        status = os.fstat(fd)
        if stat.S_IFMT(status.st_mode) != kind or status.st_uid != self.uid or status.st_mode & _OTHERS_WRITE:
            os.close(fd)
            raise NotTheirs(errno.EPERM, "other users can change it")
        return fd

    def write_info(self, facts: dict[str, Any]) -> None:
        """Write the info file, whole or not at all."""
        with replacing(self.info) as file:
            file.write(json.dumps(facts).encode())

    def remove(self) -> None:
        """Remove what a daemon leaves that is of no use without it (not the log). Its lock is the caller's."""
        with contextlib.suppress(OSError), self._directory() as directory:
            for path in (self.socket, self.info, self.lock):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.basename(path), dir_fd=directory)


@dataclass(frozen=True)
class Process:
    """A daemon's process: its number, and a descriptor (pidfd) that never stands for another one of that number."""

    pid: int
    fd: int

    def is_running(self) -> bool:
        """False also for a zombie: its memory and descriptors are gone."""
        end = select.poll()
        end.register(self.fd, select.POLLIN)
        if end.poll(0):
            return False
        try:
            return status_of(self.pid)["State"][0] not in "ZX"
        except OSError:
            return False

    def signal(self, number: int) -> bool:
        """Whether it was there to be signalled."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True


def directory(uid: int) -> str:
    """Where a user's daemons keep their files (it may not exist yet)."""
    if uid == 0:
        return "/run/llmcache"
    own = (os.environ.get("XDG_RUNTIME_DIR") if uid == os.geteuid() else None) or f"/run/user/{uid}"
    if os.path.isdir(own):
        return os.path.join(own, "llmcache")
    return f"/tmp/llmcache-{uid}"


SESSION = "LLMCACHE_SESSION"
"""Variable that a private mount namespace of `llmcache run` has: several mounts can be on one path, each in its own."""


def files(point: str, uid: int | None = None) -> ControlFiles:
    """The files of the mount on a real path, made by a user (default: this one), in the session of this process."""
    session = os.environ.get(SESSION, "")
    name = hashlib.sha256(os.fsencode(f"{session}\0{point}" if session else point)).hexdigest()[:16]
    uid = os.geteuid() if uid is None else uid
    return ControlFiles(os.path.join(directory(uid), name), uid)


def root_points() -> dict[str, dict[str, Any]]:
    """What daemons of root tell in their files, by mount point; nothing for those who may not read these."""
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
    """Makes this user's directory, closed to others. EnvironmentProblem: it is someone else's, or a link."""
    path = directory(os.geteuid())
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise EnvironmentProblem(f"{path} is not a directory of this user", "remove it, or set XDG_RUNTIME_DIR")
        os.chmod(path, 0o700)
    except OSError as error:
        hint = "mount a tmpfs there" if os.geteuid() == 0 else "set XDG_RUNTIME_DIR to a directory of your own"
        raise EnvironmentProblem(f"cannot create {path}: {error.strerror}", hint) from error


@contextlib.contextmanager
def daemon(point: str, uid: int | None = None) -> Iterator[Process | None]:
    """The living daemon of a mount while it lasts, or None if that cannot be told. Always a process of that user."""
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
    """True if a daemon lives and says that it is this process, which is still the one that was opened."""
    try:
        owner = os.stat(f"/proc/{process.pid}").st_uid
    except FileNotFoundError:
        return False
    return is_locked(found) and found.describe().get("pid") == process.pid and process.is_running() and owner == found.uid


def daemon_pid(point: str, uid: int | None = None) -> int | None:
    """Process id of the living daemon of a mount, or None if that cannot be told: to be shown, not to be signalled."""
    with daemon(point, uid) as process:
        return None if process is None else process.pid


def is_locked(found: ControlFiles) -> bool:
    """True if a daemon holds the lock file."""
    try:
        fd = found.open(found.lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: another who looks at the same moment is no daemon
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_left(found: ControlFiles) -> None:
    """Remove what a dead daemon left, unless another one serves, or begins to: its lock is kept from it meanwhile."""
    try:
        lock = found.open(found.lock, os.O_RDWR)
    except FileNotFoundError:  # the daemon has removed its files; those there are now are a new one's
        return
    except OSError:  # no daemon takes such a lock
        found.remove()
        return
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(found.lock), os.fstat(lock)):
            found.remove()
    os.close(lock)


@contextlib.contextmanager
def file_errors(path: str) -> Iterator[None]:
    """A with block that makes a daemon's file: EnvironmentProblem where what is there cannot be replaced."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
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
    """Reply of the daemon of the mount on a real path. NoDaemon if nothing listens; MountProblem if it says no,
    with the exit code that belongs to its reason.

    `timeout_s` is how long the daemon may be silent.
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
    """User id of the process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _connect(connection: socket.socket, found: ControlFiles, timeout_s: float) -> None:
    """Connects; TimeoutError if a daemon is there and takes nobody. Its queue being full is no reason to give up."""
    end = time.monotonic() + timeout_s
    fd = found.open(found.socket, os.O_PATH)
    try:
        while True:
            try:
                connection.connect(f"/proc/self/fd/{fd}")  # what was looked at, whatever has its name by now
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
    """A reply, or progress (numbers by name). NoDaemon for no line; MountProblem for an error, and what is no reply."""
    if not line:
        raise NoDaemon(f"the daemon of {point} ended before it answered")
    found: dict[str, Any] = {"error": None}
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(line) if line.endswith(b"\n") else None
        found = told if isinstance(told, dict) else found
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
    """True once no daemon holds the lock and `process` has ended."""
    end = time.monotonic() + timeout_s
    while is_locked(found) or (process is not None and process.is_running()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def reply_errors(mount: str) -> Iterator[None]:
    """While a reply of the mount on a path is read: MountProblem if it is not what this version knows."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        hint = "the daemon may be of another version: unmount and mount again"
        raise MountProblem(f"{mount}: this version of llmcache does not understand the reply of the daemon", hint) from error


def whole(value: object) -> int:
    """A number of bytes that a daemon tells; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{type(value).__name__} for a number of bytes")
    return value


def real(value: object) -> float:
    """Seconds, or a part of 1, that a daemon tells; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_S:
        raise ValueError(f"{type(value).__name__} for seconds")
    return float(value)


def text(value: object) -> str:
    """A name that a daemon tells; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} for a string")
    return value
