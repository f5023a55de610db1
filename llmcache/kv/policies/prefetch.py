"""Prefetch: the host scores all keys by part of their channels, one layer ahead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.kv.importance.hie import HierarchicalEvaluation
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Timeline
from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.policies.settings import PolicySettings, check
from llmcache.kv.tiers import KvStore, Selection


@dataclass(frozen=True)
class PrefetchSettings(PolicySettings):
    """`channels`: the share of the channels of a query that take part in the score, those with the largest numbers."""

    channels: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.channels <= 1, "channels", self.channels, "it is a share of the channels: above 0, at most 1")


class Prefetch(KvPolicy):
    """InfiniGen-like: the host scores the keys of the next layer by an estimate of its queries, and fetches the best.

    Looking ahead is the engine's (`app`). Keys that are only on the ssd come over the link to be scored: host and ssd
    take turns, as there is nothing near the data.

    Source: hillinfer.txt, section 4.2, baseline (3); Lee et al., InfiniGen, OSDI 2024, sections 4.2 and 4.3. Differs from
    InfiniGen: weights are not skewed offline, so that few channels do not stand for all (hence `channels` 1 unless asked
    for); keys are read whole, whatever share of them is used; the number of chosen tokens is the budget, not what lies
    within a margin of the best score.
    """

    name = "prefetch"
    title = "Prefetch-based"
    ahead = True
    settings_class = PrefetchSettings

    def __init__(self, store: KvStore, settings: PolicySettings | None = None, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(store, settings, timeline)
        n, combine = self.settings.score_block_tokens, self.settings.combine
        self._evaluation = HierarchicalEvaluation(store, n, combine, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens whose keys fit the chosen channels of the queries best."""
        assert isinstance(self.settings, PrefetchSettings)
        self._evaluation.timeline = self.timeline
        partial = largest_channels(queries, self.settings.channels)
        return Selection(self._evaluation.important(layer, partial, tokens, self.first))


def largest_channels(queries: Floats, share: float) -> Floats:
    """Returns `queries` [batch, heads, dim] with all but the largest `share` of each query's channels set to 0."""
    dim = queries.shape[2]
    kept = max(1, round(share * dim))
    if kept >= dim:
        return queries
    bounds = np.partition(np.abs(queries), dim - kept, axis=2)[..., dim - kept, None]
    partial: Floats = np.where(np.abs(queries) >= bounds, queries, np.float32(0))
    return partial
