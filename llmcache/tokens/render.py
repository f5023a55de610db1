"""Tokens and their summary as text."""

from __future__ import annotations

from collections.abc import Iterator

from llmcache.tokens.summary import Interval, Token, TokenSummary
from llmcache.units import format_duration, format_percent, format_size

_CAUSES_HEADING = "    time compute storage   other    read  missed  slowest layer"
HEADING = f"   token batch{_CAUSES_HEADING}"
SLOWEST_HEADING = f" token{_CAUSES_HEADING}"  # narrow, for lines that begin with "llmcache: "
INTERVAL_HEADING = "interval      CPU      read  major faults"


def token_line(token: Token) -> str:
    """Return the row of a token below HEADING."""
    name = str(token.number) if token.kind == "decode" else "prefill"
    batch = "-" if token.rows is None else str(token.rows)
    return f"{name:>8}{batch:>6}{_causes(token)}"


def _causes(token: Token) -> str:
    times = "".join(f"{_seconds(ns):>8}" for ns in (token.time_ns, token.compute_ns, token.storage_ns, token.other_ns))
    return f"{times}{format_size(token.read_bytes):>8}{_missed(token):>8}  {_slowest(token)}"


def interval_line(interval: Interval) -> str:
    """Return the row of an interval below INTERVAL_HEADING."""
    times = f"{_seconds(interval.time_ns):>8}{_seconds(interval.cpu_ns):>9}"
    return f"{times}{format_size(interval.read_bytes):>10}{interval.major_faults:>14}"


def summary_lines(summary: TokenSummary) -> Iterator[str]:
    """Yield the summary for people."""
    if not summary.can_see_tokens:
        yield f"no tokens were seen: {summary.why_not or 'the process computed none'}"
        return
    if summary.tokens:
        tokens = "1 token" if summary.tokens == 1 else f"{summary.tokens} tokens"
        yield (
            f"{tokens} in {_duration(summary.seconds)}: {summary.tokens_per_s:.3g} tokens/s, "
            f"median {_duration(summary.median_s)}, p99 {_duration(summary.p99_s)}"
        )
        yield (
            f"waiting for storage {format_percent(summary.storage_share, 0)}, "
            f"computing {format_percent(summary.compute_share, 0)}; "
            f"{format_size(summary.read_bytes_per_token)} read per token"
        )
    if summary.prefill_passes:
        speed = "" if summary.prefill_tokens_per_s is None else f": {summary.prefill_tokens_per_s:.3g} tokens/s"
        tokens = "" if summary.prefill_tokens is None else f"{summary.prefill_tokens} tokens in "
        passes = "1 pass" if summary.prefill_passes == 1 else f"{summary.prefill_passes} passes"
        yield f"prefill: {tokens}{passes}, {_duration(summary.prefill_s)}{speed}"
        waiting = format_percent(summary.prefill_storage_share, 0)
        yield f"prefill: waiting for storage {waiting}; {format_size(summary.prefill_read_bytes)} read"
    if summary.pressure:
        shares = ", ".join(f"{name} {format_percent(share, 0)}" for name, share in summary.pressure.items())
        yield f"pressure on this machine: {shares} of the time"
    if summary.slowest:
        yield "slowest tokens:"
        yield SLOWEST_HEADING
        yield from (f"{token.number:>6}{_causes(token)}" for token in summary.slowest)
    if summary.lost_events:
        yield f"{summary.lost_events} events of the kernel were lost: some causes are missing"
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
    of = f"/{token.experts_used}" if token.experts_used and token.kind == "decode" else ""
    return f"{token.experts_missed}{of}"


def _slowest(token: Token) -> str:
    if token.slowest_layer is None:
        return "-"
    return f"{token.slowest_layer} ({format_duration(token.slowest_layer_ns)})"
