"""The sizes of `--cache`: bytes with a unit, shares of a trace's footprint, or ten shares of it (`auto`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from llmcache.cache.question import parse_size_with_unit
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size

AUTO_PERCENT = (2, 5, 10, 20, 30, 40, 50, 60, 80, 100)
"""The ten sizes of `auto`, in percent of the footprint."""


@dataclass(frozen=True)
class Share:
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


CacheSize = int | Share
"""Bytes, or a share of the footprint."""

AUTO: tuple[CacheSize, ...] = tuple(Share(Decimal(percent), at_least_one=True) for percent in AUTO_PERCENT)


def parse_cache_sizes(text: str) -> tuple[CacheSize, ...]:
    """The sizes meant by `text`: "16M,64Mi", "2%,10%" or "auto"; UsageError names --cache."""
    if text.strip().lower() == "auto":
        return AUTO
    return tuple(_size(item.strip()) for item in text.split(","))


def _size(text: str) -> CacheSize:
    if text.endswith("%"):
        return Share(_percent(text))
    if not text:
        raise UsageError("--cache: a size is missing beside a comma", "write sizes with commas between: 16M,64M")
    size_bytes = parse_size_with_unit("--cache", text)
    check_size(size_bytes)
    return size_bytes


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
