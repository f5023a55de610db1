"""What moved between the tiers of a store: bytes counted where they moved, pages that moved up and down, hits."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PING_PONG_STEPS = 16
"""A page that goes down and comes up again within so many steps has moved for nothing."""


@dataclass
class Traffic:
    """Counters of a store; safe to add to from several threads.

    `moved_bytes` by (from, to, why). Tiers are "gpu", "cpu" and "ssd"; "device" is the memory inside the *emulated* device,
    so ("ssd", "device", ..) stays inside it, and ("ssd", "cpu", ..) is what crossed the link, headers included. Why:
    "spill", "fetch" (for attention), "move" (pool), "score" (keys or score blocks, and queries), "index" (keys alone),
    "restore", "attend" (cpu to gpu). `hits_*`: chosen tokens of the middle found in that tier, over all heads.
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

    def add_moves(self, up: int = 0, down: int = 0, ping_pong: int = 0) -> None:
        """Counts pages that moved, and how many of those that went up had gone down shortly before."""
        with self._lock:
            self.pages_up += up
            self.pages_down += down
            self.ping_pong_pages += ping_pong

    def add_hits(self, cpu: int, ssd: int, gpu: int = 0) -> None:
        """Counts chosen tokens by where they were."""
        with self._lock:
            self.hits_gpu += gpu
            self.hits_cpu += cpu
            self.hits_ssd += ssd

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
        return {
            "moved_bytes": moved,
            "pages_up": self.pages_up,
            "pages_down": self.pages_down,
            "ping_pong_pages": self.ping_pong_pages,
            "ping_pong_share": self.ping_pong_share,
            "hits_gpu": self.hits_gpu,
            "hits_cpu": self.hits_cpu,
            "hits_ssd": self.hits_ssd,
            "hit_ratio": self.hit_ratio,
        }
