"""Mass: chooses the tokens with the most attention, summed over the query heads of a key head."""

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
    """Settings of Mass.

    `scorer`: the stored form of keys: "rounded" to one byte per number, "packed" in two bits, or "exact". `allocation`: a
    budget for the heads of a "layer" together, or for each "head". `mean_share` [0, 1]: share of the attention on tokens
    that are not chosen that goes to the mean of all values; the rest goes to the chosen tokens.
    """

    scorer: str = one_of("rounded", ("rounded", "packed", "exact"))
    allocation: str = one_of("layer", ("layer", "head"))
    mean_share: float = setting(0.5, lambda share: 0 <= share <= 1, "use a share from 0 to 1")


class Mass(IndexedPolicy):
    """Attention mass: the tokens with the largest softmax weights, summed over the query heads of a key head.

        select:   products of each query head with all keys of the index, and of sink, window and tail
                  softmax over both; sums by key head; the best tokens of the middle, for all heads of a layer together
        attended: the page that leaves the window is indexed

    A query head with concentrated attention gets its tokens, because its weights are large there; a head with uniform
    attention has small weights everywhere. With the largest product (IceCache, HillInfer), the head with the longest queries
    would decide for all. Key heads share the layer's budget, so one with concentrated attention leaves a part of it to
    others. If a choice serves several layers, each key head has its own budget. Sink and window are not reserved, because
    their important tokens are chosen like any others.

    A softmax over the chosen tokens alone would give them the weight of all tokens. Instead, half of the weight of the other
    tokens goes to the mean of the values. This weight is what remains after the newest token: one that attends to itself
    needs no others. If all of it went to the mean, a model's loss would be larger than without, because important tokens
    that are not chosen differ from the mean.

    Source: Yuan et al., Native Sparse Attention, 2025, section 3.3.2, equation 10: importance by the sum of weights over a
    group; Feng et al., Ada-KV, 2024, section 3.3: the largest weights of all heads of a layer share its budget; Ribar et
    al., SparQ Attention, 2024, section 3, algorithm 1: the mean of the values. Differs from the first: single tokens are
    chosen by their own keys, not blocks by compressed ones. Differs from the second: tokens are not lost, each step chooses
    again, and a head gets at most twice its even part. Differs from the third: the mean gets half of the other weight, not
    all. The softmax excludes the newest token, which is appended after the choice, and a model's cap of logits.
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
        """Return the tokens with the largest mass, or the choice of the anchor."""
        keys, positions = self.store.pinned_keys(layer)
        grouped = queries.reshape(self.store.batch, self.kv_heads, -1, queries.shape[2])
        self._pinned = np.matmul(grouped, widened(keys).swapaxes(2, 3))
        if self.first.any():
            np.copyto(self._pinned, -np.inf, where=positions < self.first[:, None, None, None])
        # By query head, see `Selection.missed`; 0 for a sequence of which all tokens are chosen.
        self._missed, self._sums = np.zeros((2, *queries.shape[:2]), np.float32)
        found = super().choose(layer, queries, tokens)
        return Selection(found.positions, (self._missed, self._sums)) if self._missed.any() else found

    def unseen(self, layer: int, selection: Selection, queries: Floats, keys: NDArray[Any]) -> tuple[Floats, Floats] | None:
        """Return the share of attention of the mean value, and that mean; see `KvPolicy.unseen`."""
        if selection.missed is None:
            return None
        missed, sums = selection.missed
        grouped = queries.reshape(self.store.batch, self.kv_heads, -1, queries.shape[2])
        newest = np.matmul(grouped, widened(keys).swapaxes(2, 3)).reshape(queries.shape[:2])
        left = np.exp(-np.logaddexp(0, newest * np.float32(self.scale) - sums))  # without the newest token's share
        none = np.zeros((self.kv_heads, self.store.shape.value_dim), np.float32)
        means = np.stack([none if known is None else known.mean for known in self.values.found[layer]])
        return np.float32(self.settings.mean_share) * left * missed, means

    def best(self, scorer: Scorer, sequence: int, queries: Floats, count: int) -> Int64s:
        """Return `count` tokens [kv_heads, count] of `scorer`, ascending."""
        assert isinstance(scorer, ExactScorer)
        inside = scorer.products(queries)
        threads = self.store.config.threads
        mass, sums = weights(inside, self._pinned[sequence], self.scale, threads)
        shared = self.settings.allocation == "layer" and self.settings.anchor_every == 1
        chosen = (top_shared if shared else top)(mass, count, threads)
        if self.settings.mean_share:
            self._missed[sequence], self._sums[sequence] = left_out(inside, chosen, threads).reshape(-1), sums.reshape(-1)
        return chosen + scorer.first
