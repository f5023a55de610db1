"""Tokens with their causes, and their sums."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcache.tokens.passes import Kind

SCHEMA = "llmcache.tokens/1"
SLOWEST = 10
_MOST_TIMES = 1 << 17  # of the last tokens, for the median and p99


@dataclass(frozen=True, slots=True)
class Token:
    """A pass over a model: a token, or a part of a prompt (`number` 0).

    `rows`: tokens of the batch; None if unknown. `experts_missed`: experts that a thread waited for; None if unknown or the
    model is dense. `slowest_layer_ns`: its part of the storage time.
    """

    pid: int
    model: str
    number: int
    kind: Kind
    start_ns: int
    compute_ns: int
    storage_ns: int
    other_ns: int
    wait_ns: int
    read_bytes: int
    major_faults: int
    rows: int | None = None
    experts_missed: int | None = None
    experts_used: int | None = None
    slowest_layer: str | None = None
    slowest_layer_ns: int = 0

    @property
    def time_ns(self) -> int:
        return self.compute_ns + self.storage_ns + self.other_ns

    def document(self) -> dict[str, Any]:
        shown = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {"schema": SCHEMA, **shown, "time_ns": self.time_ns}


@dataclass(frozen=True, slots=True)
class Interval:
    """Counters of an interval in which tokens cannot be seen, from /proc."""

    start_ns: int
    time_ns: int
    cpu_ns: int
    read_bytes: int
    major_faults: int

    def document(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "interval", **dataclasses.asdict(self)}


@dataclass(frozen=True)
class TokenSummary:
    """All tokens of an observation. Times in seconds; those of tokens are without idle time and without prompts.

    `storage_share`: of the time of tokens. `pressure`: shares of the observation in which some task of this machine waited
    for a resource. `overhead_s`: processor time of the observer, without the programs in the kernel.
    """

    tokens: int = 0
    seconds: float = 0.0
    observed_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    compute_share: float = 0.0
    storage_share: float = 0.0
    read_bytes: int = 0
    major_faults: int = 0
    experts_missed: int | None = None
    prefill_passes: int = 0
    prefill_s: float = 0.0
    prefill_tokens: int | None = None
    prefill_read_bytes: int = 0
    prefill_storage_share: float = 0.0
    slowest: tuple[Token, ...] = ()
    can_see_tokens: bool = False
    why_not: str | None = None
    pressure: Mapping[str, float] = field(default_factory=dict)
    lost_events: int = 0
    overhead_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def read_bytes_per_token(self) -> int:
        return self.read_bytes // self.tokens if self.tokens else 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s else None

    def document(self) -> dict[str, Any]:
        shown = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        more = {
            "tokens_per_s": self.tokens_per_s,
            "read_bytes_per_token": self.read_bytes_per_token,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "slowest": [token.document() for token in self.slowest],
        }
        return {"schema": SCHEMA, "kind": "summary", **shown, **more}


class Totals:
    """The sums of tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.prefill_passes = 0
        self._times: deque[int] = deque(maxlen=_MOST_TIMES)
        self._slowest: list[Token] = []
        self._sums: dict[tuple[Kind, str], int] = {}
        self._missed: int | None = None
        self._rows: int | None = 0

    def add(self, token: Token) -> None:
        for name in ("time_ns", "compute_ns", "storage_ns", "read_bytes", "major_faults"):
            key = token.kind, name
            self._sums[key] = self._sums.get(key, 0) + getattr(token, name)
        if token.kind == "prefill":
            self.prefill_passes += 1
            self._rows = None if token.rows is None or self._rows is None else self._rows + token.rows
            return
        self.tokens += 1
        self._times.append(token.time_ns)
        if token.experts_missed is not None:
            self._missed = (self._missed or 0) + token.experts_missed
        if len(self._slowest) < SLOWEST or token.time_ns > self._slowest[-1].time_ns:
            self._slowest = sorted([*self._slowest, token], key=lambda one: -one.time_ns)[:SLOWEST]

    def summary(self, **more: Any) -> TokenSummary:
        return TokenSummary(
            tokens=self.tokens,
            seconds=self._sum("decode", "time_ns") / 1e9,
            median_s=statistics.median(self._times) / 1e9 if self._times else 0.0,
            p99_s=quantile(self._times, 0.99) / 1e9,
            compute_share=self._share("decode", "compute_ns"),
            storage_share=self._share("decode", "storage_ns"),
            read_bytes=self._sum("decode", "read_bytes"),
            major_faults=self._sum("decode", "major_faults"),
            experts_missed=self._missed,
            prefill_passes=self.prefill_passes,
            prefill_s=self._sum("prefill", "time_ns") / 1e9,
            prefill_tokens=self._rows if self.prefill_passes else None,
            prefill_read_bytes=self._sum("prefill", "read_bytes"),
            prefill_storage_share=self._share("prefill", "storage_ns"),
            slowest=tuple(self._slowest),
            can_see_tokens=self.tokens + self.prefill_passes > 0,
            **more,
        )

    def _sum(self, kind: Kind, name: str) -> int:
        return self._sums.get((kind, name), 0)

    def _share(self, kind: Kind, name: str) -> float:
        total = self._sum(kind, "time_ns")
        return self._sum(kind, name) / total if total else 0.0


def quantile(values: Sequence[int] | deque[int], share: float) -> int:
    """Return the smallest value that is at least as large as `share` of all values; 0 without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0
