"""What the kernel tells in /proc of a process, where psutil does not or would take memory: status, reads, mounts."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from llmcache.units import BLOCK_BYTES

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo. `dev` as in st_dev; `root`: which directory of the file system lies on `point`."""

    id: int
    dev: int
    root: str
    point: str
    fstype: str
    options: str
    source: str = ""

    @property
    def owner(self) -> int:
        """User id that made a FUSE mount; 0 of others."""
        found = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(found[1]) if found else 0

    def layers(self, path: str) -> Iterator[str]:
        """Where the file `path` of this overlay can lie in reality, topmost first; nothing if it is no overlay.

        The page cache belongs to the file of a layer, which has another device and inode than the overlay shows.
        """
        if self.fstype != "overlay":
            return
        relative = os.path.relpath(path, self.point)
        if self.root != "/":
            relative = os.path.join(self.root.lstrip("/"), relative)
        for directory in self._directories():
            yield os.path.normpath(os.path.join(directory, relative))

    def _directories(self) -> Iterator[str]:
        # A colon in a directory's name is escaped by a backslash.
        parts = re.split(r"(?<!\\),", self.options)
        values = [part.partition("=")[::2] for part in parts]
        yield from (value for key, value in values if key == "upperdir")
        for key, value in values:
            if key in ("lowerdir", "lowerdir+", "datadir+"):
                yield from (name.replace("\\:", ":") for name in re.split(r"(?<!\\):+", value) if name)


def status_of(pid: int | str = "self", proc: str | os.PathLike[str] = "/proc") -> dict[str, str]:
    """Return the fields of the status of a process or thread; OSError if it is gone. `proc` as for `mounts`."""
    with open(f"{os.fspath(proc)}/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def read_bytes_of(pid: int) -> int:
    """Return what a process has had read from storage, in bytes; OSError if it is gone."""
    with open(f"/proc/{pid}/io", encoding="ascii") as lines:
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes:"))


def mounts(pid: int | str = "self", proc: str = "/proc") -> dict[int, Mount]:
    """Return the mounts that process `pid` sees by their number, in mounting order; OSError if it is gone.

    `proc` is there for tests on made-up trees.
    """
    with open(f"{proc}/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        found = (_mount(line) for line in lines)
        return {mount.id: mount for mount in found}


_Found = TypeVar("_Found")


class MountWatch(Generic[_Found]):
    """A fact that `look` reads from the mount table: again only after the kernel has reported a change of the table."""

    def __init__(self, look: Callable[[], _Found]) -> None:
        self._look = look
        self._table: BinaryIO | None = None
        self._poll = select.poll()
        self._found: list[_Found] = []  # one, or none while a look is due

    def current(self) -> _Found:
        """Return the fact. OSError: no file can be opened for now; the next call looks again."""
        if self._table is None:
            self._table = open("/proc/self/mountinfo", "rb")  # noqa: SIM115 - stays open, because only an open table reports
            self._poll.register(self._table, select.POLLPRI)
        if self._poll.poll(0):
            self._found = []
        if not self._found:
            self._found = [self._look()]
        return self._found[0]

    def close(self) -> None:
        """Close the table; `current` opens it again."""
        if self._table is not None:
            self._poll.unregister(self._table)
            self._table.close()
            self._table, self._found = None, []


IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
"""Types of file systems whose files are in memory and nowhere else."""


def fstype_at(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system of a path; "" if its mount is not in mountinfo (a chroot). OSError.

    By the id of the mount: st_dev of files on btrfs and overlayfs is no number that mountinfo has.
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
    """The process and all its children, theirs too, as far as /proc shows them."""
    yield pid
    # Not psutil's, which reads the parent of every process there is.
    for lists in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread is gone
            for child in lists.read_text().split():
                yield from descendants(int(child))


@dataclass(frozen=True)
class FileMapping:
    """Addresses `low` .. `high` - 1; inode 0 for memory without a file. `block`: that of the file at `low`."""

    low: int
    high: int
    dev: int
    inode: int
    block: int
    path: str


def mappings(pid: int) -> Iterator[FileMapping]:
    """The address space of process `pid`, in ascending order; nothing if it is gone or belongs to another user."""
    # Not psutil's, which reads the accounts of every page (smaps) and does not tell inodes.
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
