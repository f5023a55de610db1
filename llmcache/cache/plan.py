"""What is to be simulated on each trace, and how the options of `llmcache simulate` say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmcache.cache.cachesizes import CacheSize, parse_cache_sizes
from llmcache.cache.constants import PAPER
from llmcache.cache.latency import FetchModel, StallMeter
from llmcache.cache.question import parse_bandwidth
from llmcache.errors import UsageError
from llmcache.units import parse_duration

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


def plan_of(
    policy: str, cache: str, bw: str | None, t: str | None, mrc: bool, setup: str = "0", drawn: bool = False
) -> Plan:
    """The plan that the options mean, as typed; UsageError names the option that is wrong.

    Without `bw` the paper's four bandwidths are modelled, the slowest (100 MB/s) first. Where LRU is `drawn`, its curve
    is wanted too.

    Differs from the paper: a bandwidth is what storage delivers, unless `setup` says that each missed block takes a time
    of its own. The paper's 50 us make 71 MB/s of 500; blocks that are missed in sequence are read together and ahead.
    The 2 us of each request of 1 KiB to the GPU are left out as well, they would make 500 MB/s of its 20 GB/s.
    """
    policies = _policies(policy)
    bandwidths = PAPER.storage_bandwidths
    if bw is not None:
        bandwidths = tuple(dict.fromkeys(parse_bandwidth("--bw", item) for item in _items("--bw", bw)))
    model = FetchModel(bandwidths, setup_ns=_duration_ns("--setup", setup), gpu_setup_ns=0)
    period_ns = None if t is None else _duration_ns("--t", t, least=1)
    return Plan(policies, parse_cache_sizes(cache), model, period_ns, mrc or (drawn and "lru" in policies))


def _policies(text: str) -> tuple[str, ...]:
    from llmcache.cache.policies import POLICIES

    names = dict.fromkeys(_items("--policy", text))
    if unknown := [name for name in names if name not in POLICIES]:
        raise UsageError(f"--policy: there is no policy '{unknown[0]}'", f"one or more of: {','.join(POLICIES)}")
    return tuple(names)


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"{option}: nothing stands before or after a comma in '{text}'", "write: one,two,three")
    return items


def _duration_ns(option: str, text: str, least: int = 0) -> int:
    try:
        duration_ns = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error
    if duration_ns < least:
        raise UsageError(f"{option}: '{text}' must be above 0", "write seconds: 0.1, or 100ms")
    return duration_ns
