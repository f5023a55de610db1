"""Page-aligned memory for fetches: a bounded pool that never blocks, and a small bounce buffer for each thread.

A reader that finds the pool empty uses its bounce buffer, because the user of a buffer may wait for its reply.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

BUFFER_BYTES = 1 << 20
BOUNCE_BYTES = 128 << 10


class MemoryRegion:
    """Anonymous page-aligned memory of `size` bytes at `address`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class BufferPool:
    """Up to `count` buffers; fetching ahead leaves `reserve` of them free for readers."""

    def __init__(self, count: int, reserve: int) -> None:
        self.free = [MemoryRegion(BUFFER_BYTES) for _ in range(count)]
        self._left_bytes = count * BUFFER_BYTES  # not handed out, including buffers in `free`
        self.count = count
        self.reserve = reserve
        self._bounce = threading.local()

    def take(self, size: int, ahead: bool = False) -> MemoryRegion | None:
        """Return a buffer of at least `size` bytes, if one is free. The caller holds the lock."""
        size = max(size, BUFFER_BYTES)
        if self._left_bytes - size < (self.reserve * BUFFER_BYTES if ahead else 0):
            return None
        buffer = next((buffer for buffer in reversed(self.free) if buffer.size == size), None)
        if buffer is not None:
            self.free.remove(buffer)
        else:
            while sum(free.size for free in self.free) > self._left_bytes - size:
                del self.free[0]
            try:
                buffer = MemoryRegion(size)
            except OSError:  # no memory
                return None
        self._left_bytes -= size
        return buffer

    def give(self, buffer: MemoryRegion) -> None:
        self.free.append(buffer)
        self._left_bytes += buffer.size

    def bounce(self) -> MemoryRegion:
        region: MemoryRegion | None = getattr(self._bounce, "region", None)
        if region is None:
            region = self._bounce.region = MemoryRegion(BOUNCE_BYTES)
        return region
