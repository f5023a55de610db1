"""Interfaces between the engine and the back ends.

The engine chooses the extents to pin, to fetch and to evict. A back end does the I/O, over FUSE or in place, and reports
opens, reads and closes to the engine. A pin store keeps pinned extents in memory. Methods that expect the engine's lock say
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmcache.cache.loops import Pass
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import SourceTree
from llmcache.mount.state.buffers import MemoryRegion
from llmcache.mount.state.space import Fetch, LoopSpace, MoeFile, SpaceFile
from llmcache.mount.state.state import CacheState, Job


class ClientReads(NamedTuple):
    """Bytes that the kernel has read from storage in place: for clients, and for the daemon with its pin helpers."""

    client_bytes: int
    own_bytes: int


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

    def has_region(self, space: LoopSpace, extent: int) -> bool:
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

    def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until the locks and unlocks requested before are done. Without the engine's lock."""
        return

    def pinned(self, space: LoopSpace) -> list[int]:
        """Return the extents that are pinned."""


class PinHelpers(Protocol):
    """The pin helpers, as far as the engine uses them (`backends.pins.PinService`)."""

    pids: tuple[int, ...]
    again_bytes: int

    @property
    def locked_bytes(self) -> int: ...

    def start(self, mountpoint: str) -> None: ...

    def stop(self) -> None: ...

    def attach(self, path: str) -> None: ...

    def detach(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def settle(self, timeout_s: float) -> None: ...


class TouchJudge(Protocol):
    """Receives the touches that a back end observes (`engine.evidence.Judge`). Lock held."""

    def touched(self, space: LoopSpace, extent: int) -> None: ...

    def touched_pages(self, space: LoopSpace, extent: int, resident_bytes: int) -> None: ...

    def used_bytes(self, space: LoopSpace, extent: int) -> int: ...


class EngineCalls(Protocol):
    """The engine, as far as back ends report to it. Methods with a space expect the lock; those with a file take it."""

    state: CacheState
    tree: SourceTree
    pin_store: PinStore
    pins: PinHelpers

    @property
    def judge(self) -> TouchJudge: ...

    def opened(self, backing: Backing, path: str, pid: int) -> bool: ...

    def adopt(self, backing: Backing) -> bool: ...

    def closed(self, backing: Backing, pid: int) -> None: ...

    def changed(self, backing: Backing, offset: int, length: int) -> None: ...

    def renamed(self, old: str, new: str) -> None: ...

    def removed(self, path: str) -> None: ...

    def pass_ended(self, space: LoopSpace, done: Pass) -> None: ...

    def replan(self) -> None: ...
