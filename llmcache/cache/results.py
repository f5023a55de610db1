"""The result of a simulation, with the field names of the JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from llmcache.cache.curves import Curve
from llmcache.cache.sizing import FetchModel
from llmcache.cache.stalls import Stalls
from llmcache.units import BLOCK_BYTES

SCHEMA = "llmcache.simulate/1"
CURVE_POINTS = 513  # per curve, in JSON and plots; each point is exact


@dataclass(frozen=True)
class FetchLatency:
    """Time to fetch all reads of a trace, with storage of `bw` bytes/s (modelled, see `FetchModel`)."""

    bw: int
    latency_s: float


@dataclass(frozen=True)
class Summary:
    """Size of one trace; counts in blocks, repeats included."""

    trace: str
    rows: int
    accesses: int
    reads: int
    writes: int
    footprint_blocks: int  # distinct blocks
    footprint_bytes: int
    tier: str
    lost_events: int
    cold_stalls: tuple[Stalls, ...]
    """With --t: the stalls of first references alone, which no cache avoids (modelled)."""


@dataclass(frozen=True)
class Result:
    """One trace with one policy at one size, in blocks of 4 KiB; latencies and stalls are modelled."""

    trace: str
    policy: str
    title: str
    cache_bytes: int  # as requested; the cache contains `cache_blocks`, the whole blocks in it
    cache_blocks: int
    accesses: int  # blocks referenced, reads and writes
    hits: int
    hit_ratio: float  # hits / accesses (0..1)
    byte_hit_ratio: float | None  # share (0..1) of the bytes read that did not come from storage; None without reads
    reads: int
    writes: int
    read_hits: int
    write_hits: int
    read_bytes: int  # bytes of the blocks referenced by reads
    write_bytes: int  # bytes of the blocks referenced by writes
    storage_read_bytes: int
    """Bytes of the reads that missed. A written block is replaced whole: its miss reads nothing, its hit saves no read."""
    evictions: int
    bw: int  # bandwidth of storage (bytes/s) for `latency_s`: the first of `latencies`
    latency_s: float
    latencies: tuple[FetchLatency, ...]
    stalls: tuple[Stalls, ...]  # one for each bandwidth, if T was given


@dataclass(frozen=True)
class TraceCurve:
    """The hits of all cache sizes on one trace."""

    trace: str
    curve: Curve


@dataclass(frozen=True)
class Simulation:
    """All rows of a simulation, by trace, policy and size, in the order of the plan."""

    model: FetchModel
    period_ns: int | None
    traces: tuple[Summary, ...]
    results: tuple[Result, ...]
    curves: tuple[TraceCurve, ...]

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": {"kind": "modelled", "source": "io_caching section 4.1", **dataclasses.asdict(self.model)},
            "period_s": None if self.period_ns is None else self.period_ns / 10**9,
            "traces": [dataclasses.asdict(summary) for summary in self.traces],
            "results": [dataclasses.asdict(result) for result in self.results],
            "curves": [_curve_values(item) for item in self.curves],
        }


def _curve_values(item: TraceCurve) -> dict[str, Any]:
    curve = item.curve.thinned(CURVE_POINTS)
    return {
        "trace": item.trace,
        "policy": curve.policy,
        "accesses": curve.accesses,
        "reads": curve.reads,
        "cache_bytes": (curve.sizes * BLOCK_BYTES).tolist(),
        "hits": curve.hits.tolist(),
        "read_hits": curve.read_hits.tolist(),
        "hit_ratio": curve.hit_ratio().tolist(),
    }


def merged(parts: Iterable[Simulation]) -> Simulation:
    """Return one simulation of all `parts`, which share one model; duplicates are removed."""
    pieces = list(parts)
    traces = {each.trace: each for piece in pieces for each in piece.traces}
    results = {(row.trace, row.policy, row.cache_bytes): row for piece in pieces for row in piece.results}
    curves = {each.trace: each for piece in pieces for each in piece.curves}
    return replace(pieces[0], traces=tuple(traces.values()), results=tuple(results.values()), curves=tuple(curves.values()))
