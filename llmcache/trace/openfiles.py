"""The files that a process has open or mapped, by the device and inode that the kernel tells of an access."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from llmcache.trace.mounts import Mount, mounts

DELETED = " (deleted)"
Key = tuple[int, int]  # device and inode


@dataclass(frozen=True)
class Named:
    """A file that a process has open or mapped."""

    path: str
    size_bytes: int


def opened(pid: int) -> Iterator[tuple[Key, Named]]:
    """Yields the files that process `pid` has open or mapped; OSError if it is gone or may not be looked at.

    Also by the device and inode of a layer, where they lie on an overlay.
    """
    seen = mounts(pid)
    by_dev = {mount.dev: mount for mount in seen.values()}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            yield from _of_descriptor(pid, number, seen)
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            with contextlib.suppress(OSError):
                yield from _of_mapping(pid, line, by_dev)


def _of_descriptor(pid: int, number: str, seen: dict[int, Mount]) -> Iterator[tuple[Key, Named]]:
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
    yield from _named(pid, (dev, stat.st_ino), _without_mark(path, stat.st_nlink), stat.st_size, mount)


def _of_mapping(pid: int, line: str, by_dev: dict[int, Mount]) -> Iterator[tuple[Key, Named]]:
    fields = line.rstrip("\n").split(None, 5)
    if len(fields) < 6 or fields[4] == "0":
        return
    major, _, minor = fields[3].partition(":")
    dev, inode = os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
    path = fields[5].replace("\\012", "\n")
    try:
        stat = os.stat(f"/proc/{pid}/map_files/{_range(fields[0])}")
        size, links = stat.st_size, stat.st_nlink
    except OSError:  # needs a privilege
        size, links = 0, 0 if path.endswith(DELETED) else 1
    yield from _named(pid, (dev, inode), _without_mark(path, links), size, by_dev.get(dev))


def _range(text: str) -> str:
    low, _, high = text.partition("-")
    return f"{int(low, 16):x}-{int(high, 16):x}"


def _named(pid: int, key: Key, path: str, size: int, mount: Mount | None) -> Iterator[tuple[Key, Named]]:
    named = Named(path, size)
    yield key, named
    for layer in mount.layers(path) if mount else ():
        with contextlib.suppress(OSError):
            stat = os.stat(layer)
            yield (stat.st_dev, stat.st_ino), named


def _without_mark(path: str, links: int) -> str:
    return path.removesuffix(DELETED) if links == 0 else path
