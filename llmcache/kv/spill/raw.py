"""A file that is read and written at offsets: whole, or with an error that says what happened.

Pages go around the page cache (O_DIRECT) where the file system can do that: the kernel would keep what is read rarely
and in no order. Tables do not: their records are smaller than a block. Linux keeps both ways coherent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types

from llmcache import files
from llmcache.arrays import Bytes, Int64s
from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError, UsageError
from llmcache.kv.spill.layout import aligned
from llmcache.units import BLOCK_BYTES

HUGE_PAGE_BYTES = 1 << 21
DEPTH = 256
"""Reads of a queue that are under way together."""
AIO_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}
"""Of io_setup, io_submit and io_getevents, which glibc has no functions for."""
_PREADV = 7
"""IOCB_CMD_PREADV."""
_MOST_SEGMENTS = 1024
"""IOV_MAX."""
LARGEST_READ = 1 << 20
"""Beyond it a disk gets no faster, and threads have less to share."""
_BLOCK_WORDS, _EVENT_WORDS = 8, 4
"""Of struct iocb and struct io_event, linux/aio_abi.h."""
_MOST_FAILURES = 1000
"""Of waits for reads: a signal ends one."""
_libc = ctypes.CDLL(None, use_errno=True)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def problem(path: Path, doing: str, error: OSError) -> LlmcacheError:
    """Returns the error to raise for what the system answered when `doing` something with `path`."""
    if error.errno in _FULL:
        hint = "free some space, or spill to another disk; all data spilled before is intact"
        return EnvironmentProblem(f"{path}: no space left ({doing})", hint)
    advice = "if this is an llmcachefs, mount it with --spill '*.kv', or with --rw"
    return EnvironmentProblem(f"{path}: {doing}: {error.strerror}", advice if error.errno == errno.EROFS else None)


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """A with block that does something with `path`: its OSErrors become what `problem` says."""
    try:
        yield
    except OSError as error:
        raise problem(path, doing, error) from None


def there_already(path: Path) -> UsageError:
    """Returns the error to raise where a file would take the place of another unasked."""
    return UsageError(f"{path}: the file exists", "restore it to continue with it, or remove it first")


class RawFile:
    """`path`, open; `direct` asks for O_DIRECT: None where possible, True or an EnvironmentProblem, False never.

    `directory`: a descriptor of the directory that the file is in; `path` is for messages then, except its last component.
    """

    def __init__(self, path: Path, flags: int, direct: bool | None = None, directory: int | None = None) -> None:
        self.path = path
        self.writable = bool(flags & os.O_RDWR)
        with explained(path, "opening"):
            name = path if directory is None else path.name
            self.fd = os.open(name, flags | os.O_CLOEXEC, files.PRIVATE, dir_fd=directory)
        self._direct_fd: int | None = None
        self._wants_direct = direct
        self._flags = flags & os.O_RDWR

    @property
    def direct(self) -> bool:
        """True if pages go around the page cache."""
        return self._direct_fd is not None

    def _fd_for(self, direct: bool) -> int:
        return self._direct_fd if direct and self._direct_fd is not None else self.fd

    def lock(self) -> None:
        """Makes this the only writer of the file; EnvironmentProblem if there is one. Ends with the process."""
        with explained(self.path, "locking"):
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                hint = "end that process, or name another file"
                raise EnvironmentProblem(f"{self.path}: another process is writing this file", hint) from None

    def open_direct(self) -> None:
        """Opens the second way to the pages; needs a first block to try it with."""
        if self._wants_direct is False:
            return
        fd = None
        try:
            # Through the descriptor: the name may be another file by now.
            fd = os.open(f"/proc/self/fd/{self.fd}", self._flags | os.O_DIRECT | os.O_CLOEXEC)
            os.preadv(fd, [aligned(BLOCK_BYTES).data], 0)
            self._direct_fd = fd
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if self._wants_direct:
                raise problem(self.path, "opening with O_DIRECT", error) from None

    def refresh(self) -> None:
        """Makes what is read what is on the disk: a write-back that failed leaves pages in memory that never get there."""
        with contextlib.suppress(EnvironmentProblem):
            self.sync()  # what is dirty cannot be forgotten
        self.forget(0, 0)

    def forget(self, offset: int, size: int) -> None:
        """Has the system forget what it keeps in memory of `size` bytes at `offset` (0: all behind) and need not write."""
        with contextlib.suppress(OSError):  # a file system without such memory
            os.posix_fadvise(self.fd, offset, size, os.POSIX_FADV_DONTNEED)

    def read_into(self, buffer: Bytes, offset: int, direct: bool = False) -> None:
        """Fills `buffer` from `offset` on. DataError if the file ends before."""
        fd, view, done = self._fd_for(direct), buffer.data, 0
        while done < len(view):
            with explained(self.path, f"reading at {offset + done}"):
                count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                wanted = offset + len(view)
                hint = "the file was truncated: spill the context again"
                raise DataError(
                    f"{self.path}: the file ends at byte {offset + done}, but a page extends to byte {wanted}", hint
                )
            done += count

    def read_runs(self, wanted: Int64s, direct: bool = False, queue: ReadQueue | None = None) -> None:
        """Does reads `wanted` [n, 3]: an offset in the file, an address in memory, bytes. Errors as `read_into`.

        Those that follow each other in the file are read in one go, wherever they go to. One after the other, or all at a
        time by a `queue` that the memory is of.
        """
        fd = self._fd_for(direct)
        segments, firsts, starts = _joined(wanted, wanted[:, 0].argsort(kind="stable"))
        if queue is None:
            left = np.arange(_read_all(fd, segments, firsts, starts), len(starts))
        else:
            with explained(self.path, "reading"):
                left = queue.read(fd, segments, firsts, starts)
        # What failed is tried once more, which tells why, or goes on where it was short.
        for run in left.tolist():
            offset = int(starts[run])
            for address, size in segments[firsts[run] : firsts[run + 1]].tolist():
                self.read_into(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)), offset, direct)
                offset += size

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes at `offset`: fewer only where the file ends."""
        parts, done = [], 0
        while done < size:
            with explained(self.path, f"reading at {offset + done}"):
                part = os.pread(self.fd, size - done, offset + done)
            if not part:
                break
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def write(self, data: bytes | Bytes, offset: int, direct: bool = False) -> None:
        """Writes all of `data` at `offset`."""
        fd, done = self._fd_for(direct), 0
        view = memoryview(data) if isinstance(data, bytes) else data.data
        with explained(self.path, "spilling"):
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)

    def grow(self, start: int, end: int) -> None:
        """Claims space from `start`, where the file ends, to `end`; if there is too little, the file stays as it is."""
        try:
            os.posix_fallocate(self.fd, start, end - start)
        except OSError as error:
            self.cut(start)
            raise problem(self.path, "allocating space", error) from None

    def cut(self, end: int) -> None:
        """Makes the file end at `end`."""
        with explained(self.path, "cutting"):
            os.ftruncate(self.fd, end)

    def rename(self, path: Path) -> None:
        """Gives the file the name `path`, on the disk when it returns; UsageError if that is another's."""
        with explained(path, "naming"):
            try:
                files.rename(self.path, path, replace=False)
            except FileExistsError:
                raise there_already(path) from None
        self.path = path

    def sync(self) -> None:
        """Returns when everything written is on the disk."""
        with explained(self.path, "writing back"):
            os.fdatasync(self.fd)

    def data_from(self, offset: int) -> int | None:
        """Returns where the next byte at or behind `offset` is that was ever written; None if there are holes alone."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else offset

    def size(self) -> int:
        """Returns the length of the file in bytes."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Closes both ways to the file, also where one of them fails: EnvironmentProblem then."""
        fds, self.fd, self._direct_fd = (self.fd, self._direct_fd), -1, None
        failed: OSError | None = None
        for fd in fds:
            try:
                if fd is not None and fd >= 0:
                    os.close(fd)
            except OSError as error:  # writes of network file systems, and all of a dead mount, fail only here
                failed = failed or error
        if failed is not None:
            raise problem(self.path, "closing", failed)


