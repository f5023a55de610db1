"""Paths of the mount resolved below SOURCE, one component at a time, without ever following a symbolic link.

The kernel follows links itself (it asks readlink and walks the mount), so a path that reaches the daemon has none. A
component that is one was put there in between, and is refused: nothing outside SOURCE can be reached through a race.

`WritePolicy` says which of them may be changed through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmcache.fs.vfs.caller import NOBODY_ELSE, Caller

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def relative(path: str) -> str:
    """`a/b` for the mount's `/a/b`, and `.` for its root."""
    return path.lstrip("/") or "."


class SourceTree:
    """SOURCE by a directory descriptor opened before the mount may cover it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def parent(self, path: str, caller: Caller = NOBODY_ELSE) -> Iterator[tuple[int, str]]:
        """(descriptor of the parent directory, last component) of a path that `caller` may walk."""
        *above, name = relative(path).split("/")
        if not above:
            yield self.fd, name
            return
        with caller.rights():
            fd = self._walk(above)
        try:
            caller.check_search(fd)
            yield fd, name
        finally:
            os.close(fd)

    def _walk(self, steps: list[str]) -> int:
        fd = self.fd
        for step in steps:
            try:
                below = os.open(step, _STEP, dir_fd=fd)
            finally:
                if fd != self.fd:
                    os.close(fd)
            fd = below
        return fd

    @contextlib.contextmanager
    def item(self, path: str, caller: Caller = NOBODY_ELSE) -> Iterator[str]:
        """A name in /proc that stands for exactly the file, directory or link at `path` (for calls without dir_fd)."""
        with self.parent(path, caller) as (dir_fd, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        """lstat of a path."""
        with self.parent(path) as (dir_fd, name):
            return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def open_directory(self, path: str) -> int:
        """A readable descriptor of a directory."""
        with self.parent(path) as (dir_fd, name):
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def close(self) -> None:
        """Close SOURCE."""
        os.close(self.fd)


DEFAULT_SPILL = ("*.kv",)


def matches(path: str, globs: Iterable[str]) -> bool:
    """True if the relative path or the base name of a mount's `path` (`/a/b`) matches one of `globs`."""
    short = relative(path)
    base = os.path.basename(short)
    return any(fnmatchcase(short, glob) or fnmatchcase(base, glob) for glob in globs)


@dataclass(frozen=True)
class WritePolicy:
    """`everything` is --rw; else only regular files whose relative path or base name matches one of `spill`."""

    everything: bool = False
    spill: tuple[str, ...] = DEFAULT_SPILL

    def allows(self, path: str) -> bool:
        """True if a regular file at `path` may be changed."""
        return self.everything or matches(path, self.spill)

    def check(self, *paths: str) -> None:
        """EROFS unless every path may be changed."""
        for path in paths:
            if not self.allows(path):
                raise read_only()

    def check_tree(self) -> None:
        """EROFS unless directories, links and the like may be changed."""
        if not self.everything:
            raise read_only()


def read_only() -> OSError:
    """The error of every change that a mount does not allow."""
    return OSError(errno.EROFS, os.strerror(errno.EROFS))
