"""Page-aligned memory for fetches: a bounded pool that never blocks, and a small bounce buffer per thread.

Nothing here waits. A caller that finds the pool empty reads just the bytes it needs through its own bounce buffer:
a reply must never wait for a buffer that somebody holds who waits for that reply.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

BUFFER_BYTES = 1 << 20
BOUNCE_BYTES = 128 << 10


class Region:
    """Anonymous page-aligned memory of `size` bytes at `address`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class BufferPool:
    """Memory of `count` times BUFFER_BYTES, in buffers of that size or, for files of hundreds of GiB, fewer larger ones.

    `reserve` times BUFFER_BYTES of it are only handed out on demand, not for fetching ahead.
    """

    def __init__(self, count: int, reserve: int) -> None:
        self._free = [Region(BUFFER_BYTES) for _ in range(count)]
        self._left_bytes = count * BUFFER_BYTES  # not handed out; what is in `_free` is part of it
        self.count = count
        self.reserve = reserve
        self._bounce = threading.local()

    def take(self, size: int, ahead: bool = False) -> Region | None:
        """Returns a buffer of `size` bytes or more, or None when there is none for this purpose. Engine's lock held."""
        size = max(size, BUFFER_BYTES)
        if self._left_bytes - size < (self.reserve * BUFFER_BYTES if ahead else 0):
            return None
        buffer = next((buffer for buffer in reversed(self._free) if buffer.size == size), None)
        if buffer is not None:
            self._free.remove(buffer)
        else:
            while sum(free.size for free in self._free) > self._left_bytes - size:
                del self._free[0]
            try:
                buffer = Region(size)
            except OSError:  # no memory
                return None
        self._left_bytes -= size
        return buffer

    def give(self, buffer: Region) -> None:
        """Takes a buffer back. The caller holds the engine's lock."""
        self._free.append(buffer)
        self._left_bytes += buffer.size

    def bounce(self) -> Region:
        """Returns this thread's own buffer of BOUNCE_BYTES."""
        region: Region | None = getattr(self._bounce, "region", None)
        if region is None:
            region = self._bounce.region = Region(BOUNCE_BYTES)
        return region
