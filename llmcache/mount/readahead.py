"""The kernel's readahead of a block device (`read_ahead_kb`): mounts change it and restore it.

A note in the directory of the daemons' files keeps the original value for all mounts on a disk, which lock it. The last one
restores the value; after a killed daemon, the next mount or `llmcache umount --force` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from llmcache.errors import MissingRequirement
from llmcache.mount.client import control

log = logging.getLogger(__name__)

SMALL_READ_AHEAD_KB = 128  # the kernel's default
MOE_READ_AHEAD_KB, LARGE_SLICE_BYTES = 32, 1 << 20  # 32 KiB for expert slices below 1 MiB, else 128 KiB (measured)
_NOTES = "read-ahead-"
_LONGEST_NOTE = 4096
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENXIO)


def read_ahead_advice() -> str:
    """Return the option to recommend for MoE models."""
    large = f"{SMALL_READ_AHEAD_KB}Ki if each tensor of an expert has 1 MiB or more"
    return f"--read-ahead {MOE_READ_AHEAD_KB}Ki ({large})"


def read_ahead_file(directory: str, root: Path = Path("/")) -> Path | None:
    """Return the sysfs file (KiB) of a directory's disk; None without a block device."""
    device = os.stat(directory).st_dev
    block = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    places = (block / "queue/read_ahead_kb", block.parent / "queue/read_ahead_kb")
    return next((path for path in places if path.exists()), None)


class ReadAhead:
    """A changed readahead; it applies to files that are opened later."""

    def __init__(self, directory: str, size_bytes: int, root: Path = Path("/")) -> None:
        """Raise MissingRequirement if the storage has no setting."""
        path = read_ahead_file(directory, root)
        if path is None:
            raise MissingRequirement(f"read_ahead: the storage of {directory} has no read_ahead_kb", "omit this setting")
        self._path, self._kb = path, size_bytes >> 10
        self._fd: int | None = None

    def set(self) -> None:
        if self._fd is not None:
            return
        note = Path(control.directory(os.geteuid())) / (_NOTES + self._path.parents[1].name)
        try:
            control.make_directory()
            with _turn():
                self._fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if _read(self._fd) is None:
                    os.ftruncate(self._fd, 0)
                    os.pwrite(self._fd, f"{int(self._path.read_text())}\n{self._path}\n".encode(), 0)
                self._path.write_text(f"{self._kb}\n")
        except OSError as error:
            raise MissingRequirement(
                f"read_ahead: cannot set {self._path}: {error.strerror}", "omit this setting"
            ) from error

    def restore(self) -> None:
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        restore_left()


def restore_left() -> None:
    """Restore every setting whose note no living process has locked."""
    directory = control.directory(os.geteuid())
    if not os.path.isdir(directory):
        return
    with _turn():
        for name in os.listdir(directory):
            if name.startswith(_NOTES):
                try:
                    _restore(f"{directory}/{name}")
                except OSError as error:
                    log.warning("cannot restore read_ahead_kb of %s: %s", name.removeprefix(_NOTES), error.strerror)


def _restore(path: str) -> None:
    """After an OSError the note remains."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (note := _read(fd)) is not None:
            setting, kb = note
            try:
                setting.write_text(f"{kb}\n")
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        os.unlink(path)
    except BlockingIOError:  # another mount uses it
        pass
    finally:
        os.close(fd)


def _read(fd: int) -> tuple[Path, int] | None:
    """Return None if the note is incomplete."""
    lines = os.pread(fd, _LONGEST_NOTE, 0).decode(errors="surrogateescape").split("\n")
    return (Path(lines[1]), int(lines[0])) if len(lines) == 3 and lines[0].isdecimal() else None


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Raise OSError if the directory is missing."""
    fd = os.open(control.directory(os.geteuid()), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
