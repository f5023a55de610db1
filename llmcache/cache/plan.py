"""What is to be simulated on each trace, and how the options of `llmcache simulate` say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from llmcache.cache.latency import FetchModel, StallMeter
from llmcache.cache.policies import POLICIES
from llmcache.cache.question import parse_bandwidth, parse_size_with_unit, parse_time
from llmcache.cache.sizing import PAPER
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size


@dataclass(frozen=True)
class FootprintShare:
    """A cache of `percent` of the distinct blocks that a trace touches, rounded down to blocks.

    `at_least_one` makes it one block where it would be none, as `auto` needs on the smallest traces.
    """

    percent: Decimal
    at_least_one: bool = False

    def size_bytes(self, footprint_blocks: int) -> int:
        """Returns the size for a trace of `footprint_blocks`; UsageError if it is less than a block."""
        blocks = int(footprint_blocks * self.percent / 100)
        if blocks < 1 and not self.at_least_one:
            raise UsageError(
                f"--cache: {self.percent}% of a footprint of {footprint_blocks} blocks is less than one block",
                "give a larger share, or a size: 16M",
            )
        return max(1, blocks) * BLOCK_BYTES


CacheSize = int | FootprintShare  # bytes, or a share of the footprint

AUTO: tuple[CacheSize, ...] = tuple(
    FootprintShare(Decimal(percent), at_least_one=True) for percent in (2, 5, 10, 20, 30, 40, 50, 60, 80, 100)
)
"""Ten shares of the footprint."""


def parse_cache_sizes(text: str) -> tuple[CacheSize, ...]:
    """The sizes meant by `text`: "16M,64Mi", "2%,10%" or "auto"; UsageError names --cache."""
    if text.strip().lower() == "auto":
        return AUTO
    sizes: list[CacheSize] = []
    for item in map(str.strip, text.split(",")):
        if not item:
            raise UsageError("--cache: a size is missing beside a comma", "write sizes with commas between: 16M,64M")
        if item.endswith("%"):
            sizes.append(FootprintShare(_percent(item)))
        else:
            size_bytes = parse_size_with_unit("--cache", item)
            check_size(size_bytes)
            sizes.append(size_bytes)
    return tuple(sizes)


def _percent(text: str) -> Decimal:
    try:
        percent = Decimal(text[:-1].strip())
    except InvalidOperation:
        percent = Decimal(0)
    if not percent.is_finite() or not 0 < percent <= 100:
        raise UsageError(f"--cache: '{text}' is no share of the footprint", "write above 0% up to 100%: 2%,10%")
    return percent


def check_size(size_bytes: int) -> None:
    """UsageError for a cache that does not hold one block."""
    if size_bytes < BLOCK_BYTES:
        raise UsageError(
            f"--cache: {size_bytes} bytes are less than one block ({BLOCK_BYTES} bytes)",
            f"give at least {format_size(BLOCK_BYTES)}, such as 16M or 4Ki",
        )


def resolved(sizes: Sequence[CacheSize], footprint_blocks: int) -> list[int]:
    """Returns `sizes` in bytes for a trace of `footprint_blocks`, in their order, each once."""
    given = [size if isinstance(size, int) else size.size_bytes(footprint_blocks) for size in sizes]
    for size_bytes in given:
        check_size(size_bytes)
    return list(dict.fromkeys(given))


Progress = Callable[[str, int, int], None]
"""Told the trace, the rows times cells done of it, and how many there are. Called from several threads."""


@dataclass(frozen=True)
class Plan:
    """Every policy at every size, and what is to be modelled from their misses."""

    policies: tuple[str, ...]
    sizes: tuple[CacheSize, ...]
    model: FetchModel = field(default_factory=FetchModel)
    period_ns: int | None = None  # T: if given, stalls are metered in slices of it
    curves: bool = False  # whether the LRU curve of all sizes is wanted too

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
    policies = tuple(dict.fromkeys(_items("--policy", policy)))
    if unknown := [name for name in policies if name not in POLICIES]:
        raise UsageError(f"--policy: there is no policy '{unknown[0]}'", f"one or more of: {','.join(POLICIES)}")
    bandwidths = PAPER.storage_bandwidths
    if bw is not None:
        bandwidths = tuple(dict.fromkeys(parse_bandwidth("--bw", item) for item in _items("--bw", bw)))
    model = FetchModel(bandwidths, setup_ns=parse_time("--setup", setup, least=0), gpu_setup_ns=0)
    period_ns = None if t is None else parse_time("--t", t, least=1)
    return Plan(policies, parse_cache_sizes(cache), model, period_ns, mrc or (drawn and "lru" in policies))


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"{option}: nothing stands before or after a comma in '{text}'", "write: one,two,three")
    return items
