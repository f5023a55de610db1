"""Mount points: find mounts and their users, check whether they respond, and check arguments before mounting.

Functions access a path in a mount only where their docstring says so: the mount of a hanging daemon blocks every call. An
in-place mount has no file system of its own, and is found by the files of its daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcache.errors import MissingRequirement, MountProblem, UsageError
from llmcache.files import is_below
from llmcache.mount import syscalls
from llmcache.mount.client import control
from llmcache.mount.stats import MountStats, from_json
from llmcache.procfs import IN_MEMORY, Mount, fstype_at, mounts

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile


FSTYPE = "fuse.llmcachefs"
IN_PLACE = "inplace"
"""File system type that in-place mounts have here. Their id is 0 if there is no bind mount."""
# The buffers of the recorder fill while it waits for the reply.
_PATIENCE_S = 2.0
KEPT_LOGS = 16
"""Number of logs to keep of mounts that have ended."""
_SOURCE_LOCK = re.compile(r"source-[0-9a-f]+-[0-9a-f]+\.lock")
_OWN_FILE = re.compile(r"[0-9a-f]{16}\.(sock|json|lock|log(\.1)?)")


def resolve(path: str) -> str:
    """Return the real path of a mount point, without accessing its last component if llmcachefs is mounted there.

    UsageError: not a path, or relative to a working directory that no longer exists.
    """
    if "\0" in path:
        raise UsageError(f"MOUNT: {path!r} is not a path")
    try:
        absolute = os.path.abspath(path)
    except FileNotFoundError:
        message = f"MOUNT: '{path}' is relative, and the working directory no longer exists"
        raise UsageError(message, "change to an existing directory") from None
    above, name = os.path.split(absolute)
    likely = os.path.join(os.path.realpath(above), name) if name else absolute
    if any(mount.point == likely and mount.fstype == FSTYPE for mount in mounts().values()):
        return likely
    return os.path.realpath(path)


def find(point: str) -> Mount | None:
    """Return the llmcachefs mount on a real path if it is the topmost there."""
    topmost = next((mount for mount in reversed(mounts().values()) if mount.point == point), None)
    if topmost is not None and topmost.fstype == FSTYPE:
        return topmost
    files = control.files(point, 0)
    number = files.describe().get("inplace")
    if type(number) is not int or (number and (topmost is None or topmost.id != number)):
        return None
    if not number and not control.is_locked(files):
        return None
    return replace(topmost or Mount(0, 0, "/", point, IN_PLACE, "rw"), id=number, fstype=IN_PLACE)


def _all() -> list[Mount]:
    in_place = [mount for point in control.root_points() if (mount := find(point)) and mount.fstype == IN_PLACE]
    return [mount for mount in mounts().values() if mount.fstype == FSTYPE] + in_place


def ours() -> list[str]:
    """Return all mount points of llmcachefs."""
    return [mount.point for mount in _all()]


def remove_dead() -> None:
    """Remove the files of this user's dead daemons that have no mount.

    The files of a dead mount stay, because `llmcache umount --force` needs them. The newest KEPT_LOGS logs stay, too.
    """
    directory, logs = control.directory(os.geteuid()), []
    for name in filter(_SOURCE_LOCK.fullmatch, os.listdir(directory)):
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(directory, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(os.path.join(directory, name))
            finally:
                os.close(fd)
    for name in {name[:16] for name in os.listdir(directory) if _OWN_FILE.fullmatch(name)}:
        found = control.ControlFiles(os.path.join(directory, name), os.geteuid())
        point = found.describe().get("mount")
        if control.is_locked(found) or (isinstance(point, str) and find(point) is not None):
            continue
        control.remove_left(found)
        for log in (found.log, f"{found.log}.1"):
            with contextlib.suppress(FileNotFoundError):
                logs.append((os.lstat(log).st_mtime_ns, log))
    for _, log in sorted(logs)[:-KEPT_LOGS]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)


def of_user() -> list[Mount]:
    """Return the topmost mounts of this user (root: of all users)."""
    return [mount for mount in {mount.point: mount for mount in _all()}.values() if os.geteuid() in (0, mount.owner)]


def ask(
    path: str, message: dict[str, Any], on_progress: Callable[[dict[str, Any]], None] = lambda _progress: None
) -> dict[str, Any]:
    """Return the daemon's reply to a request.

    MountProblem: no mount, no living daemon, or the daemon refuses the request.
    """
    point = resolve(path)
    mount = find(point)
    if mount is None:
        raise not_mounted(path)
    try:
        return control.request(point, message, uid=mount.owner, on_progress=on_progress)
    except control.NoDaemon:
        if mount.fstype == IN_PLACE:
            hint = f"its files can be read, but are not steered; mount again, or: llmcache umount {point}"
            raise MountProblem(f"the daemon of {point} has ended", hint) from None
        if answers(point) == 0:  # it serves
            socket = control.files(point, mount.owner).socket
            hint = "set XDG_RUNTIME_DIR to the value that it had when the mount was made"
            raise MountProblem(f"{point} is served, but no daemon listens at {socket}", hint) from None
        raise stale(point) from None


def answers(point: str, timeout_s: float = 5.0) -> int | None:
    """Call statvfs on the mount; return 0, an errno (ENOTCONN: its daemon is dead), or None if it hangs."""
    result: list[int] = []

    def look() -> None:
        try:
            try:
                os.statvfs(point)
            except ConnectionAbortedError:  # the daemon died during the call: a second call returns the present state
                os.statvfs(point)
            result.append(0)
        except OSError as error:
            result.append(error.errno or errno.EIO)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return result[0] if result else None


def check_device() -> None:
    """Raise MissingRequirement if this user cannot open /dev/fuse."""
    hint = "install and load FUSE 3: sudo apt install fuse3 && sudo modprobe fuse"
    if not os.path.exists("/dev/fuse"):
        raise MissingRequirement("/dev/fuse does not exist", f"{hint}; in a container: --device /dev/fuse")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MissingRequirement("this user may not open /dev/fuse", "sudo chmod 666 /dev/fuse, or run as root")


def check_machine() -> None:
    """Raise MissingRequirement if this user cannot mount over FUSE."""
    check_device()
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        message = "fusermount3 is not installed: without it only root can mount over FUSE"
        raise MissingRequirement(message, "install FUSE 3: sudo apt install fuse3")


def check(source: str, path: str) -> tuple[str, str]:
    """Check SOURCE and MOUNT; return their real paths."""
    point = resolve(path)
    mount = find(point)
    if mount is not None and mount.fstype == IN_PLACE and not control.is_locked(control.files(point, 0)):
        detach(point, lazy=True)  # the daemon of the in-place mount has died
    elif mount is not None:
        if answers(point) == errno.ENOTCONN:
            raise stale(point)
        pid = control.daemon_pid(point, mount.owner)
        served = f"already served by pid {pid}" if pid else "already served by another llmcachefs"
        raise MountProblem(f"{point} is {served}", f"unmount it first: llmcache umount {point}")
    _check_directory(source, "SOURCE", None)
    _check_directory(path, "MOUNT", f"create it first: mkdir -p {path}")
    real = os.path.realpath(source)
    if point != real and is_below(point, real):
        raise UsageError(
            f"MOUNT {path} lies inside SOURCE {source}: the mount would contain itself",
            "mount outside SOURCE, or on SOURCE itself",
        )
    if not os.access(source, os.R_OK | os.X_OK):
        raise UsageError(f"this user may not read SOURCE {source}")
    if (kind := fstype_at(real)) in IN_MEMORY:
        text = f"SOURCE {source} is on {kind}: its files are already in memory, and a mount would store them a second time"
        raise MissingRequirement(text, "use the files where they are; mount directories on a disk only")
    return real, point


def made_point(name: str) -> str:
    """Create a mount point in the directory of the daemons' files."""
    control.make_directory()
    point = os.path.join(control.directory(os.geteuid()), name)
    os.mkdir(point, 0o700)
    return point


