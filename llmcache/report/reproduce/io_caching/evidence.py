"""What the claims of io_caching are judged by: hit ratios and latencies of each application, policy and cache size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.latency import FetchModel

Values = NDArray[np.float64]

AWARE = ("algorithm1", "llmcache")
"""The two policies that stand for the paper's "LLM-aware": its pseudocode as printed, and ours."""
BASELINES = ("lru", "lecar")
BOUND = "belady"
POLICIES = (*BASELINES, *AWARE, BOUND)

NOTES, TRANSLATE, EMBEDDER, CLASSIFICATION = "ai_notes", "ai_translate", "text_embedder", "text_classification"
ON_DEVICE = (NOTES, TRANSLATE, EMBEDDER, CLASSIFICATION)


@dataclass(frozen=True)
class App:
    """An application's results. All arrays go by cache size (`sizes_bytes`, ascending).

    `hit_ratio`: policy -> (sizes), 0..1. `latency_s`: policy -> (bandwidths x sizes), modelled seconds for the whole
    trace. `remote`: inference happens on a server.
    """

    name: str
    title: str
    remote: bool
    footprint_bytes: int
    accesses: int
    sizes_bytes: Values
    hit_ratio: Mapping[str, Values]
    latency_s: Mapping[str, Values]

    def at(self, index: int) -> str:
        """Returns the size at `index` in words: bytes, and its share of the footprint."""
        size = float(self.sizes_bytes[index])
        return f"{size / 1e6:.3g} MB ({size / self.footprint_bytes:.0%} of the footprint)"


@dataclass(frozen=True)
class Evidence:
    """All applications by name, and the bandwidths (bytes/s, ascending) of their latencies."""

    apps: Mapping[str, App]
    bandwidths: tuple[int, ...]

    def on_device(self, names: Sequence[str] = ON_DEVICE) -> list[App]:
        """Returns the applications called `names`, in this order."""
        return [self.apps[name] for name in names]


def writes_fetch_too(evidence: Evidence) -> Evidence:
    """Returns `evidence` with latencies (modelled) as if a write fetched what it replaces, and went to the GPU as well.

    The paper does not say which it counts, and writes prevail in two of its applications: both readings are judged.
    """
    model = FetchModel(storage_bandwidths=evidence.bandwidths)

    def of_all(app: App, ratios: Values) -> Values:
        missed = [round(app.accesses * (1 - float(ratio))) for ratio in ratios]
        return np.array([[model.latency_s(app.accesses, blocks, bw) for blocks in missed] for bw in evidence.bandwidths])

    apps = {
        name: replace(app, latency_s={policy: of_all(app, ratios) for policy, ratios in app.hit_ratio.items()})
        for name, app in evidence.apps.items()
    }
    return replace(evidence, apps=apps)
