"""Small made-up results in which every claim of io_caching can be said to hold or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmcache.report.claims import Claim, Data, Verdict
from llmcache.report.reproduce.io_caching.evidence import ON_DEVICE, App, Evidence

BANDWIDTHS = (100_000_000, 200_000_000, 500_000_000, 1_000_000_000)
Ratios = Sequence[float]


def app(name: str, hits: Mapping[str, Ratios], latency: Sequence[Ratios] = ()) -> App:
    """An application of 1000 accesses whose caches are 1, 2, … MB; `latency`: rows by bandwidth, for every policy."""
    sizes = np.arange(1, 1 + len(next(iter([*hits.values(), *latency])))).astype(np.float64) * 1e6
    latencies = {policy: np.array(latency, float) for policy in ("algorithm1", "llmcache")}
    ratios = {policy: np.array(values, float) for policy, values in hits.items()}
    return App(name, name.title(), False, int(sizes[-1]), 1000, sizes, ratios, latencies)


def ratios(hits: Mapping[str, Ratios], **other: Mapping[str, Ratios]) -> Evidence:
    """Evidence in which every application has `hits` (policy to hit ratios), but those named in `other`."""
    return Evidence({name: app(name, other.get(name, hits)) for name in ON_DEVICE}, BANDWIDTHS)


def latencies(rows: Sequence[Ratios], **other: Sequence[Ratios]) -> Evidence:
    """Evidence in which every application has the latencies `rows`, but those named in `other`."""
    return Evidence({name: app(name, {}, other.get(name, rows)) for name in ON_DEVICE}, BANDWIDTHS)


def verdict(claims: Sequence[Claim[Data]], name: str, data: Data, variant: str = "llmcache") -> Verdict:
    """What the claim called `name` says of `data`."""
    (claim,) = (claim for claim in claims if claim.name == name)
    return claim.check(data, variant).verdict
