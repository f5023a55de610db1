"""io_caching recomputed, for programs: base units, what the paper says apart from what is ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmcache import __version__
from llmcache.cache.latency import FetchModel
from llmcache.report.claims import Judged
from llmcache.report.reproduce.io_caching.evidence import App, Evidence
from llmcache.report.reproduce.io_caching.overhead import REPEATS, Overhead
from llmcache.report.reproduce.io_caching.patterns import Patterns

SCHEMA = "llmcache.reproduce.io-caching/1"
PAPER = {
    "title": "Rethinking I/O Caching for Large Language Model Inference on Resource-Constrained Mobile Platforms",
    "authors": "H. Kim, J. Lee, H. Bahn",
    "published": "Mathematics 13(22), 3689, 2025",
    "doi": "10.3390/math13223689",
}
KINDS = {
    "figures 1 and 2": "computed: the detector's classes of synthetic traces",
    "figure 4": "modelled: replay of synthetic traces",
    "figure 5": "modelled: replay of synthetic traces, latency model of section 4.1",
    "figure 5, writes fetch too": "modelled: the same, as if writes fetched what they replace",
    "loops": "modelled: replay of a loop of 1000 blocks",
    "loops under LRU": "modelled: replay of a loop of 1000 blocks",
    "overhead": "measured on this machine",
    "hardware": "modelled: formula (1)",
}


def document(
    evidence: Evidence, patterns: Patterns, overhead: Overhead, claims: Mapping[str, Sequence[Judged]]
) -> dict[str, Any]:
    """Returns everything as JSON-ready values."""
    return {
        "schema": SCHEMA,
        "llmcache_version": __version__,
        "paper": PAPER,
        "traces": "synthetic, shaped after sections 3.1 and 3.2; the paper's own are not public",
        "latency_model": {"kind": "modelled", "source": "io_caching section 4.1", **dataclasses.asdict(FetchModel())},
        "cache_sizes_per_trace": {name: len(app.sizes_bytes) for name, app in evidence.apps.items()},
        "results": [row for app in evidence.apps.values() for row in _rows(app, evidence.bandwidths)],
        "classes": [{"trace": name, **dict(vars(found.totals))} for name, found in patterns.classes.items()],
        "overhead": {"kind": KINDS["overhead"], "repeats": REPEATS, **dataclasses.asdict(overhead)},
        "claims": [
            {"about": about, "kind": KINDS[about], **claim.as_json()} for about, judged in claims.items() for claim in judged
        ],
    }


def _rows(app: App, bandwidths: Sequence[int]) -> Iterator[dict[str, Any]]:
    for policy, ratios in app.hit_ratio.items():
        for place, (size, ratio) in enumerate(zip(app.sizes_bytes, ratios, strict=True)):
            yield {
                "trace": app.name,
                "inference": "remote" if app.remote else "on-device",
                "footprint_bytes": app.footprint_bytes,
                "accesses": app.accesses,
                "policy": policy,
                "cache_bytes": int(size),
                "hit_ratio": float(ratio),
                "latencies": [
                    {"bw": bandwidth, "latency_s": float(app.latency_s[policy][row, place])}
                    for row, bandwidth in enumerate(bandwidths)
                ],
            }
