"""Writing files atomically and durably, with private permissions, because they show which files were accessed.

A rename or unlink is durable only after its directory is synced; otherwise, after a power failure, the old name may reappear
or no name may exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from llmcache.errors import MissingRequirement, UsageError

PRIVATE = 0o600
"""The mode of files with private data: traces name files, and saved keys and values reveal a conversation."""
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Errors of file systems that do not support renameat2 flags or fsync of a directory.
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)


def is_below(path: str, directory: str) -> bool:
    """Return whether an absolute path is the directory, or lies below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def create(path: str | os.PathLike[str], mode: int = PRIVATE) -> int:
    """Return the descriptor of a new file; OSError. An existing file or link, perhaps of another user, is removed first."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_regular(path: str, is_expected: Callable[[os.stat_result], bool] = lambda _: True, flags: int = 0) -> int:
    """Return a descriptor for reading a regular file that `is_expected`; OSError.

    The file is examined before it is opened, because opening a device or a pipe of another user has effects.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode) or not is_expected(status):
            raise FileNotFoundError(path)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _beside(path: Path) -> Path:
    return path.with_name(f"new-{os.getpid()}-{path.name}")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` atomically and durably at the end of the block; OSError.

    The sync uses the descriptor of the writes, because the kernel reports a writeback error only to descriptors opened
    before it.
    """
    temporary = _beside(Path(path))
    try:
        with open(create(temporary, mode), "wb") as stream:
            yield stream
            stream.flush()
            _finish(stream.fileno(), temporary)
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _finish(fd: int, temporary: Path) -> None:
    """Sync; OSError also if another file has its name now."""
    os.fsync(fd)
    if not os.path.samestat(os.fstat(fd), os.lstat(temporary)):
        raise OSError(errno.EBUSY, "another process has replaced the file")


class Output:
    """A file that a user named. It replaces a file only with `force`, and raises LlmcacheErrors.

    Use it in a with block, or call `begin`, then `keep` or `discard`. UsageError, with `option`, if `path` cannot be
    written or exists without `force`.
    """

    def __init__(self, path: str | os.PathLike[str], force: bool, option: str = "OUT") -> None:
        self.path = Path(path)
        self._temporary = _beside(self.path)
        self._fd = -1
        if self.path.is_dir():
            raise UsageError(f"{option}: '{self.path}' is a directory", "give the name of a file")
        if self.path.exists() and not force:
            raise UsageError(f"{option}: '{self.path}' already exists", "--force replaces it")
        if not self.path.parent.is_dir():
            raise UsageError(f"{option}: '{self.path.parent}' is not a directory", "create it first")

    def begin(self) -> Path:
        """Return a path to write the file, valid in this process; MissingRequirement.

        The path refers to the open file, because another user could replace the name.
        """
        with writing(self.path):
            self._fd = create(self._temporary)
        return Path(f"/proc/self/fd/{self._fd}")

    def keep(self) -> None:
        try:
            with writing(self.path):
                _finish(self._fd, self._temporary)
                rename(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        self._temporary.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Path:
        return self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.keep()
        else:
            self.discard()


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert OSErrors of a with block that writes `path` to MissingRequirement."""
    try:
        yield
    except OSError as error:
        hint = "choose a directory that is writable and has free space"
        raise MissingRequirement(f"cannot write '{path}': {error.strerror or error}", hint) from error


def rename(old: str | os.PathLike[str], new: str | os.PathLike[str], *, replace: bool = True) -> None:
    """Rename durably; OSError. Without `replace`, raise FileExistsError if `new` exists; the check is atomic."""
    if replace:
        os.replace(old, new)
    else:
        try:
            renameat2(_AT_FDCWD, os.fspath(old), _AT_FDCWD, os.fspath(new), RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            os.link(old, new)
            os.unlink(old)
    _sync_directory(new)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file durably, if it exists; OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        _sync_directory(path)


def _sync_directory(path: str | os.PathLike[str]) -> None:
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    finally:
        os.close(directory)


def renameat2(old_dir: int, old: str, new_dir: int, new: str, flags: int) -> None:
    """Rename with RENAME_NOREPLACE or RENAME_EXCHANGE, without a sync; OSError."""
    if _libc.renameat2(old_dir, os.fsencode(old), new_dir, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
