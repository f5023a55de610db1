"""The reader of a BPF ring buffer with records of one size.

The kernel writes and one reader reads. Both positions only grow. Fences order the copy of the data after the read of the
kernel's position and before the write of the reader's. x86-64 reorders neither loads with loads nor loads with later stores
and needs no fences.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct

from llmcache.units import PAGE_BYTES

BUSY, DISCARDED = 1 << 31, 1 << 30
"""Bits in the length of a record: the program is still writing it; it is to be skipped."""
FRAME_BYTES = 8
_MEMBARRIER_CALL = {"aarch64": 283, "riscv64": 283}
_EXPEDITED, _REGISTER_EXPEDITED = 1 << 3, 1 << 4
_libc = ctypes.CDLL(None, use_errno=True)


class Fence:
    """A full memory barrier through membarrier(2)."""

    def __init__(self) -> None:
        self._call = _MEMBARRIER_CALL.get(platform.machine())
        if self._call is not None:
            self._barrier(_REGISTER_EXPEDITED)

    def __call__(self) -> None:
        if self._call is not None:
            self._barrier(_EXPEDITED)

    def _barrier(self, command: int) -> None:
        if _libc.syscall(ctypes.c_long(self._call or 0), ctypes.c_int(command), ctypes.c_uint(0), ctypes.c_int(0)) < 0:
            raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")


class Ring:
    """A ring buffer of `size` bytes (a power of two) whose records have `record_bytes` (a multiple of 8)."""

    def __init__(self, fd: int, size: int, record_bytes: int) -> None:
        self.frame_bytes = FRAME_BYTES + record_bytes
        self.fence = Fence()
        self._size = size
        # The data is mapped twice in sequence, so that frames across the end are contiguous.
        self._own = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._kernels = mmap.mmap(fd, PAGE_BYTES + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE_BYTES)
        self._read_to = memoryview(self._own).cast("Q")
        self._written_to = memoryview(self._kernels)[:8].cast("Q")
        self._data = memoryview(self._kernels)[PAGE_BYTES:]

    def stretch(self) -> memoryview:
        """Return all frames in the order in which they were reserved; those before the first busy frame are complete."""
        start, end = self._read_to[0], self._written_to[0]
        at = start & (self._size - 1)
        frames = self._data[at : at + (end - start) // self.frame_bytes * self.frame_bytes]
        self.fence()
        return frames

    def take(self, frame: struct.Struct) -> list[tuple[int, ...]]:
        """Return the new records, without length and padding, and free their space."""
        done, found = 0, []
        for length, _, *fields in frame.iter_unpack(bytes(self.stretch())):
            if length & BUSY:
                break
            done += 1
            if not length & DISCARDED:
                found.append(tuple(fields))
        self.free(done)
        return found

    def free(self, frames: int) -> None:
        self.fence()
        self._read_to[0] += frames * self.frame_bytes