def is_made(point: str) -> bool:
    """Return True if `made_point` created the mount point."""
    return os.path.dirname(point) == control.directory(os.geteuid())


def remove_made(point: str) -> None:
    """Remove a mount point of `made_point`, unless a mount remains on it."""
    if is_made(point):
        with contextlib.suppress(OSError):
            os.rmdir(point)


def is_in_place(source: str, path: str) -> bool:
    """Return True if a daemon of root serves SOURCE in place on `path`."""
    point = resolve(path)
    mount, found = find(point), control.files(point, 0)
    served = found.describe().get("source") == os.path.realpath(source)
    return served and mount is not None and mount.fstype == IN_PLACE and control.is_locked(found)


def _check_directory(path: str, what: str, hint: str | None) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist", hint) from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be reached: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{what} {path} is not a directory")


def is_more_open(point: str, source: str) -> bool:
    """Return True if a directory above `source`, but not above `point`, is closed to other users (real paths)."""
    return not all(above.stat().st_mode & stat.S_IXOTH for above in {*Path(source).parents} - {*Path(point).parents})


def not_mounted(path: str, hint: str | None = None) -> MountProblem:
    """Return the error for a path without llmcachefs."""
    points = ", ".join(ours())
    return MountProblem(f"no llmcachefs is mounted on {path}", f"current mounts: {points}" if points else hint)


def stale(point: str) -> MountProblem:
    """Return the error for a mount whose daemon has died."""
    return MountProblem(
        f"{point} is a dead mount: its daemon was killed, and every access fails with '{os.strerror(errno.ENOTCONN)}'",
        f"remove it: llmcache umount --force {point}",
    )


def detach(point: str, *, lazy: bool) -> None:
    """Unmount. MountProblem: without `lazy`, the mount is busy."""
    mount = find(point)
    if mount is None or not mount.id:
        return
    try:
        # A killed daemon cannot exit while one of its threads waits in the kernel for a page of an unanswered READ.
        # MNT_FORCE aborts the connection, which releases the thread and all readers.
        flags = syscalls.MNT_FORCE | syscalls.MNT_DETACH if lazy else 0
        try:
            syscalls.umount2(point, syscalls.UMOUNT_NOFOLLOW | flags)
        except PermissionError:  # neither root nor in a private user namespace
            _fusermount(point, lazy)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise MountProblem(f"cannot unmount {point}: {error.strerror}", mtab_hint()) from error
        raise busy(mount) from error


