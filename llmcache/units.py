"""Sizes, rates and durations: text to base units (bytes, bytes/s, nanoseconds) and back; blocks and pages.

`70M` is 70e6 and `70Mi` is 70 * 2**20; a trailing `B` is ignored. Parsers raise `UsageError` with the invalid value.
"""

from __future__ import annotations

import mmap
import re
from decimal import Decimal, InvalidOperation

from llmcache.errors import UsageError

BLOCK_BYTES = 4096
"""The unit of traces, caches, storage transfers and mounts (io_caching, 3 and 4.1), independent of the page size."""
PAGE_BYTES = mmap.PAGESIZE
"""The page size of this machine: 4096; 16384 or 65536 on some arm64 kernels."""
_PREFIXES = "KMGTPE"
_FACTORS = {"": 1}
_FACTORS |= {letter.lower(): 1000 ** (power + 1) for power, letter in enumerate(_PREFIXES)}
_FACTORS |= {letter.lower() + "i": 1024 ** (power + 1) for power, letter in enumerate(_PREFIXES)}

# Digits are limited so that a mistyped value cannot become a number of a million digits.
_DIGITS = r"([0-9]{1,19}(?:\.[0-9]{1,19})?)"
_SIZE = re.compile(_DIGITS + r"\s*([kmgtpe]i?|)b?", re.IGNORECASE)
_TOKENS = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,6})?)\s*(k|m|)i?", re.IGNORECASE)
_DURATION_PART = re.compile(_DIGITS + r"\s*(ns|us|µs|ms|s|min|m|h|d|)\s*")

_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "": 10**9,
    "m": 60 * 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
_LARGEST = 2**63 - 1


def parse_size(text: str) -> int:
    """Return the bytes in `text`, such as "1.5Gi"."""
    return _parse_bytes(
        text, "size", "give bytes, or a number with K, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (powers of 1024): 700M"
    )


def parse_rate(text: str) -> int:
    """Return the bytes per second in `text`, such as "500MB/s"."""
    bare = re.sub(r"\s*/\s*s(ec)?$", "", text.strip(), flags=re.IGNORECASE)
    return _parse_bytes(bare, "rate", "give bytes per second, for example 500M, 500MB/s or 2Gi/s", shown=text)


def parse_tokens(text: str) -> int:
    """Return the number of tokens in `text`, at least 1; k is 1024, as in context sizes."""
    match = _TOKENS.fullmatch(text.strip())
    tokens = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if tokens < 1 or tokens != int(tokens) or tokens > 1 << 31:
        raise UsageError(f"'{text}' is not a number of tokens", "give a number, for example 8192, 128k (131,072) or 1M")
    return int(tokens)


def parse_bandwidth(text: str) -> int:
    """Return the bytes per second in `text`; a number without a unit is in MB/s, as in the buffer-cache paper."""
    number = _number(text)
    rate = int(number * 10**6) if number is not None else parse_rate(text)
    if not 1 <= rate <= _LARGEST:
        raise UsageError(f"'{text}' is not a bandwidth: it must be above 0", "give MB/s, for example 100, 100MB/s or 1GB/s")
    return rate


def parse_size_with_unit(text: str) -> int:
    """Return the bytes in `text`, which needs a unit unless it is 0, because 70 could mean bytes or MB."""
    if _number(text):
        raise UsageError(f"'{text}' has no unit", f"give {text.strip()}M, {text.strip()}Mi or {text.strip()}B")
    return parse_size(text)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 30 else None


def _parse_bytes(text: str, kind: str, hint: str, shown: str | None = None) -> int:
    shown = text if shown is None else shown
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{shown}' is not a {kind}", hint)
    value = Decimal(match[1]) * _FACTORS[match[2].lower()]
    if not match[2] and value != int(value):
        raise UsageError(f"'{shown}' is not a whole number of bytes", hint)
    if value > _LARGEST:
        raise UsageError(f"'{shown}' is too large for a {kind}", hint)
    return int(value)


def parse_duration(text: str) -> int:
    """Return the nanoseconds in `text`, such as "1m30s"; a number without a unit is in seconds."""
    hint = "give a number with ns, us, ms, s, m, h or d, for example 250ms, 2s or 1m30s"
    stripped, position, total = text.strip(), 0, Decimal(0)
    while match := _DURATION_PART.match(stripped, position):
        # Only a single number may lack a unit: "1m30" would be ambiguous.
        if not match[2] and match[0] != stripped:
            break
        total += Decimal(match[1]) * _NANOSECONDS[match[2]]
        position = match.end()
    if not stripped or position != len(stripped):
        raise UsageError(f"'{text}' is not a duration", hint)
    if total > _LARGEST:
        raise UsageError(f"'{text}' is too large for a duration", hint)
    return int(total)


def format_size(size_bytes: float) -> str:
    """Return the size with three digits: "1.50 GB"."""
    sign, value = ("-" if size_bytes < 0 else ""), abs(size_bytes)
    if value < 1000:
        return f"{sign}{value:.0f} B" if round(value) < 1000 else f"{sign}1.00 KB"
    for prefix in _PREFIXES:
        value /= 1000
        if float(f"{value:.3g}") < 1000 or prefix == _PREFIXES[-1]:
            return f"{sign}{_three_digits(value)} {prefix}B"
    raise AssertionError("unreachable: the last prefix always returns")


def format_rate(bytes_per_s: float) -> str:
    """Return the rate: "500 MB/s"."""
    return format_size(bytes_per_s) + "/s"


def format_duration(duration_ns: float) -> str:
    """Return the duration with three digits: "470 ms", "2 min 5 s"."""
    if duration_ns < 0:
        return "-" + format_duration(-duration_ns)
    for unit, factor in (("ns", 1), ("µs", 10**3), ("ms", 10**6)):
        if float(f"{duration_ns / factor:.3g}") < 1000:
            return f"{_three_digits(duration_ns / factor) if factor > 1 else f'{duration_ns:.0f}'} {unit}"
    if duration_ns < 59_950_000_000:
        return f"{_three_digits(duration_ns / 10**9)} s"
    minutes, seconds = divmod(round(duration_ns / 10**9), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def format_percent(ratio: float | None, digits: int = 1) -> str:
    """Return `ratio` (0..1) as "12.5 %"; "-" for None."""
    return "-" if ratio is None else f"{100 * ratio:.{digits}f} %"


def _three_digits(value: float) -> str:
    for digits, limit in ((2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def shortened(text: str, letters: int) -> str:
    """Return `text` in at most `letters`, with … in the middle if needed; the end gets more, as for paths."""
    if len(text) <= letters:
        return text
    end = max(0, letters - 1) * 2 // 3
    return f"{text[: max(0, letters - 1 - end)]}…{text[len(text) - end :]}"
