"""Reading a BPF ring buffer of records of one size with numpy: whole stretches are copied, no record is touched alone.

The kernel writes, one reader reads. Both positions only grow; the reader's, in a page of its own, tells the kernel what
may be overwritten. On processors that reorder memory accesses two fences keep the copy between the kernel's position
and its own (x86-64 does not, for loads after loads and stores after loads).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np
from numpy.typing import NDArray

_BUSY, _DISCARDED = np.uint32(1 << 31), np.uint32(1 << 30)
_MEMBARRIER_CALL = {"aarch64": 283, "riscv64": 283}
_EXPEDITED, _REGISTER_EXPEDITED = 1 << 3, 1 << 4
_libc = ctypes.CDLL(None, use_errno=True)


class Fence:
    """A full memory barrier where the processor needs one: entering membarrier(2) is one, also for the caller."""

    def __init__(self) -> None:
        self._call = None if platform.machine() in ("x86_64", "AMD64") else _MEMBARRIER_CALL.get(platform.machine())
        if self._call is not None:
            self._ask(_REGISTER_EXPEDITED)

    def __call__(self) -> None:
        """Order everything before against everything after."""
        if self._call is not None:
            self._ask(_EXPEDITED)

    def _ask(self, command: int) -> None:
        if _libc.syscall(ctypes.c_long(self._call or 0), ctypes.c_int(command), ctypes.c_uint(0), ctypes.c_int(0)) < 0:
            raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")


class Ring:
    """The reading end of the ring buffer map `fd`, `size` bytes (a power of two), that holds only `record`s."""

    def __init__(self, fd: int, size: int, record: np.dtype[np.void]) -> None:
        page = mmap.PAGESIZE
        self._record = record
        self._framed = np.dtype([("length", "<u4"), ("page", "<u4"), ("record", record)])
        self._size = size
        self._fence = Fence()
        # The data is mapped twice in a row, so that a stretch over the end is in one piece.
        self._own = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._kernels = mmap.mmap(fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._read_to = np.frombuffer(self._own, np.uint64, 1)
        self._written_to = np.frombuffer(self._kernels, np.uint64, 1)
        self._data = np.frombuffer(self._kernels, np.uint8, 2 * size, offset=page)

    def read(self) -> NDArray[np.void]:
        """All records that are complete, in the order in which they were written; gives their place back."""
        start, end = int(self._read_to[0]), int(self._written_to[0])
        frame = self._framed.itemsize
        at = start & (self._size - 1)
        frames = self._data[at : at + (end - start) // frame * frame].view(self._framed)
        self._fence()
        busy = np.flatnonzero(frames["length"] & _BUSY)
        if len(busy):
            frames = frames[: busy[0]]
        self._fence()
        discarded = (frames["length"] & _DISCARDED) != 0
        records: NDArray[np.void] = frames["record"][~discarded]
        self._fence()
        self._read_to[0] = start + len(frames) * frame
        return records
