"""One look at a mount: its counters, and what they have moved since an earlier look. Base units; no text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmcache.fs.engine import waits

SCHEMA = "llmcache.top/1"


@dataclass(frozen=True)
class Budget:
    """Who has the memory. `limit_bytes` is what pressure leaves of the budget; the daemon's own memory is beside it.

    `window_bytes`: streamed extents, and what has not been dropped yet; `other_bytes`: single pages (headers, embedding
    rows, small and written files). `free_bytes`: of the limit.
    """

    mode: str
    budget_bytes: int
    limit_bytes: int
    pinned_bytes: int
    window_bytes: int
    other_bytes: int
    free_bytes: int
    daemon_bytes: int


@dataclass(frozen=True)
class Flow:
    """Bytes that moved in `seconds`, and the waits of readers in them."""

    seconds: float
    read_bytes: int
    hit_bytes: int
    storage_read_bytes: int
    storage_written_bytes: int
    fetched_bytes: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    refault_bytes: int
    late_waits: dict[str, Any]
    demand_waits: dict[str, Any]

    @property
    def hit_ratio(self) -> float | None:
        """Byte hit ratio (0..1); None if nothing was read. In steer, what is pinned counts at the end of each pass."""
        return self.hit_bytes / self.read_bytes if self.read_bytes else None

    @property
    def late_ratio(self) -> float | None:
        """Share (0..1) of the prefetched bytes that a reader had to wait for; None if none came to their end."""
        return self._of_prefetched(self.late_bytes)

    @property
    def wasted_ratio(self) -> float | None:
        """Share (0..1) of the prefetched bytes that were dropped unread; None if none came to their end."""
        return self._of_prefetched(self.wasted_bytes)

    def _of_prefetched(self, part_bytes: int) -> float | None:
        total = self.useful_bytes + self.late_bytes + self.wasted_bytes
        return part_bytes / total if total else None

    def per_s(self, size_bytes: int) -> float:
        """Bytes per second."""
        return size_bytes / self.seconds if self.seconds > 0 else 0.0

    def row(self) -> dict[str, Any]:
        """Returns it as JSON has it, with rates and ratios."""
        found = asdict(self) | {"hit_ratio": self.hit_ratio}
        found |= {"late_ratio": self.late_ratio, "wasted_ratio": self.wasted_ratio}
        for name in ("read", "storage_read", "storage_written", "fetched"):
            found[f"{name}_bytes_per_s"] = self.per_s(found[f"{name}_bytes"])
        for name in ("late", "demand"):
            for key, share in (("median_s", 0.5), ("p99_s", 0.99)):
                upper = waits.quantile_s(found[f"{name}_waits"], share)
                found[f"{name}_waits"][key] = None if upper == float("inf") else upper
        return found


@dataclass(frozen=True)
class Loop:
    """One loop; `readers` are places in it (0..1)."""

    path: str
    size_bytes: int
    period_s: float | None
    pinned_bytes: int
    window_bytes: int
    passes: int
    guessed: bool
    readers: tuple[float, ...]


@dataclass(frozen=True)
class Layer:
    """One layer, or several in a row: bytes by where they are, seconds since one was asked for, and strips.

    `streamed_bytes` are on storage and were read lately, `cold_bytes` were not. A strip has a digit for each part of the
    layer: ninths of it that are pinned, in the window, single pages, cold.
    """

    name: str
    tensors: int
    size_bytes: int
    pinned_bytes: int
    window_bytes: int
    pages_bytes: int
    streamed_bytes: int
    cold_bytes: int
    age_s: float | None
    cells: dict[str, str]


@dataclass(frozen=True)
class HeatFile:
    """The layers of one file, in the order in which they are computed; of a file of no known format just one."""

    path: str
    size_bytes: int
    layers: tuple[Layer, ...]
    left_out_layers: int


@dataclass(frozen=True)
class Sample:
    """One look. `interval` is what moved since an earlier one: at least as long ago as the longest period of a loop
    that is being read, so that a part of a pass is not taken for the whole; None in the first look.
    """

    mount: str
    unix_s: float
    uptime_s: float
    budget: Budget
    total: Flow
    interval: Flow | None
    loops: tuple[Loop, ...]
    heat: tuple[HeatFile, ...]
    left_out_files: int

    def document(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        found: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        found["total"] = self.total.row()
        found["interval"] = None if self.interval is None else self.interval.row()
        return found