# ssize_t preadv(int, const struct iovec *, int, off_t): all of 64 bits but two, on the machines that this runs on.
_preadv = types.ExternalFunction("preadv", types.int64(types.int32, types.uintp, types.int32, types.int64))
# long syscall(long, ...): what it takes are numbers, which come in the same registers whether or not they are variable.
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 6))


@numba.njit(nogil=True, cache=True)
def _joined(wanted, order):  # type: ignore[no-untyped-def]
    """As few reads as `wanted` (see `read_runs`) takes, in the `order` of their offsets.

    Returns their segments (address, bytes), int64 [m, 2]; the first segment of each read, and of one more; their offsets.
    """
    segments, firsts = np.empty((len(wanted), 2), np.int64), np.empty(len(wanted) + 1, np.int64)
    starts = np.empty(len(wanted), np.int64)
    count = runs = run_bytes = 0
    end = np.int64(-1)
    for i in order:
        offset, address, size = wanted[i, 0], wanted[i, 1], wanted[i, 2]
        fresh = offset != end or run_bytes + size > LARGEST_READ or count - firsts[runs - 1] == _MOST_SEGMENTS
        if fresh:
            firsts[runs], starts[runs], run_bytes = count, offset, 0
            runs += 1
        if not fresh and segments[count - 1, 0] + segments[count - 1, 1] == address:
            segments[count - 1, 1] += size
        else:
            segments[count, 0], segments[count, 1] = address, size
            count += 1
        end = offset + size
        run_bytes += size
    firsts[runs] = count
    return segments[:count], firsts[: runs + 1], starts[:runs]


