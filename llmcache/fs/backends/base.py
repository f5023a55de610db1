"""What an engine needs of its means: a back end that brings extents in and drops them, what holds pins, and memory.

The engine decides: what loops, what is kept, who comes next, who goes. A back end does it, over FUSE (`fuse.py`) or in place
(`inplace.py`), and tells the engine what is opened, read and closed. Methods that say so expect the engine's lock.

Memory for fetches is page-aligned: a bounded pool that never blocks, and a small bounce buffer per thread. A caller that
finds the pool empty reads just the bytes it needs through its own bounce buffer: a reply must never wait for a buffer that
somebody holds who waits for that reply.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llmcache.fs.engine.group import Fetch

if TYPE_CHECKING:
    from llmcache.fs.engine.experts import ExpertLoad, Mixture
    from llmcache.fs.engine.group import Group, Member
    from llmcache.fs.engine.state import Job
    from llmcache.fs.vfs.backing import Backing


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
    """A read at `offset` into memory of this process: `region` holds the data once it is done.

    `replied`: bytes that readers have; `stored`: the rest is in the page cache. `load`: of which it is a piece; `extent` is
    the number of the expert then.
    """

    region: MemoryRegion = field(kw_only=True)
    offset: int = field(kw_only=True)
    load: ExpertLoad | None = None
    stored: threading.Event = field(default_factory=threading.Event)
    replied: tuple[int, int] = (0, 0)


class ClientReads(NamedTuple):
    """Bytes that the kernel has read from storage, in place: for clients by itself, and for the daemon and its helper."""

    client_bytes: int
    own_bytes: int


class BufferPool:
    """Memory of `count` times BUFFER_BYTES, in buffers of that size or, for files of hundreds of GiB, fewer larger ones.

    `reserve` times BUFFER_BYTES of it are only handed out on demand, not for fetching ahead.
    """

    def __init__(self, count: int, reserve: int) -> None:
        self.free = [MemoryRegion(BUFFER_BYTES) for _ in range(count)]
        self._left_bytes = count * BUFFER_BYTES  # not handed out; what is in `free` is part of it
        self.count = count
        self.reserve = reserve
        self._bounce = threading.local()

    def take(self, size: int, ahead: bool = False) -> MemoryRegion | None:
        """Returns a buffer of `size` bytes or more, or None when there is none for this purpose. Engine's lock held."""
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
        """Takes a buffer back. The caller holds the engine's lock."""
        self.free.append(buffer)
        self._left_bytes += buffer.size

    def bounce(self) -> MemoryRegion:
        """Returns this thread's own buffer of BOUNCE_BYTES."""
        region: MemoryRegion | None = getattr(self._bounce, "region", None)
        if region is None:
            region = self._bounce.region = MemoryRegion(BOUNCE_BYTES)
        return region


class KernelNotifier(Protocol):
    """What a back end needs of the FUSE session; both return 0 or -errno and release the GIL."""

    def store(self, nodeid: int, offset: int, address: int, length: int) -> int:
        """Puts `length` bytes at `address` into the page cache of `nodeid`."""

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """Drops a range of the page cache of `nodeid`."""


class Backend(Protocol):
    """How extents come into the page cache and leave it."""

    in_place: bool
    """True for the files' own pages: there before a group begins, and right whatever becomes of it."""
    large_extent: int
    """Bytes of an extent of a large file."""

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Begins to serve; may follow `stop`. `notifier`: of the FUSE session, if there is one."""

    def stop(self) -> None:
        """Loaders have ended and groups are gone: gives up what they left."""

    def close(self) -> None:
        """Ends what `stop` leaves for another `start`; once nothing can hang any more if this process is killed."""

    def guards(self, mountpoint: str) -> bool:
        """Has a process watch this one, if others wait for it; False once the mount is gone, unmounted by others."""

    def follows(self, group: Group) -> bool:
        """True if it is worth running ahead of the readers of `group`. Lock held."""

    def ahead(self, group: Group, member: Member, extent: int, pid: int = 0) -> Job | None:
        """Claims an extent that nobody waits for; what it returns brings it in. None: not now. Lock held."""

    def fill(self, group: Group, member: Member, extent: int, backing: Backing) -> bool:
        """Has a whole extent in the page cache that is else read page by page; False if that cannot be."""

    def keys(self, group: Group) -> set[tuple[int, int]]:
        """Return device and inode of the group's files, as clients have them open and mapped."""

    def read_bytes(self, group: Group) -> int:
        """Return the bytes of `group` that were read from storage so far, by clients and by this process. Lock held."""

    def client_reads(self) -> ClientReads | None:
        """Return what was read from storage without a request to this process; None where that cannot be."""

    def faults(self) -> dict[str, int]:
        """Return counters of what steering has missed, for `llmcache stats`."""

    def absent(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """Return those of `extents` that are not in the page cache. Lock held."""

    def expose(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """Make the next touch of resident extents visible; returns those of `extents` for which that worked."""

    def conclude(self, group: Group, extents: Sequence[int]) -> Sequence[int]:
        """End the exposure of `extents`; returns those that were touched since, as far as no request or event showed it."""

    def find_experts(self, mixture: Mixture) -> None:
        """Find which experts are resident, as the kernel had them alone until now. Only in place."""

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        """Drops parts, (offset, bytes; 0: all behind), of a file from the page cache; may wait for who reads them.

        `written`: also what was written lately, which has to be on storage before.
        """


class Holder(Protocol):
    """How pins are kept. Every method expects the engine's lock; those that have a body are right for who has no memory."""

    def brings_region(self, group: Group, extent: int) -> bool:
        """True if `region` will give memory for `extent`, as far as can be told before the reference."""
        return False

    def region(self, group: Group, extent: int, verdict: int) -> MemoryRegion | None:
        """Memory that holds `extent`, or that it is read into to stay, by the core's verdict; else None."""
        return None

    def keep(self, group: Group, extent: int, region: MemoryRegion) -> None:
        """`region`, which came from `region`, now contains `extent`."""
        return

    def stored(self, group: Group, fetch: Fetch) -> None:
        """The extent of `fetch` is complete in the page cache."""
        return

    def skips_trip(self, group: Group, extent: int) -> bool:
        """True if the extent is stored whole, because it will be pinned there."""
        return False

    def pin_ready(self, group: Group) -> None:
        """Pins what the plan wants and the page cache already holds."""
        return

    def release(self, group: Group, extents: list[int]) -> None:
        """Gives `extents` up: no longer pinned."""
        return

    def lock_again(self, group: Group, extents: list[int]) -> None:
        """Lock pages of pinned extents that were dropped and have come back."""
        return

    def settle(self) -> None:
        """Wait until locks and unlocks that were requested so far are done. Without the engine's lock."""
        return

    def pinned(self, group: Group) -> list[int]:
        """Returns the extents that are pinned."""
