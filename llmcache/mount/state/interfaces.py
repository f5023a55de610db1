"""Interfaces between the engine and the back ends.

The engine chooses the extents to pin, fetch and evict. A back end does the I/O and reports opens, reads and closes. A pin
store keeps pinned extents in memory.
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
    """Bytes that the kernel read from storage in place."""

    client_bytes: int
    own_bytes: int


class KernelNotifier(Protocol):
    """Calls of the FUSE session, which release the GIL."""

    def store(self, nodeid: int, offset: int, address: int, length: int) -> int:
        """Return 0 or -errno."""

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """Return 0 or -errno."""


class Backend(Protocol):
    """Moves extents into and out of the page cache."""

    in_place: bool
    """True if the page cache belongs to the files of SOURCE: pages exist before a space begins, and stay valid after it."""
    large_extent: int
    """Bytes of an extent in a large file."""

    def start(self, notifier: KernelNotifier | None, mountpoint: str) -> None:
        """Begin to serve; may follow `stop`."""

    def stop(self) -> None:
        """Discard remaining work, after loaders and spaces have ended."""

    def close(self) -> None:
        """Release what `stop` keeps for another `start`, once no client can hang if this process is killed."""

    def guards(self, mountpoint: str) -> bool:
        """Ensure that a sentinel watches this process where clients would hang; False if the mount was unmounted."""

    def follows(self, space: LoopSpace) -> bool:
        """Return True if loaders should fetch ahead of readers. Lock held."""

    def ahead(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int = 0) -> Job | None:
        """Claim an extent that no reader waits for; return the job that fetches it, if that is possible now. Lock held."""

    def fill(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> bool:
        """Populate a whole extent that is otherwise read by pages; return False if that fails."""

    def keys(self, space: LoopSpace) -> set[tuple[int, int]]:
        """Return device and inode of the files as clients' descriptors and mappings show them."""

    def read_bytes(self, space: LoopSpace) -> int:
        """Return the bytes that clients and this process have read from storage. Lock held."""

    def client_reads(self) -> ClientReads | None:
        """Return the bytes that the kernel read without a request to this process."""

    def faults(self) -> dict[str, int]:
        """Return the counters `lost_touches` and `refused_advice`, or nothing."""

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Return those of `extents` that are not in the page cache. Lock held."""

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Make the next touch of resident extents observable; return the extents for which that worked."""

    def conclude(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """End the exposure of `extents`; return those touched since for which no request or event was seen."""

    def find_experts(self, moe: MoeFile) -> None:
        """Find the resident experts of a file. In place only."""

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        """Drop parts, (offset, bytes; 0: to the end), from the page cache; may wait for READs of them.

        `written`: also dirty pages, which are first written to storage.
        """


class PinStore(Protocol):
    """Keeps pins, by default in the page cache; a store with memory of its own overrides the methods with a body.

    Every method expects the engine's lock.
    """

    def has_region(self, space: LoopSpace, extent: int) -> bool:
        return False

    def region(self, space: LoopSpace, extent: int, verdict: int) -> MemoryRegion | None:
        """Return the memory that contains `extent`, or into which it is read to stay by the core's `verdict`; else None."""
        return None

    def keep(self, space: LoopSpace, extent: int, region: MemoryRegion) -> None:
        """Keep a `region` that the method `region` returned."""
        return

    def stored(self, space: LoopSpace, fetch: Fetch) -> None:
        return

    def skips_trip(self, space: LoopSpace, extent: int) -> bool:
        """Return True if the extent is stored without a tripwire, because it will be pinned."""
        return False

    def pin_ready(self, space: LoopSpace) -> None:
        return

    def release(self, space: LoopSpace, extents: list[int]) -> None:
        return

    def lock_again(self, space: LoopSpace, extents: list[int]) -> None:
        return

    def settle(self, timeout_s: float = 5.0) -> None:
        """Wait for the requested locks and unlocks, without the engine's lock."""
        return

    def pinned(self, space: LoopSpace) -> list[int]:
        """Return the pinned extents."""


class PinHelpers(Protocol):
    """The pin helpers, as the engine uses them (`backends.pins.PinService`)."""

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
    """The engine, as back ends use it. Methods with a space expect the lock; those with a file take it."""

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
