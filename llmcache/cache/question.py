"""From the options of `llmcache size`, as typed, to what is asked; every error names its option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from llmcache.cache.sizing import DEVICES, PAPER, DeviceClass
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size, parse_duration, parse_rate, parse_size


@dataclass(frozen=True)
class Question:
    """What is asked, in base units. Exactly one of `bandwidth` and `measure` is set, at most one of loop and model.

    `period_source`: T is given, or assumed. `ram_bytes` is None where this machine's memory is meant, if any.
    `hot_bytes` is None where the model, or else the paper's default, decides. `from_device`: the bandwidth is a class's.
    """

    bandwidth: int | None
    measure: str | None
    loop_bytes: int | None
    model: str | None
    caches: tuple[int, ...]
    hot_bytes: int | None
    period_ns: int
    device: DeviceClass | None
    from_device: bool
    period_source: str
    ram_bytes: int | None


def ask(
    *,
    bw: str | None = None,
    loop: str | None = None,
    cache: str | None = None,
    t: str | None = None,
    hot: str | None = None,
    device: str | None = None,
    model: str | None = None,
    measure: str | None = None,
    tokens_per_second: str | None = None,
    ram: str | None = None,
) -> Question:
    """The question that the options, as typed, put; UsageError names the one that is missing, wrong or contradicted."""
    for first, one, second, other, why in (
        ("--loop", loop, "--model", model, "the model says how long its loop is"),
        ("--bw", bw, "--measure", measure, "the measurement gives the bandwidth"),
        ("--t", t, "--tokens-per-second", tokens_per_second, "T is 1 / tokens per second"),
    ):
        if one is not None and other is not None:
            raise UsageError(f"{first} and {second} contradict each other: {why}", f"leave out {first} or {second}")
    if device is not None and device not in DEVICES:
        raise UsageError(f"--device: there is no class '{device}'", f"one of: {', '.join(DEVICES)}")
    of = None if device is None else DEVICES[device]
    size_bytes = _size("--cache", cache, least=BLOCK_BYTES)
    caches = () if of is None else tuple(sorted({of.least_cache_bytes, of.cache_bytes}))
    caches = caches if size_bytes is None else (size_bytes,)
    if loop is None and model is None and not caches:
        raise UsageError(
            "--loop, --model and --cache are all missing: there is nothing to size",
            "give the loop (--loop 70M or --model FILE), the cache (--cache 64M), or both",
        )
    if ram is not None and loop is None and model is None:
        raise UsageError("--ram: what is to run in it?", "give the loop (--loop 70M), or --model FILE")
    hot_bytes = _size("--hot", hot, least=0)
    if hot_bytes is None and of is not None and model is None:
        hot_bytes = of.hot_bytes
    if bw is None and measure is None and of is None:
        raise UsageError(
            "--bw is missing: how fast is the storage?",
            "--bw 100 (MB/s), --bw 1GB/s, --measure DIR, or --device " + "|".join(DEVICES),
        )
    from_device = bw is None and measure is None
    if of is not None and from_device:
        bandwidth: int | None = of.bandwidth
    else:
        bandwidth = None if bw is None else parse_bandwidth("--bw", bw)
    loop_bytes = _size("--loop", loop, least=1)
    if tokens_per_second is not None:
        rate = _decimal(tokens_per_second)
        if rate is None or not 0 < rate <= 10**9:  # T has at least a nanosecond
            raise UsageError(
                f"--tokens-per-second: '{tokens_per_second}' is not a rate above 0", "write a number: 10 or 2.5"
            )
        period_ns = int(10**9 / rate)
    else:
        period_ns = PAPER.period_ns if t is None else parse_time("--t", t, least=1)
    return Question(
        bandwidth=bandwidth,
        measure=measure,
        loop_bytes=loop_bytes,
        model=model,
        caches=caches,
        hot_bytes=hot_bytes,
        period_ns=period_ns,
        device=of,
        from_device=from_device,
        period_source="assumed" if t is None and tokens_per_second is None else "given",
        ram_bytes=_size("--ram", ram, least=BLOCK_BYTES),
    )


def parse_bandwidth(option: str, text: str) -> int:
    """Bytes per second meant by `text`; a number without a unit counts MB/s, as in the paper."""
    number = _decimal(text)
    rate = int(number * 10**6) if number is not None else _named(option, parse_rate, text)
    if not 1 <= rate < 2**63:
        raise UsageError(f"{option}: '{text}' is no bandwidth: it must be above 0", "write MB/s: 100, or 100MB/s, 1GB/s")
    return rate


def parse_time(option: str, text: str, least: int) -> int:
    """Nanoseconds meant by `text`, at least `least`: 0 or 1."""
    duration_ns = _named(option, parse_duration, text)
    if duration_ns < least:
        raise UsageError(f"{option}: '{text}' must be above 0", "write seconds: 0.1, or 100ms")
    return duration_ns


def parse_size_with_unit(option: str, text: str) -> int:
    """Bytes meant by `text`, which must name its unit (only 0 needs none): 70 could be bytes or MB."""
    number = _decimal(text)
    if number is not None and number != 0:
        raise UsageError(f"{option}: '{text}' has no unit", f"write {text.strip()}M, {text.strip()}Mi or {text.strip()}B")
    return _named(option, parse_size, text)


def _size(option: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    size = parse_size_with_unit(option, text)
    if size < least:
        wanted = "must be above 0" if least == 1 else f"is less than one block ({format_size(least)})"
        raise UsageError(f"{option}: '{text}' {wanted}", "write a size with its unit: 70M, 512Mi")
    return size


def _decimal(text: str) -> Decimal | None:
    """The number that `text` is, finite and of bearable length; None if it is something else, such as one with a unit."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 30 else None


def _named(option: str, parse: Callable[[str], int], text: str) -> int:
    """`parse(text)`, its error telling of which option the text is."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error
