"""What is to be simulated on each trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmcache.cache.cachesizes import CacheSize
from llmcache.cache.latency import FetchModel, StallMeter

Progress = Callable[[str, int, int], None]
"""Told the trace, the rows times cells done of it, and how many there are. Called from several threads."""


@dataclass(frozen=True)
class Plan:
    """Every policy at every size, and what is to be modelled from their misses."""

    policies: tuple[str, ...]
    sizes: tuple[CacheSize, ...]
    model: FetchModel = field(default_factory=FetchModel)
    period_ns: int | None = None
    """T: if given, stalls are metered in slices of it."""
    curves: bool = False
    """Whether the LRU curve of all sizes is wanted too."""

    def meter(self) -> StallMeter | None:
        """Returns a fresh meter, or None without T."""
        return None if self.period_ns is None else StallMeter(self.period_ns, self.model.storage_bandwidths)
