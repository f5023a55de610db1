"""Data from /proc that psutil lacks or needs too much memory for."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from llmcache.errors import MissingRequirement, UsageError
from llmcache.units import BLOCK_BYTES

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo. `root` is the directory of the file system that is mounted on `point`."""

    id: int
    dev: int
    root: str
    point: str
    fstype: str
    options: str
    source: str = ""

    @property
    def owner(self) -> int:
        """Return the id of the user who mounted a FUSE file system."""
        found = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(found[1]) if found else 0

    def layers(self, path: str) -> Iterator[str]:
        """Yield the possible paths of the overlay's file `path` in its layers, topmost first.

        The page cache belongs to the file in a layer, whose device and inode differ from those of the overlay.
        """
        if self.fstype != "overlay":
            return
        relative = os.path.relpath(path, self.point)
        if self.root != "/":
            relative = os.path.join(self.root.lstrip("/"), relative)
        for directory in self._directories():
            yield os.path.normpath(os.path.join(directory, relative))

    def _directories(self) -> Iterator[str]:
        # Colons in directory names are escaped with a backslash.
        parts = re.split(r"(?<!\\),", self.options)
        values = [part.partition("=")[::2] for part in parts]
        yield from (value for key, value in values if key == "upperdir")
        for key, value in values:
            if key in ("lowerdir", "lowerdir+", "datadir+"):
                yield from (name.replace("\\:", ":") for name in re.split(r"(?<!\\):+", value) if name)


