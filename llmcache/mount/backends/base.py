"""Interfaces that the engine works through: back ends, pin stores and the memory for fetches.

The engine chooses the extents to pin, to fetch and to evict. A back end does the I/O, over FUSE
(`fuse.py`) or in place (`inplace.py`), and reports opens, reads and closes to the engine. A pin store keeps pinned extents
in memory. Methods that expect the engine's lock say so.

Memory for fetches is page-aligned: a bounded pool that never blocks, and a small bounce buffer for each thread. A reader
that finds the pool empty reads only the bytes of its request, through its bounce buffer: a reply must not wait for a buffer
whose user may itself wait for that reply.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llmcache.mount.engine.space import Fetch

if TYPE_CHECKING:
    from llmcache.mount.engine.experts import ExpertLoad, MoeFile
    from llmcache.mount.engine.space import LoopSpace, SpaceFile
    from llmcache.mount.engine.state import Job
    from llmcache.mount.vfs.backing import Backing


BUFFER_BYTES = 1 << 20
BOUNCE_BYTES = 128 << 10


class MemoryRegion:
    """Anonymous page-aligned memory of `size` bytes at `address`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


@dataclass(eq=False)
class BufferFetch(Fetch):
    """A read at `offset` into memory of this process: `region` contains the data once it is done.

    `replied`: (start, end) of the bytes that readers received. `stored`: set once the rest is in the page cache. `load`: the
    expert of which the fetch reads a piece; `extent` is then the expert's number.
    """

    region: MemoryRegion = field(kw_only=True)
    offset: int = field(kw_only=True)
    load: ExpertLoad | None = None
    stored: threading.Event = field(default_factory=threading.Event)
    replied: tuple[int, int] = (0, 0)


class ClientReads(NamedTuple):
    """Bytes that the kernel has read from storage in place: for clients, and for the daemon with its pin helpers."""

    client_bytes: int
    own_bytes: int


class BufferPool:
    """Buffers of BUFFER_BYTES, `count` in all; files of hundreds of GiB use fewer, larger ones.

    Fetching ahead leaves `reserve` buffers free for fetches that a reader waits for.
    """

    def __init__(self, count: int, reserve: int) -> None:
        self.free = [MemoryRegion(BUFFER_BYTES) for _ in range(count)]
        self._left_bytes = count * BUFFER_BYTES  # not handed out, including buffers in `free`
        self.count = count
        self.reserve = reserve
        self._bounce = threading.local()

    def take(self, size: int, ahead: bool = False) -> MemoryRegion | None:
        """Return a buffer of `size` bytes or more, or None if none is free for this purpose. Lock held."""
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
        """Put a buffer back. Lock held."""
        self.free.append(buffer)
        self._left_bytes += buffer.size

    def bounce(self) -> MemoryRegion:
        """Return this thread's buffer of BOUNCE_BYTES."""
        region: MemoryRegion | None = getattr(self._bounce, "region", None)
        if region is None:
            region = self._bounce.region = MemoryRegion(BOUNCE_BYTES)
        return region


class KernelNotifier(Protocol):
    """The calls of the FUSE session that a back end needs. Both return 0 or -errno and release the GIL."""

    def store(self, nodeid: int, offset: int, address: int, length: int) -> int:
        """Store `length` bytes at `address` into the page cache of `nodeid`."""

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """Invalidate a range of the page cache of `nodeid`."""


class Backend(Protocol):
    """Moves extents into and out of the page cache."""

    in_place: bool
    """True if the page cache belongs to the files of SOURCE: pages exist before a space begins, and stay valid after it."""
    large_extent: int
    """Bytes of an extent in a large file."""

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Begin to serve; may follow `stop`. `notifier`: of the FUSE session, if there is one."""

    def stop(self) -> None:
        """Discard remaining work, after loaders and spaces have ended."""

    def close(self) -> None:
        """Release what `stop` keeps for another `start`, once no client can hang if this process is killed."""

    def guards(self, mountpoint: str) -> bool:
        """Ensure that a sentinel process watches this one where clients would hang; False if the mount was unmounted."""

    def follows(self, space: LoopSpace) -> bool:
        """Return True if loaders should fetch ahead of the readers of `space`. Lock held."""

    def ahead(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int = 0) -> Job | None:
        """Claim an extent that no reader waits for; return the job that fetches it, or None if that is not possible now.

        Lock held.
        """

    def fill(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> bool:
        """Populate a whole extent that is otherwise read by pages; return False if that fails."""

    def keys(self, space: LoopSpace) -> set[tuple[int, int]]:
        """Return device and inode of the space's files as they appear in the clients' descriptors and mappings."""

    def read_bytes(self, space: LoopSpace) -> int:
        """Return the bytes of `space` read from storage up to now, by clients and by this process. Lock held."""

    def client_reads(self) -> ClientReads | None:
        """Return the bytes that the kernel read from storage without a request to this process; None if there are none."""

    def faults(self) -> dict[str, int]:
        """Return the counters `lost_touches` and `refused_advice`, or nothing, for `llmcache stats`."""

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Return those of `extents` that are not in the page cache. Lock held."""

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Make the next touch of resident extents observable; return those of `extents` for which that worked."""

    def conclude(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """End the exposure of `extents`; return those that were touched since and for which no request or event was seen."""

    def find_experts(self, moe: MoeFile) -> None:
        """Find the resident experts of a file that was left to the kernel. In place only."""

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        """Drop parts, (offset, bytes; 0: to the end), of a file from the page cache; may wait for READs of them.

        `written`: also dirty pages, which are written to storage first.
        """


class PinStore(Protocol):
    """Keeps pins. Every method expects the engine's lock.

    The methods with a body suit a store that keeps pins in the page cache; a store with memory of its own overrides them.
    """

    def brings_region(self, space: LoopSpace, extent: int) -> bool:
        """Return True if `region` is expected to return memory for `extent`."""
        return False

    def region(self, space: LoopSpace, extent: int, verdict: int) -> MemoryRegion | None:
        """Return the memory that contains `extent`, or into which it is read to stay, by the core's verdict; else None."""
        return None

    def keep(self, space: LoopSpace, extent: int, region: MemoryRegion) -> None:
        """Keep `region`, which the method `region` returned and which now contains `extent`."""
        return

    def stored(self, space: LoopSpace, fetch: Fetch) -> None:
        """Pin the extent of `fetch`, which is now complete in the page cache, if the plan wants it."""
        return

    def skips_trip(self, space: LoopSpace, extent: int) -> bool:
        """Return True if the extent is stored whole, without a tripwire, because it will be pinned."""
        return False

    def pin_ready(self, space: LoopSpace) -> None:
        """Pin the extents that the plan wants and the page cache has."""
        return

    def release(self, space: LoopSpace, extents: list[int]) -> None:
        """Unpin `extents`."""
        return

    def lock_again(self, space: LoopSpace, extents: list[int]) -> None:
        """Lock pages of pinned extents again that were dropped and have been read again."""
        return

    def settle(self) -> None:
        """Wait until the locks and unlocks requested before are done. Without the engine's lock."""
        return

    def pinned(self, space: LoopSpace) -> list[int]:
        """Return the extents that are pinned."""
