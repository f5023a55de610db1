"""A model of the contents that each file of a mount may have at each time, for checking reads in fault tests.

Each path has versions, each with the time from which and until which a read may return it; during a change, two versions
are valid. A `Window` lists the errors that are allowed during a time, on a byte range of matching files. All times are
time.monotonic(), which all processes share. One lock protects the model; it is held only for computation.
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
KEPT_S = 400.0  # longer than any request takes
PAGE = 4096


@dataclass
class Version:
    """Contents of a path (None: it does not exist) that reads may return from `since` until `until`."""

    content: Bytes | None
    since: float
    until: float = FOREVER


@dataclass
class Window:
    """Errors allowed for calls that overlap a time, on files that match `glob`, in the bytes from `first` to `end`."""

    errnos: frozenset[int]
    calls: frozenset[str] = frozenset({"read", "write"})
    glob: str = "*"
    first: int = 0
    end: int = 1 << 62
    since: float = field(default_factory=time.monotonic)
    until: float = FOREVER

    def concerns(self, call: str, path: str, span: tuple[int, int], reply: Reply) -> bool:
        """Return whether an error of a call on the pages of `span` is allowed."""
        in_time = reply.first <= self.until and reply.ended >= self.since
        first, end = span[0] // PAGE * PAGE, -(-span[1] // PAGE) * PAGE
        return in_time and call in self.calls and fnmatch.fnmatch(path, self.glob) and first < self.end and end > self.first


class Model:
    """The contents of all files of a directory over time; `truth` is that directory, below every layer that can fail."""

    def __init__(self, truth: Path) -> None:
        self.truth = truth
        self.lock = threading.Lock()
        self.windows: list[Window] = []
        self._versions: dict[str, list[Version]] = {}

    def paths(self) -> list[str]:
        with self.lock:
            return sorted(path for path, versions in self._versions.items() if versions[-1].content is not None)

    def now(self, path: str) -> Bytes | None:
        with self.lock:
            versions = self._versions.get(path)
            return None if versions is None else versions[-1].content

    # Changes

    def begin(self, **contents: Bytes | None) -> dict[str, Bytes | None]:
        """Record that a change of paths (keyword arguments) to new contents starts now."""
        now = time.monotonic()
        with self.lock:
            for path, content in contents.items():
                versions = self._versions.setdefault(path, [Version(None, 0.0)])
                versions[:] = [version for version in versions if version.until > now - KEPT_S]
                versions.append(Version(content, now))
        return contents

    def done(self, contents: Iterable[str]) -> None:
        """Record that a change is complete: earlier versions are no longer valid."""
        now = time.monotonic()
        with self.lock:
            for path in contents:
                for version in self._versions[path][:-1]:
                    version.until = min(version.until, now)

    def failed(self, contents: Iterable[str]) -> None:
        """Record a failed change: the contents of the directory are valid now, and must consist of old and new bytes."""
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
        """Return the contents in the directory once they stop changing: a killed daemon may have left a call in progress."""
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
        """Start a window of allowed errors; the caller sets `until` when it is over."""
        with self.lock:
            now = time.monotonic()
            self.windows = [old for old in self.windows if old.until > now - KEPT_S] + [window]
        return window

    def excused(self, call: str, path: str, span: tuple[int, int], reply: Reply) -> frozenset[int]:
        """Return the errors that are allowed for a call."""
        with self.lock:
            found = [window.errnos for window in self.windows if window.concerns(call, path, span, reply)]
        return frozenset().union(*found)

    def check(self, path: str, offset: int, size: int, reply: Reply) -> str | None:
        """Return how the reply to a read is wrong, or None."""
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
        expected = [None if content is None else content[offset : offset + size] for content in contents]
        return mismatch(np.frombuffer(reply.data, np.uint8), expected, is_short=bool(excused), is_cut=shrinks)


def mismatch(
    found: Bytes | None, contents: list[Bytes | None], *, is_short: bool = False, is_cut: bool = False
) -> str | None:
    """Return how `found` differs from every mix of bytes of `contents`, or None if it does not.

    `is_short`: it may be a prefix. `is_cut`: bytes after the shortest content may be zeros, as in a file that shrinks.
    """
    existing = [content for content in contents if content is not None]
    may_miss = len(existing) < len(contents)
    if found is None or not existing:
        return None if found is None and may_miss else f"it is {'not ' if found is None else ''}there"
    lengths = [len(content) for content in existing]
    least = 0 if is_short or may_miss else min(lengths)
    if not least <= len(found) <= max(lengths):
        return f"{len(found)} bytes, not {sorted(set(lengths))}"
    right = np.zeros(len(found), bool)
    for content in existing:
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
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def overwritten(content: Bytes, offset: int, data: Bytes) -> Bytes:
    """Return `content` with `data` at `offset`, padded with zeros if `offset` is beyond its end."""
    found = np.zeros(max(len(content), offset + len(data)), np.uint8)
    found[: len(content)] = content
    found[offset : offset + len(data)] = data
    return found


def resized(content: Bytes, size: int) -> Bytes:
    """Return `content` truncated, or extended with zeros, to `size`."""
    return overwritten(content[:size], size, np.empty(0, np.uint8))
