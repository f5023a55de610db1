"""What is to be simulated on each trace, and how the options of `llmcache simulate` say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TypeVar

from llmcache.cache.latency import FetchModel, StallMeter
from llmcache.cache.policies import POLICIES
from llmcache.cache.sizing import PAPER
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size, parse_bandwidth, parse_duration, parse_size_with_unit

T = TypeVar("T")


@dataclass(frozen=True)
class FootprintShare:
    """A cache of `percent` of the distinct blocks that a trace touches, rounded down to blocks.

    `at_least_one` makes it one block where it would be none, as `auto` needs on the smallest traces.
    """

    percent: Decimal
    at_least_one: bool = False


CacheSize = int | FootprintShare  # bytes, or a share of the footprint

AUTO: tuple[CacheSize, ...] = tuple(
    FootprintShare(Decimal(percent), at_least_one=True) for percent in (2, 5, 10, 20, 30, 40, 50, 60, 80, 100)
)
"""Ten shares of the footprint."""


def resolved(sizes: Sequence[CacheSize], footprint_blocks: int) -> list[int]:
    """Returns `sizes` in bytes for a trace of `footprint_blocks`, each once; UsageError for a share of less than a block."""
    found: dict[int, None] = {}
    for size in sizes:
        if isinstance(size, int):
            found[size] = None
            continue
        blocks = int(footprint_blocks * size.percent / 100)
        if blocks < 1 and not size.at_least_one:
            raise UsageError(
                f"--cache: {size.percent}% of the {footprint_blocks} blocks that the trace accesses is less than one block",
                "give a larger share, or a size: 16M",
            )
        found[max(1, blocks) * BLOCK_BYTES] = None
    return list(found)


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
    policies = _parsed("--policy", policy, str)
    if unknown := [name for name in policies if name not in POLICIES]:
        raise UsageError(f"--policy: there is no policy '{unknown[0]}'", f"one or more of: {','.join(POLICIES)}")
    bandwidths = PAPER.storage_bandwidths if bw is None else _parsed("--bw", bw, parse_bandwidth)
    setup_ns = _named("--setup", setup, parse_duration)
    period_ns = None if t is None else _named("--t", t, parse_duration)
    if period_ns == 0:
        raise UsageError(f"--t: must be above 0, not '{t}'", "write seconds: 0.1, or 100ms")
    sizes = AUTO if cache.strip().lower() == "auto" else _parsed("--cache", cache, _cache_size)
    model = FetchModel(bandwidths, setup_ns=setup_ns, gpu_setup_ns=0)
    return Plan(policies, sizes, model, period_ns, mrc or (drawn and "lru" in policies))


def _cache_size(text: str) -> CacheSize:
    """The size meant by `text`: "16M" or "10%"."""
    if not text.endswith("%"):
        size_bytes = parse_size_with_unit(text)
        if size_bytes < BLOCK_BYTES:
            raise UsageError(
                f"'{text}' is less than one block ({BLOCK_BYTES} bytes)",
                f"give at least {format_size(BLOCK_BYTES)}, such as 16M or 4Ki",
            )
        return size_bytes
    try:
        percent = Decimal(text[:-1].strip())
    except InvalidOperation:
        percent = Decimal(0)
    if not percent.is_finite() or not 0 < percent <= 100:
        raise UsageError(f"'{text}' is not a share from above 0% to 100%", "write, for example: 2%,10%")
    return FootprintShare(percent)


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    """What the words of `text`, commas between them, mean, each once; errors name the option."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option}: '{text}' has an empty item", "separate items with single commas: one,two,three")
    return tuple(dict.fromkeys(_named(option, word, parse) for word in words))


def _named(option: str, text: str, parse: Callable[[str], T]) -> T:
    """`parse(text)`, its error telling of which option the text is."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error
