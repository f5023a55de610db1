"""Files of our own: private ones, and those that take a name, or another's place, whole and on the disk.

All that the product writes under a name goes through here: `Output` is what a user asked for (traces, pictures, pages:
never overwritten unasked, closed to others, for they tell which files were accessed), `replacing` is for our own state.

A name is on the disk once its directory is: after a rename or an unlink without that, a machine that loses power may come
back with the name as it was, or with none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from llmcache.errors import EnvironmentProblem, UsageError

PRIVATE = 0o600
"""Traces name files, saved keys and values tell a conversation: closed to others."""
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Some file systems have no such call, or nothing to write back for a directory, and say so in one of these ways.
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)


def create(path: str | os.PathLike[str], mode: int = PRIVATE) -> int:
    """Descriptor of a new, empty file at `path`, for reading and writing; `mode` less the umask. OSError.

    What was at `path` is removed, not followed or written to: another user may have put a link, or a file, there.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def _beside(path: Path) -> Path:
    """The name of what is to take the place of `path` until it does: beside it, and ending like that (--spill globs)."""
    return path.with_name(f"new-{os.getpid()}-{path.name}")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Yield a new file, open for writing, that takes the place of `path`: whole, and on the disk with its name. OSError.

    Nothing of it is left, and `path` is as it was, where an error ends the block. What failed to be written back is told
    to who has it open since before: it is this descriptor that is synced.
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
    """Sync an open file before it is renamed. OSError: also if its name stands for another file by now."""
    os.fsync(fd)
    if not os.path.samestat(os.fstat(fd), os.lstat(temporary)):
        raise OSError(errno.EBUSY, "another process has replaced the file")


class Output:
    """A file that a user named: as `replacing`, but without `force` it replaces no file, and its errors are for people.

    In a with block, or by `begin`, then `keep` or `discard`.
    """

    def __init__(self, path: str | os.PathLike[str], force: bool, option: str = "OUT") -> None:
        """UsageError, naming `option`, if `path` exists and `force` is not set, or cannot be a file."""
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
        """Make the temporary file, empty, and return a path by which this process writes it. EnvironmentProblem.

        The path stands for the open file: another user, who may write to the directory, can put a link at its name.
        """
        with writing(self.path):
            self._fd = create(self._temporary)
        return Path(f"/proc/self/fd/{self._fd}")

    def keep(self) -> None:
        """Give the file its name, on the disk with all that is in it; EnvironmentProblem if there is no room."""
        try:
            with writing(self.path):
                _finish(self._fd, self._temporary)
                rename(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        """Remove the file."""
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
    """A with block that writes `path`: its OSErrors become EnvironmentProblem."""
    try:
        yield
    except OSError as error:
        hint = "choose a directory that is writable and has free space"
        raise EnvironmentProblem(f"cannot write '{path}': {error.strerror or error}", hint) from error


def rename(old: str | os.PathLike[str], new: str | os.PathLike[str], *, replace: bool = True) -> None:
    """Gives the file `old` the name `new`; the name is on the disk when it returns. OSError.

    FileExistsError if `new` is there and not to be replaced, however many ask for it at a time.
    """
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
    """Take a file away, if it is there; it does not come back after a crash of the machine. OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        _sync_directory(path)


def _sync_directory(path: str | os.PathLike[str]) -> None:
    """Return when the names in the directory of `path` are on the disk."""
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    finally:
        os.close(directory)


def renameat2(old_dir: int, old: str, new_dir: int, new: str, flags: int) -> None:
    """Rename with RENAME_NOREPLACE or RENAME_EXCHANGE, in open directories; not synced. OSError."""
    if _libc.renameat2(old_dir, os.fsencode(old), new_dir, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
