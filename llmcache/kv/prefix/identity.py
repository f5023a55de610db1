"""A digest of every byte of a model file, computed once in the background and saved.

Samples would not distinguish a model with a few changed rows from the original, so a thread reads whole files, with
idle I/O priority, and leaves the page cache unchanged. The digest is saved in the user's cache directory, in one file
for each device and inode. It is valid while the model file keeps its size, modification time and change time (ctime),
which programs cannot set. On file systems without change times, no digest is saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import platform
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from llmcache.errors import MissingRequirement
from llmcache.files import replacing
from llmcache.procfs import fstype_at
from llmcache.storage import cached_blocks
from llmcache.units import BLOCK_BYTES, format_size

log = logging.getLogger("llmcache.kv")

FORMAT = 1  # version of the saved digests
CHUNK_BYTES = 4 << 20
PIECE_BYTES = 64 << 10  # unit in which loaded pages are dropped from the page cache, for chunks that were partly cached
TICK_NS = 50 * 10**6
"""Longer than a tick of the kernel's clock for change times; two writes within one tick can leave the same time."""
PROGRESS_S = 30.0
NO_CHANGE_TIME = frozenset(
    ("squashfs", "erofs", "iso9660", "udf", "cramfs", "romfs", "vfat", "exfat", "ntfs", "ntfs3", "msdos")
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30}.get(platform.machine(), -1)
_THIS_THREAD, _IDLE = (1, 0), 3 << 13  # IOPRIO_WHO_PROCESS, 0; IOPRIO_CLASS_IDLE
_libc = ctypes.CDLL(None)


class Stamp(NamedTuple):
    """Identifies a file and its contents: files with the same stamp have the same bytes."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> Stamp:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileIdentity:
    """The identity of the current file at `path`; hashing starts at once, unless the digest is saved. OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.stamp = Stamp.of(self.path)
        _hasher.job(self.path, self.stamp)

    def digest(self, wait_s: float = 0.0) -> str | None:
        """Return the digest, 64 hexadecimal digits; None if it is not ready after `wait_s`.

        MissingRequirement: the file was changed or replaced since this identity was created, or cannot be read.
        """
        job = _hasher.job(self.path, self.stamp)
        job.finished.wait(wait_s)
        with _explained():
            is_same = Stamp.of(self.path) == self.stamp
        if not is_same:
            raise MissingRequirement("the file was changed or replaced after it was loaded", "load the model again")
        if job.problem:
            raise MissingRequirement(job.problem, "load the model again")
        return job.digest or None

    @property
    def hashed_bytes(self) -> int:
        return _hasher.job(self.path, self.stamp).hashed_bytes


class _Job:
    def __init__(self, path: str, stamp: Stamp) -> None:
        self.path, self.stamp = path, stamp
        self.hashed_bytes, self.digest, self.problem = 0, "", ""
        self.finished = threading.Event()

    def finish(self, digest: str = "", problem: str = "") -> None:
        if digest:
            self.hashed_bytes = self.stamp.size_bytes
        self.digest, self.problem = digest, problem
        self.finished.set()


