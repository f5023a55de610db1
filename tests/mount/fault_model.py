"""What every read of a mount must return while files change and things break: the contents that were there at the time.

Each path has versions with the time from which on they may be seen and the time after which they may not be seen any
more; a change that is under way has two. `Window`s say which errors are excused when, on which bytes of which files.
Times are those of time.monotonic(), which all processes share. Threads: one lock, held for computing only.
"""

from __future__ import annotations

import errno
import fnmatch
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.mount.fault_client import FOREVER, Reply

Bytes = NDArray[np.uint8]
KEPT_S = 400.0  # longer than any request may take
PAGE = 4096


@dataclass
class Version:
    """Contents of a path (None: it is not there) that may be seen from `since` until `until`."""

    content: Bytes | None
    since: float
    until: float = FOREVER


@dataclass
class Window:
    """Errors that are excused: of calls that overlap the time, on files that match `glob`, in bytes `first` to `end`."""

    errnos: frozenset[int]
    calls: frozenset[str] = frozenset({"read", "write"})
    glob: str = "*"
    first: int = 0
    end: int = 1 << 62
    since: float = field(default_factory=time.monotonic)
    until: float = FOREVER

    def concerns(self, call: str, path: str, span: tuple[int, int], reply: Reply) -> bool:
        """Return whether an error of a call on whole pages of `span` is excused."""
        in_time = reply.first <= self.until and reply.ended >= self.since
        first, end = span[0] // PAGE * PAGE, -(-span[1] // PAGE) * PAGE
        return in_time and call in self.calls and fnmatch.fnmatch(path, self.glob) and first < self.end and end > self.first


class Model:
    """The contents of all files of a directory, over time; `truth` is that directory, below all that can fail."""

    def __init__(self, truth: Path) -> None:
        self.truth = truth
        self.lock = threading.Lock()
        self.windows: list[Window] = []
        self._versions: dict[str, list[Version]] = {}

    def paths(self) -> list[str]:
        """Return the paths that are there now."""
        with self.lock:
            return sorted(path for path, versions in self._versions.items() if versions[-1].content is not None)

    def now(self, path: str) -> Bytes | None:
        """Return the latest contents of a path."""
        with self.lock:
            versions = self._versions.get(path)
            return None if versions is None else versions[-1].content

    # Changes

    def begin(self, **contents: Bytes | None) -> dict[str, Bytes | None]:
        """Note that paths (keyword arguments) are about to get other contents."""
        now = time.monotonic()
        with self.lock:
            for path, content in contents.items():
                versions = self._versions.setdefault(path, [Version(None, 0.0)])
                versions[:] = [version for version in versions if version.until > now - KEPT_S]
                versions.append(Version(content, now))
        return contents

    def done(self, contents: Iterable[str]) -> None:
        """Note that a change is complete: what was before it must not be seen any more."""
        now = time.monotonic()
        with self.lock:
            for path in contents:
                for version in self._versions[path][:-1]:
                    version.until = min(version.until, now)

    def failed(self, contents: Iterable[str]) -> None:
        """Note that a change has failed, perhaps half done: it is what is in the directory, and that is old or new."""
        for path in contents:
            found = self._look(path)
            now = time.monotonic()
            with self.lock:
                versions = self._versions[path]
                current = [version for version in versions if version.until == FOREVER]
                problem = mismatch(found, [version.content for version in current])
                assert problem is None, f"{path}, after a change that has failed: {problem}"
                for version in current:
                    version.until = now
                versions.append(Version(found, versions[-1].since))

    def _look(self, path: str) -> Bytes | None:
        """What is in the directory once that stays: a daemon that was killed may have left a call under way."""
        before: Bytes | None = None
        while True:
            time.sleep(0.2)
            try:
                found: Bytes | None = np.fromfile(self.truth / path, np.uint8)
            except FileNotFoundError:
                found = None
            if before is not None and found is not None and np.array_equal(before, found):
                return found
            if before is None and found is None:
                return None
            before = found

    # Reads

    def excuse(self, window: Window) -> Window:
        """Begin a time in which errors are excused; set `until` when it is over."""
        with self.lock:
            now = time.monotonic()
            self.windows = [old for old in self.windows if old.until > now - KEPT_S] + [window]
        return window

    def excused(self, call: str, path: str, span: tuple[int, int], reply: Reply) -> frozenset[int]:
        """Return the errors that a call may have met."""
        with self.lock:
            found = [window.errnos for window in self.windows if window.concerns(call, path, span, reply)]
        return frozenset().union(*found)

    def check(self, path: str, offset: int, size: int, reply: Reply) -> str | None:
        """Return what is wrong with the reply to a read, None if nothing is."""
        with self.lock:
            seen = [v for v in self._versions[path] if v.since <= reply.ended and v.until >= reply.first]
            contents = [version.content for version in seen]
        excused = self.excused("read", path, (offset, offset + size), reply)
        if reply.errno in (errno.ENOENT, errno.ESTALE) and any(content is None for content in contents):
            return None
        if reply.errno:
            return None if reply.errno in excused else f"errno {errno.errorcode[reply.errno]}"
        shrinks = len({len(content) if content is not None else 0 for content in contents}) > 1
        if reply.dead:
            return None if excused or shrinks else "SIGBUS"
        clipped = [None if content is None else content[offset : offset + size] for content in contents]
        return mismatch(np.frombuffer(reply.data, np.uint8), clipped, is_short=bool(excused), is_cut=shrinks)


def mismatch(
    found: Bytes | None, contents: list[Bytes | None], *, is_short: bool = False, is_cut: bool = False
) -> str | None:
    """Return how `found` is made of bytes of none of `contents`, None if it is not.

    `is_short`: it may be a beginning; `is_cut`: behind the shortest there may be zeros, as a file that shrinks shows them.
    """
    there = [content for content in contents if content is not None]
    may_miss = len(there) < len(contents)
    if found is None or not there:
        return None if found is None and may_miss else f"it is {'not ' if found is None else ''}there"
    lengths = [len(content) for content in there]
    least = 0 if is_short or may_miss else min(lengths)
    if not least <= len(found) <= max(lengths):
        return f"{len(found)} bytes, not {sorted(set(lengths))}"
    right = np.zeros(len(found), bool)
    for content in there:
        common = min(len(content), len(found))
        right[:common] |= found[:common] == content[:common]
    if is_cut:
        right[min(lengths) :] |= found[min(lengths) :] == 0
    wrong = np.flatnonzero(~right)
    if not len(wrong):
        return None
    zeros = "zeros" if not found[wrong].any() else "other bytes"
    return f"{len(wrong)} of {len(found)} bytes are wrong, from {wrong[0]} to {wrong[-1]}: {zeros}"


def random_bytes(size: int, seed: int) -> Bytes:
    """Return `size` random bytes."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def overwritten(content: Bytes, offset: int, data: Bytes) -> Bytes:
    """Return `content` with `data` at `offset`, zeros between its end and there."""
    found = np.zeros(max(len(content), offset + len(data)), np.uint8)
    found[: len(content)] = content
    found[offset : offset + len(data)] = data
    return found


def resized(content: Bytes, size: int) -> Bytes:
    """Return `content` cut, or continued by zeros, to `size`."""
    return overwritten(content[:size], size, np.empty(0, np.uint8))
