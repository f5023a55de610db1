"""What other policies are compared with: everything, the last tokens, the best that can be; and the baselines of HillInfer.

Full is baseline (1) of hillinfer.txt, section 4.2, H2O, which has a file of its own, (2), Prefetch (3) and LeoAM (4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.index.scorers import ChunkScorer, PageIndexes, ScorerSettings
from llmcache.kv.kernels import top, top_shared
from llmcache.kv.pipeline import widened
from llmcache.kv.pipeline.timeline import CPU, EVALUATE
from llmcache.kv.policies.base import KvPolicy, PolicySettings, one_of
from llmcache.kv.policies.evaluation import HierarchicalEvaluation
from llmcache.kv.tiers import KvStore, Selection, side_by_side

PROMISING = 2
"""LeoAM: tokens that are scored exactly, as a multiple of those chosen."""


class Full(KvPolicy):
    """The full cache: every token is fetched and attended to, in every step, whatever the budget says.

    Source: hillinfer.txt, section 4.2, baseline (1): "retains the entire KV cache without performing any token importance
    evaluation". What its results are is what those of all others are compared with.
    """

    name = "full"
    title = "Full cache"

    @property
    def tokens(self) -> int:
        """All tokens of the middle."""
        return len(self.store.middle) * self.page_tokens

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """See `KvPolicy.choose`; not called, as there is no choice."""
        return self.store.everything


class Window(KvPolicy):
    """StreamingLLM-like: the first tokens and the last, however many the budget has room for; nothing is evaluated.

    Source: Xiao et al., Efficient streaming language models with attention sinks, ICLR 2024, section 3.2. Differs from
    it: positions are the tokens' own, not those in the cache; and what is not attended to is kept, so a page that leaves
    the window is not lost (it is just never looked at again).
    """

    name = "window"
    title = "Window"

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the last tokens of the middle: with the store's own window they make one window of the budget."""
        stop = self.inside.stop
        return Selection.of_all(range(stop - tokens, stop), len(queries), self.kv_heads, 1)


@dataclass(frozen=True)
class OracleSettings(PolicySettings):
    """`by`: "mass", the weights of softmax added up over the query heads of a key head, "layer", the same, of all heads of a
    layer together; "product", the largest product.
    """

    by: str = one_of("mass", ("mass", "layer", "product"))


class Oracle(KvPolicy):
    """What others are compared with: reads every key at every step, so nothing is saved but in attention itself.

        select: products of queries and all keys, exactly; their softmax over all tokens, added up by key head
                the middle tokens with the largest sums, or by the largest product of the group

    Source: icecache.txt, section 5, and hillinfer.txt, Algorithm 1, choose by the largest product; Yuan et al., Native
    Sparse Attention, 2025, section 3.3.2, equation 10, by the sum of weights.
    """

    name = "oracle"
    title = "Oracle"
    sink_tokens = 0
    window_tokens = 0
    settings_class = OracleSettings
    settings: OracleSettings

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the best of the middle; see `OracleSettings`."""
        logits = all_products(self.store, layer, queries, self.scale)
        np.copyto(logits, -np.inf, where=np.arange(logits.shape[3]) < self.first[:, None, None, None])
        scores: Floats = logits.max(axis=2) if self.settings.by == "product" else softmax(logits).sum(axis=2)
        inside = np.ascontiguousarray(scores[..., self.inside])
        if self.settings.by == "layer":
            return Selection(side_by_side([top_shared(of_sequence, tokens) for of_sequence in inside]) + self.inside.start)
        return Selection(top(inside, tokens) + self.inside.start)


def all_products(store: KvStore, layer: int, queries: Floats, scale: float) -> Floats:
    """Returns the products [batch, kv_heads, group, tokens] of `queries` [batch, heads, dim] and all keys, times `scale`."""
    everything = store.gather(layer, store.everything)
    keys = widened(everything.keys)
    grouped = queries.reshape(*keys.shape[:2], -1, keys.shape[3]) * np.float32(scale)
    products: Floats = np.matmul(grouped, keys.swapaxes(2, 3))
    everything.release()
    return products


def softmax(logits: Floats) -> Floats:
    """Returns the weights that sum to 1 along the last axis."""
    weights: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


class Prefetch(KvPolicy):
    """InfiniGen-like: the host scores the keys of the next layer by an estimate of its queries, and fetches the best.

    Looking ahead is the engine's (`app`). Keys that are only on the ssd come over the link to be scored: host and ssd
    take turns, as there is nothing near the data.

    Source: hillinfer.txt, section 4.2, baseline (3); Lee et al., InfiniGen, OSDI 2024, sections 4.2 and 4.3. Differs from
    InfiniGen: weights are not skewed offline, so that few channels do not stand for all, and all of them are scored; the
    number of chosen tokens is the budget, not what lies within a margin of the best score.
    """

    name = "prefetch"
    title = "Prefetch-based"
    ahead = True

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        self._evaluation = HierarchicalEvaluation(self, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens whose keys fit the queries best."""
        return Selection(self._evaluation.important(layer, queries, tokens))


class LeoAM(KvPolicy):
    """LeoAM-like: chunks by the bounds of their abstracts, then their pages, then the tokens of these by their scores.

        select:   bounds of all chunks; of chunks that can matter, bounds of their pages; of the best pages, scores
        attended: abstracts of the pages that have left the window

    Abstracts, 2 of a page's 16 rows of keys, stay in the host's memory; keys that are only on the ssd come over the link
    if their page is promising for one head at least.

    Source: hillinfer.txt, section 4.2, baseline (4); Sun et al., LeoAM, 2025. Differs from LeoAM: there are two levels
    of chunks, of one size in all layers (there sizes adapt to how skewed a layer's attention is); of a promising page only
    the best tokens are attended to; nothing is compressed on its way.
    """

    name = "leoam"
    title = "LeoAM-like"
    ahead = True

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        store, knobs = self.store, ScorerSettings(self.settings.combine, self.store.config.threads)
        self.indexes = PageIndexes(store, lambda first: ChunkScorer(store.shape, first, knobs))
        self.remembered.append(self.indexes)
        self._evaluation = HierarchicalEvaluation(self, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the best tokens of the pages that can have them."""
        self._index(layer)
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            pages = [self._pages(layer, sequence, asked, tokens) for sequence, asked in enumerate(queries)]
        return Selection(self._evaluation.important(layer, queries, tokens, pages))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Makes the abstracts of pages that have come to the middle; `selection` and `weights` are not looked at."""
        self._index(layer)

    def _index(self, layer: int) -> None:
        self.indexes.feed(layer, np.full(self.store.batch, self.store.config.sink_pages * self.page_tokens))

    def _pages(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Int64s:
        """Pages of the middle, ascending, that are promising for one of the heads."""
        middle = self.store.middle
        wanted = min(len(middle), -(-PROMISING * tokens // self.page_tokens))
        begin = min(int(self.first[sequence]) // self.page_tokens, middle.stop - wanted)  # what is before it is padding
        scorer = self.indexes.found[layer][sequence]
        assert scorer is not None
        found = scorer.best_pages(queries, range(max(0, begin - middle.start), len(middle)), wanted)
        return np.unique(found) + middle.start
