"""The plan of a simulation, and its construction from the options of `llmcache simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TypeVar

from llmcache.cache.policies import POLICIES
from llmcache.cache.sizing import FetchModel
from llmcache.cache.stalls import StallMeter
from llmcache.errors import UsageError
from llmcache.trace.record import Provenance
from llmcache.units import BLOCK_BYTES, format_size, parse_bandwidth, parse_duration, parse_size_with_unit

T = TypeVar("T")


@dataclass(frozen=True)
class FootprintShare:
    """A cache of `percent` of the distinct blocks in a trace, rounded down, or up to one with `at_least_one`."""

    percent: Decimal
    at_least_one: bool = False


CacheSize = int | FootprintShare  # bytes, or a share of the footprint

AUTO: tuple[CacheSize, ...] = tuple(
    FootprintShare(Decimal(percent), at_least_one=True) for percent in (2, 5, 10, 20, 30, 40, 50, 60, 80, 100)
)
"""Ten shares of the footprint."""


def resolved(sizes: Sequence[CacheSize], footprint_blocks: int) -> list[int]:
    """Return distinct `sizes` in bytes; UsageError for a share of less than one block."""
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
"""Called with the trace, its completed rows times cells, and their total number; from several threads."""


@dataclass(frozen=True)
class Plan:
    """Every policy at every size, and the model for their misses."""

    policies: tuple[str, ...]
    sizes: tuple[CacheSize, ...]
    model: FetchModel = field(default_factory=FetchModel)
    period_ns: int | None = None  # T: if given, stalls are measured in slices of it
    curves: bool = False  # also compute the LRU curve of all sizes

    def meter(self) -> StallMeter | None:
        return None if self.period_ns is None else StallMeter(self.period_ns, self.model.storage_bandwidths)


def plan_of(
    policy: str, cache: str, bw: str | None, t: str | None, mrc: bool, setup: str = "0", drawn: bool = False
) -> Plan:
    """Return the plan for these options; UsageError names the invalid option. `drawn`: include the curve of LRU.

    Differs from the paper: storage delivers its full bandwidth unless `setup` adds a time to each missed block, because
    blocks missed in sequence are read together. The 2 us of each 1 KiB request to the GPU are omitted as well.
    """
    policies = _parsed("--policy", policy, str)
    if unknown := [name for name in policies if name not in POLICIES]:
        raise UsageError(f"--policy: there is no policy '{unknown[0]}'", f"one or more of: {','.join(POLICIES)}")
    bandwidths = FetchModel.storage_bandwidths if bw is None else _parsed("--bw", bw, parse_bandwidth)
    setup_ns = _named("--setup", setup, parse_duration)
    period_ns = None if t is None else _named("--t", t, parse_duration)
    if period_ns == 0:
        raise UsageError(f"--t: must be above 0, not '{t}'", "write seconds: 0.1, or 100ms")
    sizes = AUTO if cache.strip().lower() == "auto" else _parsed("--cache", cache, _cache_size)
    model = FetchModel(bandwidths, setup_ns=setup_ns, gpu_setup_ns=0)
    return Plan(policies, sizes, model, period_ns, mrc or (drawn and "lru" in policies))


def _cache_size(text: str) -> CacheSize:
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
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option}: '{text}' has an empty item", "separate items with single commas: one,two,three")
    return tuple(dict.fromkeys(_named(option, word, parse) for word in words))


def _named(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error


UNSEEN = "unseen"
"""Key of `Provenance.extra`: accesses that the source of the trace could not see, in words."""
GAPS = {
    "mapped_ranges": "files were mapped, and accesses to mapped pages are not recorded",
    "accesses_of_unknown_files": "accesses to files that the log does not name are missing from the trace",
    "guessed_offsets": "the offsets of some accesses are guesses",
}
"""Keys of `Provenance.extra` that count gaps found by an importer."""


def why_not_exact(provenance: Provenance) -> str | None:
    """Return why Belady on a trace of this origin would be no upper bound, or None if it is exact."""
    if provenance.lost_events:
        return f"lost_events is {provenance.lost_events}: accesses are missing from the trace"
    if UNSEEN in provenance.extra:
        return f"{UNSEEN}: {provenance.extra[UNSEEN]}"
    for name, meaning in GAPS.items():
        if name in provenance.extra:
            return f"{name} is {provenance.extra[name]}: {meaning}"
    return None
