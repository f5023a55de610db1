"""Tokens and their summary as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmcache.tokens.summary import Interval, Token, TokenSummary
from llmcache.units import format_duration, format_percent, format_size

HEADING = "   token     time  compute  storage    other      read  experts missed  slowest layer"
INTERVAL_HEADING = "interval      CPU      read  major faults"


def token_line(token: Token) -> str:
    """Return the row of a token below HEADING."""
    name = str(token.number) if token.kind == "decode" else "prefill"
    times = "".join(f"{_seconds(ns):>9}" for ns in (token.time_ns, token.compute_ns, token.storage_ns, token.other_ns))
    rows = f"  ({token.rows} tokens)" if token.rows is not None and token.rows > 1 else ""
    return f"{name:>8}{times}{format_size(token.read_bytes):>10}{_missed(token):>16}  {_slowest(token)}{rows}"


def interval_line(interval: Interval) -> str:
    """Return the row of an interval below INTERVAL_HEADING."""
    times = f"{_seconds(interval.time_ns):>8}{_seconds(interval.cpu_ns):>9}"
    return f"{times}{format_size(interval.read_bytes):>10}{interval.major_faults:>14}"


def summary_lines(summary: TokenSummary) -> Iterator[str]:
    """Yield the summary for people."""
    if not summary.can_see_tokens:
        yield f"no tokens were seen: {summary.why_not or 'the process has computed none'}"
        return
    if summary.tokens:
        tokens = "1 token" if summary.tokens == 1 else f"{summary.tokens} tokens"
        yield (
            f"{tokens} in {_duration(summary.seconds)}: {summary.tokens_per_s:.3g} tokens/s, "
            f"median {_duration(summary.median_s)}, p99 {_duration(summary.p99_s)}"
        )
        yield (
            f"{format_percent(summary.storage_share, 0)} of the time waiting for storage, "
            f"{format_percent(summary.compute_share, 0)} computing; "
            f"{format_size(summary.read_bytes_per_token)} read per token"
        )
    if summary.prefill_passes:
        speed = "" if summary.prefill_tokens_per_s is None else f": {summary.prefill_tokens_per_s:.3g} tokens/s"
        tokens = "" if summary.prefill_tokens is None else f"{summary.prefill_tokens} tokens in "
        passes = "1 pass" if summary.prefill_passes == 1 else f"{summary.prefill_passes} passes"
        yield (
            f"prefill: {tokens}{passes}, {_duration(summary.prefill_s)}{speed}, "
            f"{format_percent(summary.prefill_storage_share, 0)} of the time waiting for storage, "
            f"{format_size(summary.prefill_read_bytes)} read"
        )
    if summary.pressure:
        shares = ", ".join(f"{name} {format_percent(share, 0)}" for name, share in summary.pressure.items())
        yield f"pressure on this machine (some task waited): {shares}"
    if summary.slowest:
        yield "slowest tokens:"
        yield HEADING
        yield from map(token_line, summary.slowest)
    if summary.lost_events:
        yield f"{summary.lost_events} reports of the kernel were lost: some causes are missing"
    if summary.observed_s:
        yield f"observing took {format_percent(summary.overhead_s / summary.observed_s)} of a core"


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _duration(seconds: float) -> str:
    return format_duration(seconds * 1e9)


def _missed(token: Token) -> str:
    if token.experts_missed is None:
        return "-"
    of = f" of {token.experts_used}" if token.experts_used and token.kind == "decode" else ""
    return f"{token.experts_missed}{of}"


def _slowest(token: Token) -> str:
    if token.slowest_layer is None:
        return "-"
    return f"{token.slowest_layer} ({format_duration(token.slowest_layer_ns)})"
