"""What a KvStore is made from, what is asked of it, what it hands out, and what it counts of its moves."""

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
from llmcache.kv.csd import PROFILES, CsdProfile
from llmcache.kv.spill import KvShape

Arrays = list[NDArray[Any]]
"""Keys and values."""
SSD_KINDS = ("file", "csd")
"""How the ssd tier is reached: by this process itself, or through the *emulated* device that owns the file."""
PING_PONG_STEPS = 16
"""A page that goes down and comes up again within so many steps has moved for nothing."""

Victims = Callable[[int, int, Int64s, int], Int64s]
"""(layer, sequence, pages of the middle in the pool, ascending; how many must go) -> those that go down."""


@dataclass(frozen=True)
class StoreConfig:
    """Shape and sizes of a store; sink and window are rounded up to whole pages.

    `cpu_pages`: capacity of the cpu pool in whole pages per layer and sequence, sink and window included (the page that is
    being filled is not); None: no bound. `path`: the spill file, the ssd tier; None: there is none, and no bound can be
    kept. `ssd`: "file" or "csd" (*emulated*, with `profile`). `direct`: as SpillFile. `threads` for copying, reading and
    scoring: None for one a processor. `cpu_rows`: rows of each head that came from a file and were attended to last stay
    beside the pages, up to so many, and up to an eighth of the context. `interleaved`: as SpillFile, where one is made.
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
    def sink_pages(self) -> int:
        """Pages of the sink."""
        return self.shape.pages_of(self.sink_tokens)

    @property
    def window_pages(self) -> int:
        """Whole pages of the recent window."""
        return self.shape.pages_of(self.window_tokens)


@dataclass(frozen=True)
class Selection:
    """Tokens of the middle that are to be attended: `positions` int64 [batch, kv_heads, k], ascending, k may be 0.

    A head of which fewer are chosen than of others has its last one again and again (`repeated`): it is attended to once.
    `missed`, if the policy estimates it: the share of each query head's attention that falls on others of the middle, the
    newest token not counted, and the logarithm of the sum of exponentials that it is a share of; float32 [batch, heads].
    """

    positions: Int64s
    missed: tuple[Floats, Floats] | None = None

    def __post_init__(self) -> None:
        if self.positions.ndim != 3 or self.positions.dtype != np.int64:
            found = f"not {self.positions.dtype} {self.positions.shape}"
            raise ValueError(f"positions: must be int64 [batch, kv_heads, k], {found}")

    @property
    def count(self) -> int:
        """Tokens of each head, k."""
        return int(self.positions.shape[2])

    @staticmethod
    def none(batch: int, kv_heads: int) -> Selection:
        """Returns the choice of nothing: sink, window and tail alone are attended."""
        return Selection(np.empty((batch, kv_heads, 0), np.int64))

    @staticmethod
    def of_pages(pages: Int64s, page_tokens: int) -> Selection:
        """Returns the choice of all tokens of `pages` [batch, kv_heads, m]; they need not be in order."""
        ordered = np.sort(pages, axis=2)
        tokens = ordered[..., None] * page_tokens + np.arange(page_tokens)
        return Selection(tokens.reshape(*pages.shape[:2], -1).astype(np.int64))

    @staticmethod
    def of_all(pages: range, batch: int, kv_heads: int, page_tokens: int) -> Selection:
        """Returns the choice of every token of `pages`, for instance of `KvStore.middle`."""
        tokens = np.arange(pages.start * page_tokens, pages.stop * page_tokens, dtype=np.int64)
        shape = (batch, kv_heads, len(tokens))
        return Selection(np.lib.stride_tricks.as_strided(tokens, shape, (0, 0, tokens.itemsize)))  # one row, seen often


def side_by_side(parts: Sequence[Int64s]) -> Int64s:
    """Returns what was chosen of each sequence, [kv_heads, k of its own], as [batch, kv_heads, the most of them]."""
    found = np.empty((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), np.int64)
    for own, part in zip(found, parts, strict=True):
        own[:, : part.shape[1]] = part
        own[:, part.shape[1] :] = part[:, -1:]
    return found


def repeated(positions: Int64s) -> Flags:
    """Returns which of `positions` [.., k] stand there only because other heads have more: they equal the one before."""
    found = np.zeros(positions.shape, np.bool_)
    np.equal(positions[..., 1:], positions[..., :-1], out=found[..., 1:])
    return found


@dataclass
class Gathered:
    """What a layer attends to: sink, chosen, window and tail, ascending by position, in every head equally many.

    Rows that are `repeated` are there again, and are not to be attended to.

    `keys` [batch, kv_heads, k, head_dim] and `values` [.., value_dim] in the shape's numpy type (bfloat16: bits in uint16).
    `positions` int64 [batch, kv_heads, k]: indexes of tokens, padding included.
    """

    keys: Any
    values: Any
    positions: Int64s
    _give_back: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Lets the store use the memory again; the arrays must not be used any more. Without it they stay as they are."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass
class Traffic:
    """Counters of a store; safe to add to from several threads.

    `moved_bytes` by (from, to, why). Tiers are "gpu", "cpu" and "ssd"; "device" is the memory inside the *emulated* device,
    so ("ssd", "device", ..) stays inside it, and ("ssd", "cpu", ..) is what crossed the link, headers included. Why:
    "spill", "fetch" (for attention), "move" (pool), "score" (keys or score blocks, and queries), "index" (keys alone),
    "restore", "attend" (cpu to gpu). `ping_pong_pages`: those that went up and had gone down shortly before. `hits_*`:
    chosen tokens of the middle found in that tier, over all heads.
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
        """Counts bytes that moved."""
        if size_bytes:
            with self._lock:
                self.moved_bytes[source, target, why] += size_bytes

    def count(self, **more: int) -> None:
        """Adds to counters by name: pages that moved, and chosen tokens by where they were."""
        with self._lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def bytes_between(self, source: str, target: str, why: str | None = None) -> int:
        """Returns the bytes that moved from one tier to another, for one reason or for all."""
        with self._lock:
            moved = list(self.moved_bytes.items())
        return sum(count for (a, b, reason), count in moved if (a, b) == (source, target) and why in (None, reason))

    @property
    def hit_ratio(self) -> float:
        """Share of the chosen tokens that had not to come from the ssd tier; 1 if nothing was chosen."""
        chosen = self.hits_gpu + self.hits_cpu + self.hits_ssd
        return 1 - self.hits_ssd / chosen if chosen else 1.0

    @property
    def ping_pong_share(self) -> float:
        """Share of the pages that moved up which had gone down within 16 steps."""
        return self.ping_pong_pages / self.pages_up if self.pages_up else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data: bytes as a list of {from, to, why, bytes}."""
        with self._lock:
            moved = [
                {"from": a, "to": b, "why": why, "bytes": count} for (a, b, why), count in sorted(self.moved_bytes.items())
            ]
        pages = ("pages_up", "pages_down", "ping_pong_pages", "ping_pong_share")
        names = (*pages, "hits_gpu", "hits_cpu", "hits_ssd", "hit_ratio")
        return {"moved_bytes": moved, **{name: getattr(self, name) for name in names}}
