"""Recomputes io_caching: generates the traces, replays them, and judges the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from llmcache.cache.cachesizes import Share
from llmcache.cache.classify import classify
from llmcache.cache.results import Result
from llmcache.cache.simulate import simulate
from llmcache.report.claims import Judged, judge
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.io_caching import document, figure4, figure5, hardware, loops, overhead, page, patterns
from llmcache.report.reproduce.io_caching.evidence import NOTES, POLICIES, App, Evidence, writes_fetch_too
from llmcache.trace.record import Trace
from llmcache.trace.shapes import GROUPS, SHAPES

TITLES = {
    "ai_notes": "AI Notes",
    "ai_translate": "AI Translate",
    "text_embedder": "Text Embedder",
    "text_classification": "Text Classification",
    "copilot": "Copilot",
    "perplexity": "Perplexity",
    "claude": "Claude",
    "gemini": "Gemini",
}
STEPS, QUICK_STEPS = 100, 10
"""Cache sizes, evenly from one step to the whole footprint."""


@dataclass(frozen=True)
class Findings:
    """Everything recomputed; see `Reproduction`."""

    traces: dict[str, Trace]
    evidence: Evidence
    patterns: patterns.Patterns
    overhead: overhead.Overhead
    claims: dict[str, list[Judged]]

    @property
    def kinds(self) -> Mapping[str, str]:
        """See `Reproduction.kinds`."""
        return document.KINDS

    def document(self) -> dict[str, Any]:
        """See `Reproduction.document`."""
        return document.document(self.evidence, self.patterns, self.overhead, self.claims)

    def page(self) -> str:
        """See `Reproduction.page`."""
        return page.page(self.traces, self.evidence, self.patterns, self.overhead, self.claims)


def reproduce(quick: bool, progress: Progress) -> Findings:
    """Returns the paper recomputed. `quick`: at 10 cache sizes in place of 100."""
    traces: dict[str, Trace] = {}
    apps: dict[str, App] = {}
    bandwidths: tuple[int, ...] = ()
    steps = QUICK_STEPS if quick else STEPS
    for name, title in TITLES.items():
        progress(f"replaying {title}: {len(POLICIES)} policies at {steps} cache sizes")
        traces[name] = SHAPES[name]()
        results = simulate(traces[name], POLICIES, [Share(Decimal(100 * step) / steps) for step in range(1, steps + 1)])
        bandwidths = tuple(latency.bw for latency in results[0].latencies)
        apps[name] = app_of(name, title, results)
    evidence = Evidence(apps, bandwidths)
    progress("looking for loops")
    found = patterns.Patterns({name: classify([trace]) for name, trace in traces.items()}, GROUPS["remote"])
    progress("measuring the time per block of each policy")
    took = overhead.measured(traces[NOTES], TITLES[NOTES])
    in_loops = loops.replayed()
    claims = {
        "figures 1 and 2": judge(patterns.CLAIMS, found),
        "figure 4": judge(figure4.CLAIMS, evidence),
        "figure 5": judge(figure5.CLAIMS, evidence),
        "figure 5, writes fetch too": judge(figure5.CLAIMS, writes_fetch_too(evidence)),
        "loops": judge(loops.CLAIMS, in_loops),
        "loops under LRU": judge(loops.LRU_CLAIMS, in_loops),
        "overhead": judge(overhead.CLAIMS, took),
        "hardware": judge(hardware.CLAIMS, hardware.Hardware()),
    }
    return Findings(traces, evidence, found, took, claims)


def app_of(name: str, title: str, results: Sequence[Result]) -> App:
    """Returns the results of one trace, which has every policy at the same sizes in ascending order, as arrays."""
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    sizes = np.array([result.cache_bytes for result in next(iter(by_policy.values()))], float)
    return App(
        name=name,
        title=title,
        remote=name in GROUPS["remote"],
        footprint_bytes=int(sizes[-1]),
        accesses=results[0].accesses,
        sizes_bytes=sizes,
        hit_ratio={policy: np.array([row.hit_ratio for row in rows]) for policy, rows in by_policy.items()},
        latency_s={
            policy: np.array([[latency.latency_s for latency in row.latencies] for row in rows]).T
            for policy, rows in by_policy.items()
        },
    )
