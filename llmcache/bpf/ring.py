"""The reading end of a BPF ring buffer of records of one size: whole stretches at a time, no record is touched alone.

The kernel writes, one reader reads. Both positions only grow; the reader's, in a page of its own, tells the kernel what
may be overwritten. On processors that reorder memory accesses fences keep the copy between the kernel's position
and its own (x86-64 does not, for loads after loads and stores after loads).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct

from llmcache.units import PAGE_BYTES

BUSY, DISCARDED = 1 << 31, 1 << 30
"""Marks in the length of a record (u32, before it; another u32 is between): still being written; to be passed over."""
FRAME_BYTES = 8
_MEMBARRIER_CALL = {"aarch64": 283, "riscv64": 283}
_EXPEDITED, _REGISTER_EXPEDITED = 1 << 3, 1 << 4
_libc = ctypes.CDLL(None, use_errno=True)


class Fence:
    """A full memory barrier where the processor needs one: entering membarrier(2) is one, also for the caller."""

    def __init__(self) -> None:
        self._call = _MEMBARRIER_CALL.get(platform.machine())
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
    """The ring buffer map `fd`, `size` bytes (a power of two), that holds only records of `record_bytes` (times 8)."""

    def __init__(self, fd: int, size: int, record_bytes: int) -> None:
        self.frame_bytes = FRAME_BYTES + record_bytes
        self.fence = Fence()
        self._size = size
        # The data is mapped twice in a row, so that a stretch over the end is in one piece.
        self._own = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._kernels = mmap.mmap(fd, PAGE_BYTES + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE_BYTES)
        self._read_to = memoryview(self._own).cast("Q")
        self._written_to = memoryview(self._kernels)[:8].cast("Q")
        self._data = memoryview(self._kernels)[PAGE_BYTES:]

    def stretch(self) -> memoryview:
        """All frames there are, in the order in which they were begun; only those before the first busy one are complete."""
        start, end = self._read_to[0], self._written_to[0]
        at = start & (self._size - 1)
        frames = self._data[at : at + (end - start) // self.frame_bytes * self.frame_bytes]
        self.fence()
        return frames

    def take(self, frame: struct.Struct) -> list[tuple[int, ...]]:
        """Return the records since the last call, in their order, and free their places.

        `frame`: a whole frame, of which the first two numbers (its length, and padding) are left out.
        """
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
        """Gives the place of the first `frames` of the stretch, which were copied, back to the kernel."""
        self.fence()
        self._read_to[0] += frames * self.frame_bytes