def status_of(pid: int | str = "self", proc: str | os.PathLike[str] = "/proc") -> dict[str, str]:
    """Return the fields of the status of a process or thread; OSError if it has ended."""
    with open(f"{os.fspath(proc)}/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return status_of(pid)["State"][0] not in "ZX"
    return False


def check_process(name: str, pid: int) -> dict[str, str]:
    """Return the status of a process that an argument or option (`name`) gives.

    MissingRequirement: it has ended, or is a thread or a kernel thread; UsageError: it is this process.
    """
    hint = "list processes with: ps -e"
    try:
        fields = status_of(pid)
    except OSError:
        raise MissingRequirement(f"{name}: process {pid} does not exist", hint) from None
    if pid == os.getpid():
        raise UsageError(f"{name}: {pid} is llmcache itself", hint)
    if int(fields["Tgid"]) != pid:
        raise MissingRequirement(f"{name}: {pid} is a thread of process {fields['Tgid']}", f"give {fields['Tgid']}")
    if fields["State"][0] in "ZX":
        raise MissingRequirement(f"{name}: process {pid} ({fields['Name']}) has ended", hint)
    if "VmSize" not in fields:
        raise MissingRequirement(f"{name}: {pid} ({fields['Name']}) is a kernel thread, which reads no files", hint)
    return fields


class RunningProcesses:
    """Processes of which the kernel reports the end (pidfds in an epoll)."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._epoll = select.epoll()
        self._fds: dict[int, int] = {}
        for pid in pids:
            self.add(pid)

    @property
    def pids(self) -> set[int]:
        return set(self._fds)

    def add(self, pid: int) -> None:
        if pid in self._fds:
            return
        with contextlib.suppress(ProcessLookupError):
            self._fds[pid] = os.pidfd_open(pid)
            self._epoll.register(self._fds[pid], select.EPOLLIN)

    def wait(self, seconds: float | None) -> set[int]:
        """Wait until a process ends; return and remove those that have ended."""
        ready = {fd for fd, _ in self._epoll.poll(seconds)}
        ended = {pid for pid, fd in self._fds.items() if fd in ready}
        for pid in ended:
            self._remove(pid)
        return ended

    def _remove(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        self._epoll.unregister(fd)  # closing is not enough while a forked process has a copy of the descriptor
        os.close(fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable once a process has ended, until `wait` has returned it."""
        return self._epoll.fileno()

    def close(self) -> None:
        for pid in self.pids:
            self._remove(pid)
        self._epoll.close()

    def __enter__(self) -> RunningProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_bytes_of(pid: int) -> int:
    """Return the bytes that a process has read from storage; OSError if it has ended."""
    with open(f"/proc/{pid}/io", encoding="ascii") as lines:
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes:"))


def mounts(pid: int | str = "self", proc: str = "/proc") -> dict[int, Mount]:
    """Return the mounts of a process, by mount id and in mounting order; OSError if it has ended."""
    with open(f"{proc}/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        found = (_mount(line) for line in lines)
        return {mount.id: mount for mount in found}


_Found = TypeVar("_Found")


class MountWatch(Generic[_Found]):
    """A cached fact about the mount table, computed again only after the table has changed."""

    def __init__(self, look: Callable[[], _Found]) -> None:
        self._look = look
        self._table: BinaryIO | None = None
        self._poll = select.poll()
        self._found: list[_Found] = []  # one element, or none if `look` must be called

    def current(self) -> _Found:
        """Return the result. OSError if the mount table cannot be opened."""
        self._wait(0)
        if not self._found:
            self._found = [self._look()]
        return self._found[0]

    def wait(self, stop: int) -> None:
        """Wait until the mount table has changed or the descriptor `stop` is readable. OSError."""
        self._poll.register(stop, select.POLLIN)
        try:
            self._wait(None)
        finally:
            self._poll.unregister(stop)

    def _wait(self, timeout_ms: int | None) -> None:
        if self._table is None:
            self._table = open("/proc/self/mountinfo", "rb")  # noqa: SIM115 - stays open, because the kernel reports changes to open files
            self._poll.register(self._table, select.POLLPRI)
        if any(fd == self._table.fileno() for fd, _ in self._poll.poll(timeout_ms)):
            self._found = []

    def close(self) -> None:
        if self._table is not None:
            self._poll.unregister(self._table)
            self._table.close()
            self._table, self._found = None, []


IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
"""Types of file systems whose files exist only in memory."""


def fstype_at(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system of a path, "" if unknown (a chroot); OSError.

    The lookup uses the mount id, because st_dev of files on btrfs and overlayfs is not in mountinfo.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            number = next(int(line.partition(":")[2]) for line in info if line.startswith("mnt_id:"))
    finally:
        os.close(fd)
    mount = mounts().get(number)
    return mount.fstype if mount is not None else ""


def _mount(line: str) -> Mount:
    fields, _, rest = line.rstrip("\n").partition(" - ")
    number, _, device, root, point = fields.split(" ")[:5]
    fstype, source, options = rest.split(" ", 2)
    major, _, minor = device.partition(":")
    dev = os.makedev(int(major), int(minor))
    return Mount(int(number), dev, _plain(root), _plain(point), fstype, _plain(options), source)


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


def descendants(pid: int) -> Iterator[int]:
    """Yield the process and all its descendants that /proc shows."""
    yield pid
    # Not with psutil, which reads the parent of every process on the machine.
    for lists in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in lists.read_text().split():
                yield from descendants(int(child))


@dataclass(frozen=True)
class FileMapping:
    """The addresses `low` .. `high` - 1; `block` is the block of the file at `low`. Inode 0: no file."""

    low: int
    high: int
    dev: int
    inode: int
    block: int
    path: str


def mappings(pid: int) -> Iterator[FileMapping]:
    """Yield the mappings of a process, ascending; nothing if it has ended or belongs to another user."""
    # Not with psutil, which reads smaps (slow) and does not return inodes.
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as lines,
    ):
        for line in lines:
            span, _, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
            low, _, high = span.partition("-")
            major, _, minor = device.partition(":")
            dev = os.makedev(int(major, 16), int(minor, 16))
            block, name = int(offset, 16) // BLOCK_BYTES, path[0].replace("\\012", "\n") if path else ""
            yield FileMapping(int(low, 16), int(high, 16), dev, int(inode), block, name)