@numba.njit(nogil=True, cache=True)
def _read_all(fd, segments, firsts, starts):  # type: ignore[no-untyped-def]
    """Many reads without the interpreter in between, which all threads share and wait for.

    Takes what `_joined` returns. Ends at the first that fails or is short; returns its number, or how many there are.
    """
    for i in range(starts.size):
        some = segments[firsts[i] : firsts[i + 1]]
        if _preadv(fd, np.uintp(some.ctypes.data), np.int32(len(some)), starts[i]) != some[:, 1].sum():
            return i
    return starts.size


@numba.njit(nogil=True, cache=True)
def _read_together(calls, fd, segments, firsts, starts, blocks, pointers, events):  # type: ignore[no-untyped-def]
    """As `_read_all`, with as many under way as there are `blocks`, and all tried.

    `calls`: an AIO context, the numbers of io_submit and io_getevents. Returns which were read
    whole, and whether the kernel has told of all.
    """
    context, submit, get_events = calls
    whole, depth = np.zeros(starts.size, np.bool_), len(blocks)
    for first in range(0, starts.size, depth):
        count = min(depth, starts.size - first)
        for i in range(count):
            one = firsts[first + i]
            blocks[i, 0], blocks[i, 2] = first + i, _PREADV | fd << 32
            blocks[i, 3] = segments[one:].ctypes.data
            blocks[i, 4], blocks[i, 5] = firsts[first + i + 1] - one, starts[first + i]
        taken = done = failures = 0
        while taken < count:
            more = _syscall(submit, context, count - taken, pointers[taken:].ctypes.data, 0, 0)
            if more <= 0:
                break
            taken += more
        while done < taken:
            more = _syscall(get_events, context, taken - done, taken - done, events[done:].ctypes.data, 0)
            failures += more < 0
            if failures == _MOST_FAILURES:
                return whole, False
            done += max(0, more)
        for i in range(taken):
            run = events[i, 0]
            whole[run] = events[i, 2] == segments[firsts[run] : firsts[run + 1], 1].sum()
    return whole, True


def huge_memory(size_bytes: int) -> Bytes:
    """Returns fresh memory in one huge page, where the kernel has some, not in small ones as the allocator's may be.

    The disk is then told of one place in memory for each read, not of one for each 4 KiB.
    """
    size = max(size_bytes, HUGE_PAGE_BYTES)
    fresh = mmap.mmap(-1, size + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        fresh.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(fresh, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[skip : skip + size]


class ReadQueue:
    """Reads that are under way together, without a thread for each: Linux's own asynchronous I/O, into memory of its own.

    `read_queue` hands them out. One at a time reads after the other where the kernel, or a container, has none for us.
    """

    def __init__(self) -> None:
        context = ctypes.c_ulong(0)
        numbers = [ctypes.c_long(number) for number in AIO_NUMBERS.get(platform.machine(), ())]
        made = bool(numbers) and _libc.syscall(numbers[0], ctypes.c_long(DEPTH), ctypes.byref(context)) == 0
        self._calls = (context.value, *(number.value for number in numbers[1:])) if made else None
        self._blocks, self._events = np.zeros((DEPTH, _BLOCK_WORDS), np.int64), np.zeros((DEPTH, _EVENT_WORDS), np.int64)
        self._pointers = self._blocks.ctypes.data + self._blocks.strides[0] * np.arange(DEPTH)
        self._memory = np.empty(0, np.uint8)

    def memory(self, size_bytes: int) -> Bytes:
        """Returns memory to read into, valid until the queue is given back."""
        if self._memory.size < size_bytes:
            self._memory = huge_memory(size_bytes)
        return self._memory[:size_bytes]

    def read(self, fd: int, segments: Int64s, firsts: Int64s, starts: Int64s) -> Int64s:
        """Reads what `_joined` has put together; returns the numbers of the reads that were not whole."""
        if self._calls is None:
            return np.arange(_read_all(fd, segments, firsts, starts), len(starts))
        whole, told = _read_together(self._calls, fd, segments, firsts, starts, self._blocks, self._pointers, self._events)
        if not told:
            raise OSError(errno.EIO, "the kernel did not report the end of asynchronous reads")
        return np.flatnonzero(~whole)


@contextlib.contextmanager
def read_queue() -> Iterator[ReadQueue]:
    """Yields a queue that nobody else uses meanwhile.

    One that was left in the middle of its reads is not used again, nor is its memory given back.
    """
    try:
        queue = free_queues.pop()
    except IndexError:
        queue = ReadQueue()
    try:
        yield queue
    except LlmcacheError:  # raised after its reads
        free_queues.append(queue)
        raise
    except BaseException:
        _abandoned.append(queue)
        raise
    free_queues.append(queue)


free_queues: list[ReadQueue] = []
"""That nobody uses."""
_abandoned: list[ReadQueue] = []
os.register_at_fork(after_in_child=free_queues.clear)  # a child has no such context
