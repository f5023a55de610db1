"""Interfaces between the engine, the back ends (which do the I/O) and the pin stores (which keep extents in memory)."""

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
        """May follow `stop`."""

    def stop(self) -> None:
        """Discard remaining work, after loaders and spaces have ended."""

    def close(self) -> None:
        """Release what `stop` keeps for another `start`, once no client can hang if this process is killed."""

    def guards(self, mountpoint: str) -> bool:
        """Ensure that a sentinel watches this process if necessary; False if the mount was unmounted."""

    def follows(self, space: LoopSpace) -> bool:
        """Return True if loaders should fetch ahead of readers. The caller holds the lock."""

    def ahead(self, space: LoopSpace, member: SpaceFile, extent: int, pid: int = 0) -> Job | None:
        """Claim an extent that no reader waits for, if that is possible now; return its job. The caller holds the lock."""

    def fill(self, space: LoopSpace, member: SpaceFile, extent: int, backing: Backing) -> bool:
        """Populate a whole extent that is otherwise read by pages; return False if that fails."""

    def keys(self, space: LoopSpace) -> set[tuple[int, int]]:
        """Return device and inode as clients' descriptors and mappings show them."""

    def read_bytes(self, space: LoopSpace) -> int:
        """Return the bytes read from storage. The caller holds the lock."""

    def client_reads(self) -> ClientReads | None:
        """Return the bytes that the kernel read without a request to this process."""

    def faults(self) -> dict[str, int]:
        """Return the counters `lost_touches` and `refused_advice`, or nothing."""

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Return those of `extents` that are not in the page cache. The caller holds the lock."""

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """Make the next touch observable; return the extents for which that worked."""

    def conclude(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        """End the exposure; return the extents touched since without a request or event."""

    def find_experts(self, moe: MoeFile) -> None:
        """In place only."""

    def drop(self, node: int, parts: Sequence[tuple[int, int]], *, written: bool = False) -> None:
        """Drop (offset, bytes; 0: to the end), `written`: also dirty pages; may wait for READs of them."""


class PinStore(Protocol):
    """Keeps pins, by default in the page cache; a store with memory of its own overrides the methods with a body.

    Every method expects the engine's lock.
    """

    def has_region(self, space: LoopSpace, extent: int) -> bool:
        return False

    def region(self, space: LoopSpace, extent: int, verdict: int) -> MemoryRegion | None:
        """Return the memory that contains `extent`, or into which it is read to stay."""
        return None

    def keep(self, space: LoopSpace, extent: int, region: MemoryRegion) -> None:
        return

    def stored(self, space: LoopSpace, fetch: Fetch) -> None:
        return

    def skips_trip(self, space: LoopSpace, extent: int) -> bool:
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
    """Receives the touches that a back end observes (`engine.evidence.Judge`). The caller holds the lock."""

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
