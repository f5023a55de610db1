"""Mass: the tokens on which the most attention falls, over the query heads of a key head together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.kv.index.scorers import SCORERS, ExactScorer, PageIndexes, Scorer, ScorerSettings, ValueSums
from llmcache.kv.kernels import left_out, top, top_shared, weights
from llmcache.kv.pipeline import widened
from llmcache.kv.policies.base import one_of, setting
from llmcache.kv.policies.indexed import IndexedPolicy, IndexedSettings
from llmcache.kv.tiers import Selection


@dataclass(frozen=True)
class MassSettings(IndexedSettings):
    """`scorer`: which keys are looked at: "rounded" to a byte a number, "packed" in two bits, or "exact".

    `allocation` of a budget: one for the heads of a "layer", or one for each "head". `mean_share` [0, 1]: how much of the
    attention that falls on tokens which are not chosen goes to the mean of all values; the rest of it to what is chosen.
    """

    scorer: str = one_of("rounded", ("rounded", "packed", "exact"))
    allocation: str = one_of("layer", ("layer", "head"))
    mean_share: float = setting(0.5, lambda share: 0 <= share <= 1, "use a share from 0 to 1")


class Mass(IndexedPolicy):
    """Attention mass: the tokens with the largest weights of softmax, added up over the query heads of a key head.

        select:   products of each query head with all keys of the index, and with those that are attended in any case
                  softmax over both; the sums by key head; the best tokens of the middle, of all heads of a layer together
        attended: the page that leaves the window is indexed

    A head that looks at few tokens gets them, as its weights are large there, and one that looks at everything alike
    gives way: by the largest product (IceCache, HillInfer) the head with the longest queries chooses for all. Key heads
    share the layer's budget alike: one that looks at few tokens leaves its own to those that look at many. Where a choice
    serves more than one layer, each has its own. Neither sink nor window is kept for its own sake: what matters
    of them is chosen (see `sink_tokens`, `window_tokens`).

    What is not chosen is not left out: softmax over what is chosen alone would give all of its weight to that. Half of the
    weight goes to the mean of the values instead, of what the newest token leaves them: one that looks at itself needs no
    others. With all of it a model loses more than with nothing: what has weight but is not chosen is not like the mean of
    everything either.

    Source: Yuan et al., Native Sparse Attention, 2025, section 3.3.2, equation 10: importance by the sum of weights over
    a group; Feng et al., Ada-KV, 2024, section 3.3: the largest weights of all heads of a layer share its budget. Differs
    from the first: single tokens are chosen, by their own keys, not blocks by compressed ones. Differs from the second: what
    is not chosen is not lost, each step chooses anew, and a head has twice its even share at most. Softmax is without the
    newest token, which comes after the choice, and without a cap on logits, where a model has one. The mean of the values:
    Ribar et al., SparQ Attention, 2024, section 3, algorithm 1. Differs from it: half of what falls elsewhere, not all.
    """

    name = "mass"
    title = "Attention mass"
    sink_tokens = 0
    window_tokens = 0
    settings_class = MassSettings
    settings: MassSettings

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        shape, made = self.store.shape, SCORERS[self.settings.scorer]
        knobs = ScorerSettings(threads=self.store.config.threads)
        self._use(lambda first: made(shape, first, knobs))
        self.values = PageIndexes(self.store, lambda first: ValueSums(shape, first))
        if self.settings.mean_share:
            self._feeds(self.values)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens with the largest mass, or what the anchor chose."""
        keys, positions = self.store.pinned_keys(layer)
        grouped = queries.reshape(self.store.batch, self.kv_heads, -1, queries.shape[2])
        self._pinned = np.matmul(grouped, widened(keys).swapaxes(2, 3))
        if self.first.any():
            np.copyto(self._pinned, -np.inf, where=positions < self.first[:, None, None, None])
        # Of each query head, as `Selection.missed` has it; 0 of a sequence of which all tokens were chosen.
        self._missed, self._sums = np.zeros((2, *queries.shape[:2]), np.float32)
        found = super().choose(layer, queries, tokens)
        return Selection(found.positions, (self._missed, self._sums)) if self._missed.any() else found

    def unseen(self, layer: int, selection: Selection, queries: Floats, keys: NDArray[Any]) -> tuple[Floats, Floats] | None:
        """Returns what the mean of the values has of attention; see `KvPolicy.unseen`."""
        if selection.missed is None:
            return None
        missed, sums = selection.missed
        grouped = queries.reshape(self.store.batch, self.kv_heads, -1, queries.shape[2])
        newest = np.matmul(grouped, widened(keys).swapaxes(2, 3)).reshape(queries.shape[:2])
        left = np.exp(-np.logaddexp(0, newest * np.float32(self.scale) - sums))  # by the newest
        none = np.zeros((self.kv_heads, self.store.shape.value_dim), np.float32)
        means = np.stack([none if known is None else known.mean for known in self.values.found[layer]])
        return np.float32(self.settings.mean_share) * left * missed, means

    def best(self, scorer: Scorer, sequence: int, queries: Floats, count: int) -> Int64s:
        """Returns `count` tokens [kv_heads, count] of `scorer`, ascending."""
        assert isinstance(scorer, ExactScorer)
        inside = scorer.products(queries)
        threads = self.store.config.threads
        mass, sums = weights(inside, self._pinned[sequence], self.scale, threads)
        shared = self.settings.allocation == "layer" and self.settings.anchor_every == 1
        chosen = (top_shared if shared else top)(mass, count, threads)
        if self.settings.mean_share:
            self._missed[sequence], self._sums[sequence] = left_out(inside, chosen, threads).reshape(-1), sums.reshape(-1)
        return chosen + scorer.first
