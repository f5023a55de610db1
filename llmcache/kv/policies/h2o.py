"""H2O: the tokens that have drawn the most attention so far."""

from __future__ import annotations

import numpy as np

from llmcache.kv.importance.columns import column_sums
from llmcache.kv.importance.tables import TokenTable
from llmcache.kv.kernels import top
from llmcache.kv.pipeline.timeline import CPU, EVALUATE, NO_TIMELINE, Timeline
from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.policies.settings import PolicySettings
from llmcache.kv.tiers import KvStore, Selection


class H2O(KvPolicy):
    """H2O-like: heavy hitters, the tokens with the largest attention accumulated over all queries so far.

        prefilled: sums[token] += attention of every query of the prompt to it
        select:    the tokens of the middle with the largest sums
        attended:  sums[token] += attention of this step's queries to it, if it was attended to

    The host evaluates, from 4 bytes a token and key head; no key is read for it, what is chosen is fetched.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4 and algorithm 1; hillinfer.txt, section 4.2, baseline (2). Differs
    from H2O: a token that is not chosen is not lost, its sum just stays as it is; the recent tokens are the store's
    window rather than half of the budget.
    """

    name = "h2o"
    title = "H2O-like"
    needs_weights = True

    def __init__(self, store: KvStore, settings: PolicySettings | None = None, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(store, settings, timeline)
        self._sums = TokenTable(store.shape.layers, store.batch, (self.kv_heads,), np.float32)
        self.remembered.append(self._sums)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Adds up the attention of a prompt; `KvPolicy.prefilled`."""
        for sequence, (asked, keys) in enumerate(zip(queries, self.all_keys(layer), strict=True)):
            sums = column_sums(asked, keys, start, int(self.first[sequence]), scale=self.scale)
            rows = self._sums.rows(layer, sequence, keys.shape[1])
            rows += sums.T

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the heavy hitters, whatever the queries are; padding has drawn no attention."""
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            start, stop = (self.page_tokens * page for page in (self.store.middle.start, self.store.middle.stop))
            sums = [self._sums.rows(layer, sequence, stop)[start:].T for sequence in range(len(queries))]
            return Selection(top(np.stack(sums), tokens) + start)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Adds up the attention of a step; ValueError without its `weights` [batch, heads, k]."""
        positions = self.store.attended_positions(layer, selection)
        for sequence, added in enumerate(self.weights_by_head(positions, weights)):
            rows = self._sums.rows(layer, sequence, self.store.layer_length(layer))
            for head, (own, by_token) in enumerate(zip(positions[sequence], added, strict=True)):
                rows[own, head] += by_token
