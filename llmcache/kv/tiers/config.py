"""Data types of a KvStore."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.spill import KvShape
from llmcache.papers.csd import PROFILES, CsdProfile

Arrays = list[NDArray[Any]]  # keys and values
SSD_KINDS = ("file", "csd")  # access to the ssd tier: by this process, or by the *emulated* device that owns the file
PING_PONG_STEPS = 16  # a page that moves down and up again within this many steps has moved in vain (ping-pong)

Victims = Callable[[int, int, Int64s, int], Int64s]
"""(layer, sequence, pages of the middle in the pool, ascending; number to drop) -> the pages to drop."""


@dataclass(frozen=True)
class StoreConfig:
    """Shape and sizes of a store; sink and window are rounded up to whole pages.

    `cpu_pages`: limit of the cpu pool in full pages per layer and sequence, including sink and window; None for no limit.
    `path`: the spill file (the ssd tier), which a limit requires. `ssd`: "file", or "csd" (*emulated*, with `profile`).
    `threads`: None for one per CPU. `cpu_rows`: number of recently used rows per head that are cached in addition to the
    pages, up to an eighth of the context. `direct` and `interleaved`: as SpillFile.
    """

    shape: KvShape
    batch: int = 1
    sink_tokens: int = 16
    window_tokens: int = 32
    cpu_pages: int | None = None
    path: Path | None = None
    ssd: str = "file"
    profile: CsdProfile = field(default_factory=lambda: PROFILES["none"])
    direct: bool | None = None
    threads: int | None = None
    cpu_rows: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("sink_tokens", 0), ("window_tokens", 0), ("cpu_rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, not {getattr(self, name)}")
        if self.ssd not in SSD_KINDS:
            raise ValueError(f"ssd: must be one of {', '.join(SSD_KINDS)}, not '{self.ssd}'")
        if self.cpu_pages is None:
            return
        if self.path is None:
            raise UsageError("cpu_pages: a limit needs a spill file for the other pages", "set path, or omit cpu_pages")
        pinned = self.sink_pages + self.window_pages
        if self.cpu_pages < pinned:
            hint = "increase cpu_pages, or reduce the sink or the window"
            raise UsageError(f"cpu_pages: must be at least {pinned}, which sink and window take, not {self.cpu_pages}", hint)

    @property
    def rows_bytes(self) -> int:
        of_row = self.shape.token_bytes + 12 * self.shape.kv_heads
        return self.shape.layers * self.cpu_rows * of_row

    @property
    def sink_pages(self) -> int:
        return self.shape.pages_of(self.sink_tokens)

    @property
    def window_pages(self) -> int:
        return self.shape.pages_of(self.window_tokens)


@dataclass(frozen=True)
class Selection:
    """The chosen tokens of the middle: `positions` int64 [batch, kv_heads, k], ascending.

    If fewer tokens are chosen for a head than for others, its last position is repeated (`repeated`) and attended to once.
    `missed`, if the policy estimates it, is a pair of float32 [batch, heads]: the share of each query head's attention on
    tokens of the middle that were not chosen, and the log-sum-exp of its logits, both without the newest token.
    """

    positions: Int64s
    missed: tuple[Floats, Floats] | None = None

    def __post_init__(self) -> None:
        if self.positions.ndim != 3 or self.positions.dtype != np.int64:
            found = f"not {self.positions.dtype} {self.positions.shape}"
            raise ValueError(f"positions: must be int64 [batch, kv_heads, k], {found}")

    @property
    def count(self) -> int:
        return int(self.positions.shape[2])

    @staticmethod
    def none(batch: int, kv_heads: int) -> Selection:
        return Selection(np.empty((batch, kv_heads, 0), np.int64))

    @staticmethod
    def of_pages(pages: Int64s, page_tokens: int) -> Selection:
        ordered = np.sort(pages, axis=2)
        tokens = ordered[..., None] * page_tokens + np.arange(page_tokens)
        return Selection(tokens.reshape(*pages.shape[:2], -1).astype(np.int64))

    @staticmethod
    def of_all(pages: range, batch: int, kv_heads: int, page_tokens: int) -> Selection:
        tokens = np.arange(pages.start * page_tokens, pages.stop * page_tokens, dtype=np.int64)
        shape = (batch, kv_heads, len(tokens))
        return Selection(np.lib.stride_tricks.as_strided(tokens, shape, (0, 0, tokens.itemsize)))  # all heads share one row


def side_by_side(parts: Sequence[Int64s]) -> Int64s:
    """Return the selections [kv_heads, k of its own] of sequences as one array [batch, kv_heads, largest k]."""
    found = np.empty((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), np.int64)
    for own, part in zip(found, parts, strict=True):
        own[:, : part.shape[1]] = part
        own[:, part.shape[1] :] = part[:, -1:]
    return found


def repeated(positions: Int64s) -> Flags:
    """Return which of `positions` [..., k] equal the previous one."""
    found = np.zeros(positions.shape, np.bool_)
    np.equal(positions[..., 1:], positions[..., :-1], out=found[..., 1:])
    return found


@dataclass
class Gathered:
    """The rows that a layer attends to: sink, chosen tokens, window and tail, ascending, equally many for each head.

    `keys` [batch, kv_heads, k, head_dim] and `values` [..., value_dim] in the shape's numpy type. `positions` int64 [batch,
    kv_heads, k]: token indexes, padding included. `repeated` rows must be masked.
    """

    keys: Any
    values: Any
    positions: Int64s
    _give_back: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Allow the store to reuse the memory; the arrays become invalid."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass
class Traffic:
    """Counters of a store; thread-safe.

    `moved_bytes` by (from, to, why). Tiers are "gpu", "cpu" and "ssd"; "device" is the memory of the *emulated* device, so
    ("ssd", "device", ...) stays inside it, and ("ssd", "cpu", ...) crosses the link, headers included. Why: "spill", "fetch"
    (for attention), "move" (pool), "score" (keys or score blocks, and queries), "index" (keys alone), "restore", "attend"
    (cpu to gpu). `ping_pong_pages`: pages that moved up soon after they had moved down. `hits_*`: chosen tokens of the
    middle found in that tier, over all heads.
    """

    moved_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    pages_up: int = 0
    pages_down: int = 0
    ping_pong_pages: int = 0
    hits_gpu: int = 0
    hits_cpu: int = 0
    hits_ssd: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, source: str, target: str, why: str, size_bytes: int) -> None:
        if size_bytes:
            with self._lock:
                self.moved_bytes[source, target, why] += size_bytes

    def count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def bytes_between(self, source: str, target: str, why: str | None = None) -> int:
        with self._lock:
            moved = list(self.moved_bytes.items())
        return sum(count for (a, b, reason), count in moved if (a, b) == (source, target) and why in (None, reason))

    @property
    def hit_ratio(self) -> float:
        chosen = self.hits_gpu + self.hits_cpu + self.hits_ssd
        return 1 - self.hits_ssd / chosen if chosen else 1.0

    @property
    def ping_pong_share(self) -> float:
        return self.ping_pong_pages / self.pages_up if self.pages_up else 0.0

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            moved = [
                {"from": a, "to": b, "why": why, "bytes": count} for (a, b, why), count in sorted(self.moved_bytes.items())
            ]
        pages = ("pages_up", "pages_down", "ping_pong_pages", "ping_pong_share")
        names = (*pages, "hits_gpu", "hits_cpu", "hits_ssd", "hit_ratio")
        return {"moved_bytes": moved, **{name: getattr(self, name) for name in names}}