def mtab_hint(path: str = "/etc/mtab") -> str | None:
    """Return a hint if /etc/mtab is missing, without which fusermount3 does not unmount.

    systemd creates it at boot, so chroots and images that were never booted lack it.
    """
    return None if os.path.exists(path) else f"fusermount3 needs {path}: sudo ln -s ../proc/self/mounts {path}"


def _fusermount(point: str, lazy: bool) -> None:
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", point]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MissingRequirement("fusermount3 is not installed", "install FUSE 3: sudo apt install fuse3") from None
    if result.returncode != 0:
        number = errno.EBUSY if "busy" in result.stderr else errno.EPERM
        raise OSError(number, result.stderr.strip() or os.strerror(number))


def busy(mount: Mount, ignore: Callable[[int], bool] = lambda _pid: False) -> MountProblem:
    """Return the error for a busy mount, with the processes that use it."""
    found = list(users(mount, ignore))
    seen = ", ".join(f"{name} (pid {pid}: {how})" for pid, name, how in found[:8])
    if len(found) > 8:
        seen += f" and {len(found) - 8} more"
    reason = f"in use by {seen}" if seen else "in use by a process that is not visible to this user"
    hint = f"end them first, or: llmcache umount --force {mount.point}"
    return MountProblem(f"{mount.point} is busy: {reason}", hint)


def users(mount: Mount, ignore: Callable[[int], bool] = lambda _pid: False) -> Iterator[tuple[int, str, str]]:
    """Yield (pid, name, kind of use) of the visible processes that keep a mount busy."""
    yield from _processes(lambda pid: None if ignore(pid) else _use(f"/proc/{pid}", mount))


def users_of(directory: str) -> Iterator[tuple[int, str]]:
    """Yield (pid, name) of other processes with files below a real path."""
    for pid, name, _ in _processes(lambda pid: _has_files(f"/proc/{pid}", directory.rstrip("/") + "/")):
        if pid != os.getpid():
            yield pid, name


def _processes(use: Callable[[int], str | None]) -> Iterator[tuple[int, str, str]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may end at any moment, or belong to another user
            if found := use(int(name)):
                with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as comm:
                    yield int(name), comm.read().strip(), found


def _use(process: str, mount: Mount) -> str | None:
    for link in ("cwd", "root"):
        target = os.readlink(f"{process}/{link}")
        if is_below(target, mount.point):
            fd = os.open(f"{process}/{link}", os.O_PATH | os.O_CLOEXEC)  # magic links do not involve the daemon
            try:
                if _is_on(mount, f"/proc/self/fdinfo/{fd}"):
                    return "working directory" if link == "cwd" else "root directory"
            finally:
                os.close(fd)
    for number in os.listdir(f"{process}/fdinfo"):
        with contextlib.suppress(OSError):
            if _is_on(mount, f"{process}/fdinfo/{number}"):
                return "open file"
    mark = f" {os.major(mount.dev):02x}:{os.minor(mount.dev):02x} " if mount.fstype == FSTYPE else f" {mount.point}/"
    with open(f"{process}/maps", encoding="utf-8", errors="replace") as maps:
        return "mapped file" if any(mark in line for line in maps) else None


def _has_files(process: str, below: str) -> str | None:
    for number in os.listdir(f"{process}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{process}/fd/{number}")
            if target.startswith(below) and not os.path.isdir(target):
                return "open file"
    with open(f"{process}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        return "mapped file" if any(f" {below}" in line for line in maps) else None


def _is_on(mount: Mount, fdinfo: str) -> bool:
    with open(fdinfo, encoding="ascii") as info:
        return f"mnt_id:\t{mount.id}\n" in info.read()


def locked_bytes(file: TraceFile) -> int:
    """Return the bytes of the loops of `file` that its mount has locked in the page cache; 0 in mode arena or without mount.

    The shards of a model count for the first one. MountProblem: no reply, or an invalid one.
    """
    for mount, base in steering(file.path, file.dev):
        document = control.request(mount.point, {"op": "stats"}, uid=mount.owner, timeout_s=_PATIENCE_S)
        with control.reply_errors(mount.point):
            stats = from_json(MountStats, document)
        if stats.mode == "arena":
            return 0
        return sum(loop.pinned_bytes for each in stats.files if base + each.path == file.path for loop in each.loops)
    return 0


def steering(path: str, dev: int) -> Iterator[tuple[Mount, str]]:
    """Yield the mount that serves a file, and the root of the paths in its replies."""
    for mount in mounts().values():
        if mount.fstype == FSTYPE and mount.dev == dev:
            yield mount, mount.point
    for point, facts in control.root_points().items():
        for base in (point, str(facts.get("source"))):
            mounted = find(point) if path.startswith(base + "/") else None
            if mounted is not None and mounted.fstype == IN_PLACE:
                yield mounted, base