class _Hasher:
    """Hashes files in a thread that ends when no job is left; `_lock` guards the fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Stamp, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._thread: threading.Thread | None = None

    def job(self, path: str, stamp: Stamp) -> _Job:
        with self._lock:
            if (job := self._jobs.get(stamp)) is not None:
                return job
            job = self._jobs[stamp] = _Job(path, stamp)
            if digest := remembered(stamp):
                job.finish(digest)
                return job
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="llmcache-identity", daemon=True)
                self._thread.start()
            return job

    def _run(self) -> None:
        # Lower only the I/O priority: a thread with low CPU priority could be preempted while it holds the GIL.
        _libc.syscall(ctypes.c_long(_IOPRIO_SET), *map(ctypes.c_int, _THIS_THREAD), ctypes.c_int(_IDLE))
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
            try:
                job.finish(_hash(job))
            except MissingRequirement as error:
                job.finish(problem=error.message)
            except Exception:  # a bug here must not break generation
                log.exception("%s: cannot be identified", job.path)
                job.finish(problem="the file cannot be identified")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingRequirement(f"the file cannot be read: {error.strerror}") from None


def _hash(job: _Job) -> str:
    if abs(time.time_ns() - job.stamp.ctime_ns) < TICK_NS:
        time.sleep(TICK_NS / 1e9)
    digest, size, logged_s = hashlib.blake2b(digest_size=32), job.stamp.size_bytes, time.monotonic()
    with _explained(), _Reader(job.path) as reader:
        is_same = Stamp.of(reader.fd) == job.stamp
        while is_same and job.hashed_bytes < size:
            part = reader.read(job.hashed_bytes, min(CHUNK_BYTES, size - job.hashed_bytes))
            if not part:
                break
            digest.update(part)
            job.hashed_bytes += len(part)
            if time.monotonic() - logged_s > PROGRESS_S:
                logged_s = time.monotonic()
                done, whole = format_size(job.hashed_bytes), format_size(size)
                log.warning("%s: identified %s of %s", os.path.basename(job.path), done, whole)
        is_same = is_same and Stamp.of(reader.fd) == Stamp.of(job.path) == job.stamp and job.hashed_bytes == size
    if not is_same:
        raise MissingRequirement("the file changed while it was identified")
    _remember(job.path, job.stamp, digest.hexdigest())
    return digest.hexdigest()


class _Reader:
    """Reads a file without changing which of its pages are cached."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        self._direct_fd: int | None = None
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # page-aligned, as O_DIRECT requires

    def __enter__(self) -> _Reader:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        with contextlib.suppress(OSError):
            self._direct_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (self.fd, self._direct_fd):
            if fd is not None:
                os.close(fd)

    def read(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes at a block-aligned `offset`, fewer at the end of the file; valid until the next read."""
        done = 0
        while done < size:
            count = self._read(self._buffer[done:], offset + done, size - done)
            if done + count < size:  # O_DIRECT can continue only at a block boundary
                count -= count % BLOCK_BYTES
            if not count:
                break
            done += count
        return self._buffer[:done]

    def _read(self, buffer: memoryview, offset: int, size: int) -> int:
        absent = self._absent(offset, size)
        if self._direct_fd is not None and absent != []:
            try:
                whole = -(-size // BLOCK_BYTES) * BLOCK_BYTES
                return min(size, os.preadv(self._direct_fd, [buffer[:whole]], offset))
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                os.close(self._direct_fd)
                self._direct_fd = None
                return self._read(buffer, offset, size)
        count = os.preadv(self.fd, [buffer[:size]], offset)
        for at, length in absent or ():
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, at, length, os.POSIX_FADV_DONTNEED)
        return count

    def _absent(self, offset: int, size: int) -> list[tuple[int, int]] | None:
        """Return the pieces (offset, bytes) without cached pages; None if that cannot be determined."""
        try:
            cached = cached_blocks(self.fd, offset, size)
            if cached == -(-size // BLOCK_BYTES):
                return []
            if not cached or self._direct_fd is not None:
                return [(offset, size)]
            pieces = [(at, min(PIECE_BYTES, offset + size - at)) for at in range(offset, offset + size, PIECE_BYTES)]
            return [piece for piece in pieces if not cached_blocks(self.fd, *piece)]
        except OSError:
            return None


def _memory_of(stamp: Stamp) -> Path:
    return user_cache_path("llmcache") / "identities" / f"{stamp.device:x}-{stamp.inode:x}.json"


def _checked(stamp: Stamp, digest: str) -> dict[str, object]:
    found: dict[str, object] = {"format": FORMAT, "stamp": list(stamp), "digest": digest}
    return {**found, "sum": hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()}


def remembered(stamp: Stamp) -> str | None:
    """Return the saved digest of the file with this stamp, if any."""
    try:
        found = json.loads(_memory_of(stamp).read_bytes())
        digest = found["digest"]
        return digest if _DIGEST.fullmatch(digest) and found == _checked(stamp, digest) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remember(path: str, stamp: Stamp, digest: str) -> None:
    with contextlib.suppress(OSError):
        if fstype_at(path) in NO_CHANGE_TIME:
            return
        memory = _memory_of(stamp)
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(memory) as stream:
            stream.write(json.dumps(_checked(stamp, digest)).encode())


_hasher = _Hasher()


def _forked() -> None:
    """Create a new hasher: a child process does not have the thread."""
    global _hasher
    _hasher = _Hasher()


os.register_at_fork(after_in_child=_forked)
