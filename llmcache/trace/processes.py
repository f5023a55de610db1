"""Running processes as /proc shows them: their threads and children, and the files that they have open or mapped.

Files go by device and inode, which is all that the kernel tells of an access.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmcache.mountinfo import Mount, mounts
from llmcache.units import BLOCK_BYTES

DELETED = " (deleted)"
Key = tuple[int, int]  # device and inode
_LOOK_S = 0.1
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class OpenFile:
    """A file that a process has open or mapped."""

    path: str
    size_bytes: int


@dataclass(frozen=True, order=True)
class FileMapping:
    """Addresses `low` .. `high` - 1; inode 0 for memory without a file. `block`: that of the file at `low`."""

    low: int
    high: int
    dev: int = 0
    inode: int = 0
    block: int = 0
    path: str = ""


class ProcessTree:
    """Which of some processes, and with `follow` of what they start, still run, as far as /proc shows it in time."""

    def __init__(self, pids: Iterable[int], follow: bool) -> None:
        self._follow = follow
        self._known: dict[int, psutil.Process] = {}
        self._looked_s = 0.0
        self._add(pids)

    def note(self, pids: Iterable[int]) -> None:
        """Processes that were seen to belong to it."""
        if self._follow:
            self._add(pid for pid in pids if pid not in self._known)

    def alive(self) -> bool:
        """Whether any of them runs; looked at ten times in a second at most."""
        now_s = time.monotonic()
        if self._known and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            for pid in list(self._known):
                self.note(_children(pid))
            self._known = {pid: process for pid, process in self._known.items() if _runs(process)}
        return bool(self._known)

    def _add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known[pid] = psutil.Process(pid)


def _runs(process: psutil.Process) -> bool:
    """Whether it runs: its number may have been given to another since, or it only waits to be buried."""
    try:
        return process.is_running() and process.status() not in _DEAD
    except psutil.NoSuchProcess:
        return False


def threads(pid: int) -> list[int]:
    """The threads of process `pid`; none if it is gone."""
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def descendants(pid: int) -> Iterator[int]:
    """The process and all its children, theirs too."""
    yield pid
    for child in _children(pid):
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    # Not psutil's, which reads the parent of every process there is.
    found = []
    for tid in threads(pid):
        with contextlib.suppress(OSError):  # the thread is gone, or the kernel has no such list
            found += [int(word) for word in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()]
    return found


def mappings(pid: int) -> Iterator[FileMapping]:
    """The address space of process `pid`, in ascending order; nothing if it is gone or belongs to somebody else."""
    # Not psutil's, which reads the accounts of every page (smaps) and does not tell inodes.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, _, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
            low, _, high = span.partition("-")
            major, _, minor = device.partition(":")
            dev = os.makedev(int(major, 16), int(minor, 16))
            block, name = int(offset, 16) // BLOCK_BYTES, path[0].replace("\\012", "\n") if path else ""
            yield FileMapping(int(low, 16), int(high, 16), dev, int(inode), block, name)


def open_files(pid: int) -> Iterator[tuple[Key, OpenFile]]:
    """Yields the files that process `pid` has open or mapped; OSError if it is gone or may not be looked at.

    Also by the device and inode of a layer, where they lie on an overlay.
    """
    seen = mounts(pid)
    by_dev = {mount.dev: mount for mount in seen.values()}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            yield from _of_descriptor(pid, number, seen)
    for mapping in mappings(pid):
        if mapping.inode and mapping.path:
            yield from _of_mapping(pid, mapping, by_dev.get(mapping.dev))


def _of_descriptor(pid: int, number: str, seen: dict[int, Mount]) -> Iterator[tuple[Key, OpenFile]]:
    link = f"/proc/{pid}/fd/{number}"
    path = os.readlink(link)
    if not path.startswith("/"):
        return  # a pipe, a socket
    stat = os.stat(link)
    with open(f"/proc/{pid}/fdinfo/{number}") as lines:
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
    mount = seen.get(int(facts["mnt_id"]))
    # The mount's device and not st_dev: btrfs shows another for each subvolume, which the page cache does not know.
    dev = mount.dev if mount else stat.st_dev
    yield from _named((dev, stat.st_ino), _without_mark(path, stat.st_nlink), stat.st_size, mount)


def _of_mapping(pid: int, mapping: FileMapping, mount: Mount | None) -> Iterator[tuple[Key, OpenFile]]:
    try:
        stat = os.stat(f"/proc/{pid}/map_files/{mapping.low:x}-{mapping.high:x}")
        size, links = stat.st_size, stat.st_nlink
    except OSError:  # needs a privilege
        size, links = 0, 0 if mapping.path.endswith(DELETED) else 1
    yield from _named((mapping.dev, mapping.inode), _without_mark(mapping.path, links), size, mount)


def _named(key: Key, path: str, size: int, mount: Mount | None) -> Iterator[tuple[Key, OpenFile]]:
    file = OpenFile(path, size)
    yield key, file
    for layer in mount.layers(path) if mount else ():
        with contextlib.suppress(OSError):
            stat = os.stat(layer)
            yield (stat.st_dev, stat.st_ino), file


def _without_mark(path: str, links: int) -> str:
    return path.removesuffix(DELETED) if links == 0 else path
