"""From the options of `llmcache size`, as typed, to what is asked; every error names its option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from llmcache.cache.constants import DEVICES, PAPER, DeviceClass
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size, parse_duration, parse_rate, parse_size

_MB = 10**6
_MOST_TOKENS_PER_S = 10**9  # T has at least a nanosecond


@dataclass(frozen=True)
class Options:
    """The options as typed; None where one was not given."""

    bw: str | None = None
    loop: str | None = None
    cache: str | None = None
    t: str | None = None
    hot: str | None = None
    device: str | None = None
    model: str | None = None
    measure: str | None = None
    tokens_per_second: str | None = None
    ram: str | None = None


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


def ask(options: Options) -> Question:
    """The question that `options` put; UsageError names the option that is missing, wrong or contradicted."""
    _refuse_pairs(options)
    device = None if options.device is None else _device(options.device)
    caches = _caches(options.cache, device)
    if options.loop is None and options.model is None and not caches:
        raise UsageError(
            "--loop, --model and --cache are all missing: there is nothing to size",
            "give the loop (--loop 70M or --model FILE), the cache (--cache 64M), or both",
        )
    if options.ram is not None and options.loop is None and options.model is None:
        raise UsageError("--ram: what is to run in it?", "give the loop (--loop 70M), or --model FILE")
    hot_bytes = _size("--hot", options.hot, least=0)
    if hot_bytes is None and device is not None and options.model is None:
        hot_bytes = device.hot_bytes
    from_device = options.bw is None and options.measure is None
    return Question(
        bandwidth=_bandwidth(options, device),
        measure=options.measure,
        loop_bytes=_size("--loop", options.loop, least=1),
        model=options.model,
        caches=caches,
        hot_bytes=hot_bytes,
        period_ns=_period_ns(options),
        device=device,
        from_device=from_device,
        period_source="assumed" if options.t is None and options.tokens_per_second is None else "given",
        ram_bytes=_size("--ram", options.ram, least=BLOCK_BYTES),
    )


def _refuse_pairs(options: Options) -> None:
    pairs = (
        ("--loop", options.loop, "--model", options.model, "the model says how long its loop is"),
        ("--bw", options.bw, "--measure", options.measure, "the measurement gives the bandwidth"),
        ("--t", options.t, "--tokens-per-second", options.tokens_per_second, "T is 1 / tokens per second"),
    )
    for first, one, second, other, why in pairs:
        if one is not None and other is not None:
            raise UsageError(f"{first} and {second} contradict each other: {why}", f"leave out {first} or {second}")


def _device(name: str) -> DeviceClass:
    if name not in DEVICES:
        raise UsageError(f"--device: there is no class '{name}'", f"one of: {', '.join(DEVICES)}")
    return DEVICES[name]


def _caches(text: str | None, device: DeviceClass | None) -> tuple[int, ...]:
    given = _size("--cache", text, least=BLOCK_BYTES)
    if given is not None:
        return (given,)
    return tuple(sorted({device.least_cache_bytes, device.cache_bytes})) if device is not None else ()


def _bandwidth(options: Options, device: DeviceClass | None) -> int | None:
    if options.measure is not None:
        return None
    if options.bw is not None:
        return parse_bandwidth("--bw", options.bw)
    if device is None:
        raise UsageError(
            "--bw is missing: how fast is the storage?",
            "--bw 100 (MB/s), --bw 1GB/s, --measure DIR, or --device " + "|".join(DEVICES),
        )
    return device.bandwidth


def parse_bandwidth(option: str, text: str) -> int:
    """Bytes per second meant by `text`; a number without a unit counts MB/s, as in the paper."""
    number = _decimal(text)
    rate = int(number * _MB) if number is not None else _named(option, parse_rate, text)
    if not 1 <= rate < 2**63:
        raise UsageError(f"{option}: '{text}' is no bandwidth: it must be above 0", "write MB/s: 100, or 100MB/s, 1GB/s")
    return rate


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


def _period_ns(options: Options) -> int:
    if options.tokens_per_second is not None:
        rate = _decimal(options.tokens_per_second)
        if rate is None or not 0 < rate <= _MOST_TOKENS_PER_S:
            raise UsageError(
                f"--tokens-per-second: '{options.tokens_per_second}' is not a rate above 0", "write a number: 10 or 2.5"
            )
        return int(10**9 / rate)
    if options.t is None:
        return PAPER.period_ns
    period_ns = _named("--t", parse_duration, options.t)
    if period_ns < 1:
        raise UsageError(f"--t: '{options.t}' must be above 0", "write seconds: 0.1, or 100ms")
    return period_ns


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
