"""A FUSE file system for tests that passes calls through to a directory and fails by rules.

`python -m tests.mount.faulty DIRECTORY MOUNTPOINT RULES`: RULES is a JSON file with a list of rules (`Rule`) that every
call reads again; `write_rules` replaces it atomically. Files are opened with direct_io, so no page cache lies between a
call and this file system: each request arrives unchanged, and so does each reply (an error, or fewer bytes).
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcache.mount.vfs.libfuse import binding

SHORT_BYTES = 40 * 512  # least size of a short reply; whole sectors, as on a disk


@dataclass(frozen=True)
class Rule:
    """A fault: what happens to `call` on files that match `glob`, if it touches bytes `first` to `end`.

    `what`: "eio"; "short" (a reply of fewer bytes); "slow" (a reply after `seconds`); "held" (the call waits until the
    rule is removed; the file `held_by` exists until then); "lost" (fsync fails, and everything written since the last
    fsync without O_DIRECT is reverted, as if the page cache had dropped the pages it could not write). `call`: read,
    write, fsync, truncate, fallocate or "open direct".
    """

    what: str
    call: str = "read"
    glob: str = "*"
    first: int = 0
    end: int = 1 << 62
    seconds: float = 0.0

    def concerns(self, call: str, path: str, offset: int, size: int) -> bool:
        touched = offset < self.end and offset + size > self.first
        return call == self.call and touched and fnmatch.fnmatch(path.lstrip("/"), self.glob)


def held_by(rules: Path) -> Path:
    """Return the file that exists while a rule of `rules` holds a call."""
    return rules.with_suffix(".held")


def write_rules(path: Path, rules: Iterable[Rule]) -> None:
    """Replace the rules; calls that start later follow them."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([asdict(rule) for rule in rules]))
    fresh.rename(path)


class Lost(OSError):
    """An error that also reverts the writes since the last fsync."""


class Rules:
    """The rules of a file, parsed again when its text changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parsed: tuple[str, list[Rule]] = ("", [])  # text and rules; replaced together, because calls run concurrently

    def apply(self, call: str, path: str, offset: int, size: int) -> int:
        """Return how many of `size` bytes to serve; may sleep or raise EIO."""
        for rule in self._now():
            if rule.concerns(call, path, offset, size):
                if rule.what in ("eio", "lost"):
                    raise (OSError if rule.what == "eio" else Lost)(errno.EIO, os.strerror(errno.EIO))
                time.sleep(rule.seconds)
                if rule.what == "held":
                    self._hold(rule)
                if rule.what == "short":
                    size = min(size, max(SHORT_BYTES, size // 3 // 512 * 512))
        return size

    def _now(self) -> list[Rule]:
        # read the text each time, because inode numbers and times can repeat within a clock tick
        with open(self._path, encoding="utf-8") as file:
            text = file.read()
        parsed, rules = self._parsed
        if text != parsed:
            rules = [Rule(**rule) for rule in json.loads(text)]
            self._parsed = text, rules
        return rules

    def _hold(self, rule: Rule) -> None:
        held = held_by(Path(self._path))
        held.touch()
        while rule in self._now():
            time.sleep(0.005)
        held.unlink(missing_ok=True)


class Faulty:
    """The calls of the file system, as mfusepy makes them."""

    use_ns = True

    def __init__(self, directory: str, rules: Rules) -> None:
        self._directory, self._rules = directory, rules
        self._direct: set[int] = set()
        # by inode: the bytes that each write since the last fsync replaced
        self._before: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def _below(self, path: str) -> str:
        return self._directory + path

    def init_with_config(self, conn: Any, config: Any) -> None:
        config = config.contents if hasattr(config, "contents") else config
        config.attr_timeout = config.entry_timeout = config.negative_timeout = 0.0

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        status = os.lstat(self._below(path)) if fh is None else os.fstat(fh.fh)
        names = ("mode", "nlink", "uid", "gid", "size", "blocks", "blksize", "ino")
        times = {f"st_{name}": getattr(status, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {f"st_{name}": getattr(status, f"st_{name}") for name in names} | times

    def readdir(self, path: str, fh: Any) -> Any:
        with os.scandir(self._below(path)) as entries:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        facts = [(name, {"st_mode": status.st_mode, "st_ino": status.st_ino}, 0) for name, status in found]
        return [(".", {}, 0), ("..", {}, 0), *facts]

    def open(self, path: str, info: Any) -> int:
        if info.flags & os.O_DIRECT:
            self._rules.apply("open direct", path, 0, 1 << 62)
        # The kernel has already resolved the offset of O_APPEND writes.
        info.fh = os.open(self._below(path), info.flags & ~(os.O_DIRECT | os.O_APPEND))
        if info.flags & os.O_DIRECT:
            self._direct.add(info.fh)
        info.direct_io = 1
        return 0

    def create(self, path: str, mode: int, info: Any) -> int:
        flags = (info.flags & ~(os.O_DIRECT | os.O_APPEND)) | os.O_CREAT
        info.fh = os.open(self._below(path), flags, mode)
        self._before.pop(os.fstat(info.fh).st_ino, None)
        info.direct_io = 1
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        return os.pread(info.fh, self._rules.apply("read", path, offset, size), offset)

    def write(self, path: str, data: bytes, offset: int, info: Any) -> int:
        part = data[: self._rules.apply("write", path, offset, len(data))]
        with self._lock:
            if info.fh not in self._direct:
                before = os.pread(info.fh, len(part), offset).ljust(len(part), b"\0")
                self._before.setdefault(os.fstat(info.fh).st_ino, []).append((offset, before))
            return os.pwrite(info.fh, part, offset)

    def fsync(self, path: str, _data_only: int, info: Any) -> int:
        try:
            self._rules.apply("fsync", path, 0, 1 << 62)
        except Lost:
            with self._lock:
                status = os.fstat(info.fh)
                for offset, data in reversed(self._before.pop(status.st_ino, [])):
                    os.pwrite(info.fh, data[: max(0, status.st_size - offset)], offset)
            raise
        with self._lock:
            self._before.pop(os.fstat(info.fh).st_ino, None)
        os.fsync(info.fh)
        return 0

    def fsyncdir(self, path: str, _data_only: int, fh: Any) -> int:
        return 0

    def release(self, path: str, info: Any) -> int:
        self._direct.discard(info.fh)
        os.close(info.fh)
        return 0

    def truncate(self, path: str, length: int, fh: Any = None) -> int:
        self._rules.apply("truncate", path, 0, 1 << 62)
        os.truncate(self._below(path) if fh is None else fh.fh, length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, info: Any) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._rules.apply("fallocate", path, 0, 1 << 62)
        os.posix_fallocate(info.fh, offset, size)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._below(path))
        return {name: getattr(found, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")}

    def unlink(self, path: str) -> int:
        os.unlink(self._below(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._below(old), self._below(new))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._below(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._below(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._below(path), ns=times)
        return 0


def main() -> None:
    directory, mountpoint, rules = sys.argv[1:]
    options: dict[str, Any] = {"foreground": True, "raw_fi": True, "use_ino": True, "fsname": "faulty", "allow_other": True}
    served = type("Served", (Faulty, binding().Operations), {})
    binding().FUSE(served(directory, Rules(rules)), mountpoint, **options)


if __name__ == "__main__":
    main()
