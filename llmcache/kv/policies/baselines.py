"""Baselines: full attention, the last tokens, the oracle, and those of hillinfer.txt, section 4.2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.index.scorers import ChunkScorer, PageIndexes, ScorerSettings
from llmcache.kv.kernels import top, top_shared
from llmcache.kv.pipeline import widened
from llmcache.kv.pipeline.timeline import CPU, EVALUATE
from llmcache.kv.policies.base import KvPolicy, PolicySettings, one_of
from llmcache.kv.policies.hillinfer import HierarchicalEvaluation
from llmcache.kv.tiers import KvStore, Selection, side_by_side

PROMISING = 2  # LeoAM: number of tokens to score exactly, as a multiple of those to choose


class Full(KvPolicy):
    """Every step fetches and attends to all tokens. Source: hillinfer.txt, section 4.2, baseline (1)."""

    name = "full"
    title = "Full cache"

    @property
    def tokens(self) -> int:
        return len(self.store.middle) * self.page_tokens

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        return self.store.everything


class Window(KvPolicy):
    """StreamingLLM-like: attends to the first and the last tokens that fit the budget, without an evaluation.

    Source: Xiao et al., ICLR 2024, section 3.2. Differs from it: positions are those of the tokens, not those in the cache.
    """

    name = "window"
    title = "Window"

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        stop = self.inside.stop
        return Selection.of_all(range(stop - tokens, stop), len(queries), self.kv_heads, 1)


@dataclass(frozen=True)
class OracleSettings(PolicySettings):
    """Settings of Oracle.

    `by`: "mass", softmax weights summed over the query heads of a key head; "layer", the same, with one budget for all
    heads of a layer; "product", the largest product.
    """

    by: str = one_of("mass", ("mass", "layer", "product"))


class Oracle(KvPolicy):
    """The best possible choice, for comparison: it reads all keys in each step.

    Source: icecache.txt, section 5, and hillinfer.txt, Algorithm 1, choose by the largest product; Yuan et al., Native
    Sparse Attention, 2025, equation 10, by the sum of weights.
    """

    name = "oracle"
    title = "Oracle"
    sink_tokens = 0
    window_tokens = 0
    settings_class = OracleSettings
    settings: OracleSettings

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        logits = all_products(self.store, layer, queries, self.scale)
        np.copyto(logits, -np.inf, where=np.arange(logits.shape[3]) < self.first[:, None, None, None])
        scores: Floats = logits.max(axis=2) if self.settings.by == "product" else softmax(logits).sum(axis=2)
        inside = np.ascontiguousarray(scores[..., self.inside])
        if self.settings.by == "layer":
            return Selection(side_by_side([top_shared(of_sequence, tokens) for of_sequence in inside]) + self.inside.start)
        return Selection(top(inside, tokens) + self.inside.start)


def all_products(store: KvStore, layer: int, queries: Floats, scale: float) -> Floats:
    """Return the products [batch, kv_heads, group, tokens] of `queries` [batch, heads, dim] and all keys, times `scale`."""
    everything = store.gather(layer, store.everything)
    keys = widened(everything.keys)
    grouped = queries.reshape(*keys.shape[:2], -1, keys.shape[3]) * np.float32(scale)
    products: Floats = np.matmul(grouped, keys.swapaxes(2, 3))
    everything.release()
    return products


def softmax(logits: Floats) -> Floats:
    """Return the weights that sum to 1 along the last axis."""
    weights: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


class Prefetch(KvPolicy):
    """InfiniGen-like: the host scores the keys of the next layer with estimated queries, and fetches the best.

    Keys on the ssd tier are read over the link to be scored.

    Source: hillinfer.txt, section 4.2, baseline (3); Lee et al., InfiniGen, OSDI 2024, sections 4.2 and 4.3. Differs from
    InfiniGen: all channels are scored, because weights are not skewed offline; the number of tokens is the budget.
    """

    name = "prefetch"
    title = "Prefetch-based"
    ahead = True

    def begin(self) -> None:
        self._evaluation = HierarchicalEvaluation(self, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        return Selection(self._evaluation.important(layer, queries, tokens))


class LeoAM(KvPolicy):
    """LeoAM-like: selects chunks by the bounds of their abstracts, then pages, then tokens by their scores.

    Abstracts (2 of a page's 16 rows of keys) are in host memory; keys on the ssd tier are read over the link if their page
    is promising for at least one head.

    Source: hillinfer.txt, section 4.2, baseline (4); Sun et al., LeoAM, 2025. Differs from LeoAM: chunks have two levels and
    one size in all layers; only the best tokens of a promising page are attended to; nothing is compressed.
    """

    name = "leoam"
    title = "LeoAM-like"
    ahead = True

    def begin(self) -> None:
        store, knobs = self.store, ScorerSettings(self.settings.combine, self.store.config.threads)
        self.indexes = PageIndexes(store, lambda first: ChunkScorer(store.shape, first, knobs))
        self.remembered.append(self.indexes)
        self._evaluation = HierarchicalEvaluation(self, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        self._index(layer)
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            pages = [self._pages(layer, sequence, of_sequence, tokens) for sequence, of_sequence in enumerate(queries)]
        return Selection(self._evaluation.important(layer, queries, tokens, pages))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        self._index(layer)

    def _index(self, layer: int) -> None:
        self.indexes.feed(layer, np.full(self.store.batch, self.store.config.sink_pages * self.page_tokens))

    def _pages(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Int64s:
        middle = self.store.middle
        wanted = min(len(middle), -(-PROMISING * tokens // self.page_tokens))
        begin = min(int(self.first[sequence]) // self.page_tokens, middle.stop - wanted)  # skip padding
        scorer = self.indexes.found[layer][sequence]
        assert scorer is not None
        found = scorer.best_pages(queries, range(max(0, begin - middle.start), len(middle)), wanted)
        return np.unique(found) + middle.start
