"""What other policies are compared with: everything, the last tokens, the best that can be; and the baselines of HillInfer.

Full is baseline (1) of hillinfer.txt, section 4.2, H2O (2), Prefetch (3) and LeoAM (4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.importance.columns import column_sums
from llmcache.kv.importance.hie import HierarchicalEvaluation
from llmcache.kv.importance.tables import TokenTable
from llmcache.kv.index.scorers import ChunkScorer, KeyIndexes, ScorerSettings
from llmcache.kv.kernels import top, top_shared
from llmcache.kv.pipeline import widened
from llmcache.kv.pipeline.timeline import CPU, EVALUATE
from llmcache.kv.policies.base import KvPolicy, PolicySettings, at_least, one_of, setting
from llmcache.kv.tiers import KvStore, Selection, side_by_side

RULES = ("mass", "layer", "product")
"""How the oracle tells what is best."""


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

    by: str = one_of("mass", RULES)


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

    def begin(self) -> None:
        """Makes what it keeps; `KvPolicy.begin`."""
        self._sums = TokenTable(self.store.shape.layers, self.store.batch, (self.kv_heads,), np.float32)
        self.remembered.append(self._sums)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Adds up the attention of a prompt; `KvPolicy.prefilled`."""
        everything = widened(self.store.gather(layer, self.store.everything).keys)
        for sequence, (asked, keys) in enumerate(zip(queries, everything, strict=True)):
            sums = column_sums(asked, keys, start, int(self.first[sequence]), scale=self.scale)
            rows = self._sums.rows(layer, sequence, keys.shape[1])
            rows += sums.T

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the heavy hitters, whatever the queries are; padding has drawn no attention."""
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            inside = self.inside
            sums = [self._sums.rows(layer, sequence, inside.stop)[inside.start :].T for sequence in range(len(queries))]
            return Selection(top(np.stack(sums), tokens) + inside.start)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Adds up the attention of a step; ValueError without its `weights` [batch, heads, k]."""
        positions = self.store.attended_positions(layer, selection)
        for sequence, added in enumerate(self.weights_by_head(positions, weights)):
            rows = self._sums.rows(layer, sequence, self.store.layer_length(layer))
            for head, (own, by_token) in enumerate(zip(positions[sequence], added, strict=True)):
                rows[own, head] += by_token


@dataclass(frozen=True)
class PrefetchSettings(PolicySettings):
    """`channels`: the share of the channels of a query that take part in the score, those with the largest numbers."""

    channels: float = setting(1.0, lambda share: 0 < share <= 1, "it is a share of the channels: above 0, at most 1")


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
    settings: PrefetchSettings

    def begin(self) -> None:
        """Makes what it keeps; `KvPolicy.begin`."""
        n, combine = self.settings.score_block_tokens, self.settings.combine
        self._evaluation = HierarchicalEvaluation(self.store, n, combine, parallel=False, timeline=self.timeline)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens whose keys fit the chosen channels of the queries best."""
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


@dataclass(frozen=True)
class LeoAMSettings(PolicySettings):
    """`chunk_pages`: pages of a chunk. `promising`: tokens that are scored exactly, as a multiple of those chosen."""

    chunk_pages: int = at_least(8, 1, "at least 1 page is needed")
    promising: float = at_least(2.0, 1, "at least as many as are chosen: 1 or above")


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
    settings_class = LeoAMSettings
    settings: LeoAMSettings

    def begin(self) -> None:
        """Makes what it keeps; `KvPolicy.begin`."""
        store, asked = self.store, self.settings
        knobs = ScorerSettings(asked.combine, store.config.threads, chunk_pages=asked.chunk_pages)
        self.indexes = KeyIndexes(store, lambda first: ChunkScorer(store.shape, first, knobs))
        self.remembered.append(self.indexes)
        n, timeline = asked.score_block_tokens, self.timeline
        self._evaluation = HierarchicalEvaluation(store, n, asked.combine, parallel=False, timeline=timeline)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the best tokens of the pages that can have them."""
        self._index(layer)
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            pages = [self._pages(layer, sequence, asked, tokens) for sequence, asked in enumerate(queries)]
        return Selection(self._evaluation.important(layer, queries, tokens, self.first, pages))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Makes the abstracts of pages that have come to the middle; `selection` and `weights` are not looked at."""
        self._index(layer)

    def _index(self, layer: int) -> None:
        self.indexes.feed(layer, np.full(self.store.batch, self.store.config.sink_pages * self.page_tokens))

    def _pages(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Int64s:
        """Pages of the middle, ascending, that are promising for one of the heads."""
        middle = self.store.middle
        wanted = min(len(middle), -(-int(self.settings.promising * tokens) // self.page_tokens))
        begin = min(int(self.first[sequence]) // self.page_tokens, middle.stop - wanted)  # what is before it is padding
        scorer = self.indexes.scorers[layer][sequence]
        assert isinstance(scorer, ChunkScorer)
        found = scorer.best_pages(queries, range(max(0, begin - middle.start), len(middle)), wanted)
        return np.unique(found) + middle.start
