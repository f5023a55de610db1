"""Which paths of a mount may be changed through it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmcache.fs.vfs.source import relative

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
        if self.everything:
            return True
        return matches(path, self.spill)

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
