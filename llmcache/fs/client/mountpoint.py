"""Mount points: what is mounted where, whether it answers, who uses it, and the checks before mounting.

Everything is read from /proc; a path below a mount is touched only where a function says so, because a daemon that was
killed leaves a mount that answers ENOTCONN, and one that hangs leaves a mount on which every call hangs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcache.errors import EnvironmentProblem, MountProblem, UsageError
from llmcache.fs import syscalls
from llmcache.fs.client import control

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile


FSTYPE = "fuse.llmcachefs"
IN_PLACE = "inplace"
"""In the place of a file system's type, of entries of mounts in place."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MountEntry:
    """One line of mountinfo."""

    mount_id: int
    device: str  # "major:minor"
    point: str
    fstype: str
    options: str

    @property
    def owner(self) -> int:
        """User id that made a FUSE mount."""
        found = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(found.group(1)) if found else 0


def entries() -> list[MountEntry]:
    """All mounts of this mount namespace, in mounting order."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [_parse(line) for line in lines]


def _parse(line: str) -> MountEntry:
    fields = line.split()
    end = fields.index("-", 6)
    point = _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
    # Escapes stand for single bytes of ASCII here (space, tab, newline, backslash): other bytes are left as they are.
    return MountEntry(int(fields[0]), fields[2], point, fields[end + 1], fields[end + 3])


def fstype_of(path: str) -> str:
    """Type of the file system that a real path is on, "unknown" where no mount tells."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return next((entry.fstype for entry in reversed(entries()) if entry.device == name), "unknown")


def resolve(path: str) -> str:
    """Real path of a mount point. Its last component is not looked at if something of ours is mounted there.

    UsageError if it is relative to a directory that has gone, or no path at all."""
    if "\0" in path:
        raise UsageError(f"MOUNT: {path!r} is no path")
    try:
        absolute = os.path.abspath(path)
    except FileNotFoundError:
        said = f"MOUNT: '{path}' is relative, and the working directory has gone"
        raise UsageError(said, "cd to one that is there") from None
    above, name = os.path.split(absolute)
    likely = os.path.join(os.path.realpath(above), name) if name else absolute
    if any(entry.point == likely and entry.fstype == FSTYPE for entry in entries()):
        return likely
    return os.path.realpath(path)


def find(point: str) -> MountEntry | None:
    """Our mount on a real path, or None; only the topmost mount there counts."""
    here = [entry for entry in entries() if entry.point == point]
    if here and here[-1].fstype == FSTYPE:
        return here[-1]
    return _in_place(point, here[-1] if here else None)


def _in_place(point: str, topmost: MountEntry | None) -> MountEntry | None:
    """The mount in place on `point`, if its daemon's files tell of one: a bind mount, or none (mount id 0)."""
    from llmcache.fs.client import control

    files = control.files(point, 0)
    number = files.describe().get("inplace")
    if type(number) is not int:
        return None
    if number and (topmost is None or topmost.mount_id != number):
        return None
    if not number and not control.is_locked(files):
        return None
    return MountEntry(number, topmost.device if topmost else "0:0", point, IN_PLACE, topmost.options if topmost else "rw")


def ours() -> list[str]:
    """Mount points of all llmcachefs mounts."""
    return [entry.point for entry in entries() if entry.fstype == FSTYPE] + [entry.point for entry in _all_in_place()]


def _all_in_place() -> list[MountEntry]:
    """The mounts in place that root has made, as their daemons' files tell."""
    from llmcache.fs.client import control

    points = control.told_points()
    return [entry for point in points if (entry := find(point)) is not None and entry.fstype == IN_PLACE]


def of_user() -> list[MountEntry]:
    """llmcachefs mounts that this user made, for root all; of several on one point the topmost."""
    uid = os.geteuid()
    topmost = {entry.point: entry for entry in [*entries(), *_all_in_place()] if entry.fstype in (FSTYPE, IN_PLACE)}
    return [entry for entry in topmost.values() if uid in (0, entry.owner)]


