"""The control socket of a daemon: one JSON line in, one JSON line out, and before it as many `{"progress": …}` as the
operation sends; and the files beside it.

Files are named after a hash of the mount point's real path, in /run/llmcache for root and in $XDG_RUNTIME_DIR/llmcache
(or /tmp/llmcache-UID) for others: `.sock` (0600), `.json` (pid, source, mount, started), `.lock` (held by the daemon as
long as it lives, so two never share a mount point) and `.log`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmcache.errors import EnvironmentProblem, LlmcacheError, MountProblem

log = logging.getLogger("llmcache.control")
_LINE = 1 << 20
_ENDING_S = 5.0


Progress = dict[str, Any]


class ClientGone(Exception):
    """Raised in an operation that tells progress: nobody waits for it any more (Ctrl-C)."""


class NoDaemon(MountProblem):
    """Nothing listens on the control socket of a mount."""


@dataclass(frozen=True)
class Files:
    """The files of one mount point."""

    base: str

    @property
    def socket(self) -> str:
        """Path of the control socket."""
        return self.base + ".sock"

    @property
    def info(self) -> str:
        """Path of the description of the daemon."""
        return self.base + ".json"

    @property
    def lock(self) -> str:
        """Path of the lock file."""
        return self.base + ".lock"

    @property
    def log(self) -> str:
        """Path of the log."""
        return self.base + ".log"

    def describe(self) -> dict[str, Any]:
        """Contents of the info file; empty if there is none."""
        with contextlib.suppress(OSError, ValueError), open(self.info, encoding="utf-8") as file:
            found = json.load(file)
            return found if isinstance(found, dict) else {}
        return {}

    def remove(self) -> None:
        """Remove what a daemon leaves that is of no use without it (not the log)."""
        for path in (self.socket, self.info, self.lock):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def directory(uid: int) -> str:
    """Where a user's daemons keep their files (it may not exist yet)."""
    if uid == 0:
        return "/run/llmcache"
    own = os.environ.get("XDG_RUNTIME_DIR") if uid == os.geteuid() else f"/run/user/{uid}"
    if own and os.path.isdir(own):
        return os.path.join(own, "llmcache")
    return f"/tmp/llmcache-{uid}"


def files(point: str, uid: int | None = None) -> Files:
    """The files of the mount on a real path, made by a user (default: this one)."""
    name = hashlib.sha256(os.fsencode(point)).hexdigest()[:16]
    return Files(os.path.join(directory(os.geteuid() if uid is None else uid), name))


def make_directory() -> None:
    """Make this user's directory, closed to others; one that belongs to someone else is refused."""
    path = directory(os.geteuid())
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise EnvironmentProblem(f"{path} is not a directory of this user", "remove it, or set XDG_RUNTIME_DIR")
    os.chmod(path, 0o700)


def daemon_pid(point: str, uid: int | None = None) -> int | None:
    """Process id of the living daemon of a mount, or None if that cannot be told."""
    found = files(point, uid)
    if not is_locked(found):
        return None
    pid = found.describe().get("pid")
    return pid if isinstance(pid, int) else None


def is_locked(found: Files) -> bool:
    """True if a daemon holds the lock file."""
    try:
        fd = os.open(found.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def take_lock(found: Files, point: str) -> int:
    """Descriptor of the lock file, locked for the life of this process; MountProblem if another daemon has it.

    One that is about to end, its mount gone (umount, then mount at once), is waited for.
    """
    from llmcache.fs import mountpoint

    end = time.monotonic() + _ENDING_S
    while True:
        fd = os.open(found.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            if mountpoint.find(point) is None and time.monotonic() < end:
                time.sleep(0.05)
                continue
            pid = found.describe().get("pid")
            by = f" by pid {pid}" if pid else ""
            raise MountProblem(f"{point} is already served{by}", f"end it first: llmcache umount {point}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(found.lock).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # the last owner removed the file between our open and our lock


class ControlServer:
    """Answers requests in threads of their own until closed.

    `answer(request, tell)` may raise; its message is the reply then. `tell` sends progress, or raises ClientGone.
    """

    def __init__(self, found: Files, answer: Callable[[dict[str, Any], Callable[[Progress], None]], Progress]) -> None:
        self._answer = answer
        with contextlib.suppress(FileNotFoundError):
            os.unlink(found.socket)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            self._socket.bind(found.socket)
        finally:
            os.umask(old)
        self._socket.listen(16)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="control-request", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        def tell(progress: Progress) -> None:
            try:
                connection.sendall(json.dumps({"progress": progress}).encode() + b"\n")
            except OSError as error:
                raise ClientGone from error

        with contextlib.suppress(OSError, ClientGone), connection:
            connection.settimeout(10)
            with connection.makefile("rb") as lines:
                line = lines.readline(_LINE)
            if line:
                connection.sendall(json.dumps(self._reply(line, tell)).encode() + b"\n")

    def _reply(self, line: bytes, tell: Callable[[Progress], None]) -> dict[str, Any]:
        try:
            return self._answer(json.loads(line), tell)
        except ClientGone:
            raise
        except LlmcacheError as error:
            return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        except Exception as error:  # reported to the client and logged
            log.exception("control request failed: %r", line)
            return {"error": f"{type(error).__name__}: {error}", "hint": None}

    def close(self) -> None:
        """Stop listening; requests in progress are finished by their threads."""
        self._socket.close()


def request(
    point: str,
    message: dict[str, Any],
    *,
    uid: int | None = None,
    timeout_s: float = 30.0,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> dict[str, Any]:
    """Reply of the daemon of the mount on a real path. NoDaemon if nothing listens; MountProblem if it says no,
    with the exit code that belongs to its reason.

    `timeout_s` is how long the daemon may be silent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(files(point, uid).socket)
        except PermissionError:
            raise MountProblem(f"the daemon of {point} belongs to another user", "use sudo") from None
        except OSError as error:
            raise NoDaemon(f"no daemon answers for {point}: {error.strerror}") from None
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while (line := lines.readline()) and "progress" in (reply := json.loads(line)):
                    on_progress(reply["progress"])
        except TimeoutError:
            raise MountProblem(f"the daemon of {point} did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise NoDaemon(f"the daemon of {point} ended: {error.strerror}") from None
    if not line:
        raise NoDaemon(f"the daemon of {point} ended before it answered")
    if "error" in reply:
        refusal = MountProblem(reply["error"], reply.get("hint"))
        refusal.exit_code = reply.get("exit_code", MountProblem.exit_code)
        raise refusal
    return dict(reply)


def wait_until_gone(found: Files, timeout_s: float, pid: int | None = None) -> bool:
    """True once no daemon holds the lock and the process `pid` has ended."""
    end = time.monotonic() + timeout_s
    while is_locked(found) or (pid is not None and _is_running(pid)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    """False also for a zombie: its memory and descriptors are gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