def answers(point: str, timeout_s: float = 5.0) -> int | None:
    """0 if the mount answers statvfs, an errno (ENOTCONN: its daemon is dead) or None if it hangs. Touches the mount."""
    result: list[int] = []

    def ask() -> None:
        try:
            try:
                os.statvfs(point)
            except ConnectionAbortedError:  # its daemon has died meanwhile: what it is now, the next call says
                os.statvfs(point)
            result.append(0)
        except OSError as error:
            result.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return result[0] if result else None


def check_device() -> None:
    """EnvironmentProblem if /dev/fuse is not there, or not for this user."""
    hint = "install and load FUSE 3: sudo apt install fuse3 && sudo modprobe fuse"
    if not os.path.exists("/dev/fuse"):
        raise EnvironmentProblem("/dev/fuse does not exist", f"{hint}; in a container: --device /dev/fuse")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise EnvironmentProblem("/dev/fuse may not be opened by this user", "sudo chmod 666 /dev/fuse, or run as root")


def check_machine() -> None:
    """EnvironmentProblem if this machine or this user cannot mount through FUSE."""
    check_device()
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise EnvironmentProblem(
            "fusermount3 is missing: without it only root can mount", "install FUSE 3: sudo apt install fuse3"
        )


def check(source: str, mount: str) -> tuple[str, str]:
    """Real paths of SOURCE and MOUNT after all checks that can be made before mounting."""
    point = resolve(mount)
    entry = find(point)
    if entry is not None and entry.fstype == IN_PLACE and _is_left(entry):
        detach(point, lazy=True)  # its daemon has died: the directory is as it was before
    elif entry is not None:
        _refuse(entry)
    for path, what in ((source, "SOURCE"), (mount, "MOUNT")):
        _check_directory(path, what)
    real = os.path.realpath(source)
    if point != real and os.path.commonpath([real, point]) == real:
        raise UsageError(
            f"MOUNT {mount} lies inside SOURCE {source}: the mount would contain itself",
            "mount outside of SOURCE, or on SOURCE itself",
        )
    if not os.access(source, os.R_OK | os.X_OK):
        raise UsageError(f"SOURCE {source} may not be read by this user")
    return real, point


def is_closed_above(directory: str) -> bool:
    """True if other users cannot walk to a real path, by the modes of the directories that it lies in."""
    above = os.path.dirname(directory)
    while above != directory:
        if not os.stat(above).st_mode & stat.S_IXOTH:
            return True
        above, directory = os.path.dirname(above), above
    return False


def _check_directory(path: str, what: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        hint = f"make it first: mkdir -p {path}" if what == "MOUNT" else None
        raise UsageError(f"{what} {path} does not exist", hint) from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be reached: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{what} {path} is not a directory")


def _is_left(entry: MountEntry) -> bool:
    from llmcache.fs.client import control

    return not control.is_locked(control.files(entry.point, 0))


def _refuse(entry: MountEntry) -> None:
    from llmcache.fs.client import control

    state = answers(entry.point)
    if state == errno.ENOTCONN:
        raise stale(entry.point)
    pid = control.daemon_pid(entry.point, entry.owner)
    served = f"already served by pid {pid}" if pid else "already served by another llmcachefs"
    raise MountProblem(f"{entry.point} is {served}", f"end it first: llmcache umount {entry.point}")


def stale(point: str) -> MountProblem:
    """The error for a mount whose daemon is gone."""
    return MountProblem(
        f"{point} is a dead mount: its daemon ended without unmounting (killed?), every access says "
        f"'{os.strerror(errno.ENOTCONN)}'",
        f"clean it up: llmcache umount --force {point}",
    )


def detach(point: str, *, lazy: bool) -> None:
    """Unmount our mount on `point` (not lazily: MountProblem if it is busy, naming who can be seen)."""
    entry = find(point)
    if entry is None or not entry.mount_id:
        return
    try:
        if os.geteuid() == 0:
            # A killed daemon cannot end while one of its threads waits in the kernel for a page of an unanswered READ,
            # and its connection lives as long as it does: MNT_FORCE aborts the connection, which frees all of them.
            flags = syscalls.MNT_FORCE | syscalls.MNT_DETACH if lazy else 0
            syscalls.umount2(point, syscalls.UMOUNT_NOFOLLOW | flags)
        else:
            _fusermount(point, lazy)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise MountProblem(f"cannot unmount {point}: {error.strerror}", mtab_hint()) from error
        raise busy(entry) from error


def mtab_hint(path: str = "/etc/mtab") -> str | None:
    """How to come by /etc/mtab, which fusermount3 does not unmount without; None if it is there.

    systemd makes it when a machine starts, so chroots and images that were never started lack it.
    """
    return None if os.path.exists(path) else f"fusermount3 needs {path}: sudo ln -s ../proc/self/mounts {path}"


def _fusermount(point: str, lazy: bool) -> None:
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", point]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EnvironmentProblem("fusermount3 is missing", "install FUSE 3: sudo apt install fuse3") from None
    if result.returncode == 0:
        return
    number = errno.EBUSY if "busy" in result.stderr else errno.EPERM
    raise OSError(number, result.stderr.strip() or os.strerror(number))


def busy(entry: MountEntry, ignore: Callable[[int], bool] = lambda _pid: False) -> MountProblem:
    """The error for a mount that is in use, with the processes that can be seen to use it."""
    users = list(holders(entry, ignore))
    seen = ", ".join(f"{name} (pid {pid}: {how})" for pid, name, how in users[:8])
    if len(users) > 8:
        seen += f" and {len(users) - 8} more"
    who = f"in use by {seen}" if seen else "in use by a process that is not visible to this user"
    return MountProblem(
        f"{entry.point} is busy: {who}",
        f"end these first, or cut them off: llmcache umount --force {entry.point}",
    )


def holders(entry: MountEntry, ignore: Callable[[int], bool] = lambda _pid: False) -> Iterator[tuple[int, str, str]]:
    """(pid, name, how) of processes that keep a mount busy, as far as /proc shows them to this user."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it may end at any moment, and other users' may not be looked at
                how = None if ignore(int(name)) else _use(f"/proc/{name}", entry)
                if how:
                    with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as comm:
                        yield int(name), comm.read().strip(), how


def _use(process: str, entry: MountEntry) -> str | None:
    for link, how in (("cwd", "working directory"), ("root", "root directory")):
        if _on_mount(process, link, entry):
            return how
    for number in os.listdir(f"{process}/fdinfo"):
        with contextlib.suppress(OSError), open(f"{process}/fdinfo/{number}", encoding="ascii") as info:
            if f"mnt_id:\t{entry.mount_id}\n" in info.read():
                return "open file"
    major, minor = (int(part) for part in entry.device.split(":"))
    mark = f" {major:02x}:{minor:02x} " if entry.fstype == FSTYPE else f" {entry.point}/"
    with open(f"{process}/maps", encoding="utf-8", errors="replace") as maps:
        return "mapped file" if any(mark in line for line in maps) else None


def _on_mount(process: str, link: str, entry: MountEntry) -> bool:
    """True if a process' directory is on the mount: opening the magic link with O_PATH asks the daemon nothing."""
    target = os.readlink(f"{process}/{link}")
    if target != entry.point and not target.startswith(entry.point.rstrip("/") + "/"):
        return False
    fd = os.open(f"{process}/{link}", os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            return f"mnt_id:\t{entry.mount_id}\n" in info.read()
    finally:
        os.close(fd)


# The recorder waits for the answer while its buffers fill: a daemon that takes longer is as good as gone.
_PATIENCE_S = 2.0


def locked_bytes(file: TraceFile) -> int:
    """Bytes of the loops of `file` that the mount it lies on keeps locked in the page cache: 0 in mode arena, or elsewhere.

    Files of a model in several are one loop, which counts for the first of them. MountProblem if the daemon does not answer.
    """
    device = f"{os.major(file.dev)}:{os.minor(file.dev)}"
    for entry in entries():
        if entry.fstype == FSTYPE and entry.device == device:
            stats = control.request(entry.point, {"op": "stats"}, uid=entry.owner, timeout_s=_PATIENCE_S)
            return _pinned(stats, file, entry.point) if stats["mode"] == "steer" else 0
    return 0


def _pinned(stats: dict[str, object], file: TraceFile, point: str) -> int:
    files = stats["files"]
    assert isinstance(files, list)
    own = [each for each in files if point + each["path"] == file.path]
    return sum(int(loop["pinned_bytes"]) for each in own for loop in each["loops"])
