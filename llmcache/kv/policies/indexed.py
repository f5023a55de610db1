"""Policies with an index of keys: Quest, Mass and IceCache."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError
from llmcache.kv.index.dci import DciSettings, load_indexes, path_of, save_indexes
from llmcache.kv.index.scorers import (
    SCORERS,
    AutoScorer,
    DciScorer,
    ExactScorer,
    PageIndexes,
    QuestScorer,
    Scorer,
    ScorerSettings,
    ValueSums,
)
from llmcache.kv.kernels import left_out, top, top_shared, weights
from llmcache.kv.pipeline import widened
from llmcache.kv.policies.base import KvPolicy, PolicySettings, one_of, setting
from llmcache.kv.tiers import Selection, side_by_side


@dataclass(frozen=True)
class IndexedSettings(PolicySettings):
    """Settings of policies with an index.

    `full_layers`: number of first layers with full attention (2 in the papers). `anchor_every`: one of this many layers
    chooses, and the layers after it reuse its choice (IceCache's `reuse`: 3).
    """

    full_layers: int = setting(0, lambda layers: layers >= 0, "use 0 or more layers")
    anchor_every: int = setting(1, lambda layers: layers >= 1, "use at least 1; with 1, each layer chooses by itself")


class IndexedPolicy(KvPolicy):
    """Adds the keys that leave the window to scorers, and queries these; see `PageIndexes`."""

    ahead = True
    interleaved = True
    settings_class = IndexedSettings
    settings: IndexedSettings
    indexes: PageIndexes[Scorer]

    def _use(self, make: Callable[[int], Scorer]) -> None:
        self.indexes = PageIndexes(self.store, make)
        self._fed: list[PageIndexes[Any]] = []
        self._feeds(self.indexes)
        self._choices: dict[int, tuple[int, Int64s]] = {}  # step and positions of the last choice of each anchor
        self._starts = self._first_indexed()

    def _feeds(self, indexes: PageIndexes[Any]) -> None:
        self._fed.append(indexes)
        self.remembered.append(indexes)

    def anchor_of(self, layer: int) -> int:
        offset = layer - self.settings.full_layers
        return layer if offset < 0 else layer - offset % self.settings.anchor_every

    def _first_indexed(self) -> Int64s:
        return self.page_tokens * np.maximum(self.store.config.sink_pages, -(-self.first // self.page_tokens))

    def pad(self, first: Int64s) -> None:
        before = self._starts
        super().pad(first)
        self._starts = self._first_indexed()
        for sequence in np.flatnonzero(self._starts != before):
            for each in self._fed:
                each.forget(int(sequence))

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        self._feed(layer)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        self._feed(layer)

    def _feed(self, layer: int) -> None:
        if layer >= self.settings.full_layers and self.anchor_of(layer) == layer:
            for each in self._fed:
                each.feed(layer, self._starts)

    def select(self, layer: int, queries: Floats) -> Selection:
        return self.store.everything if layer < self.settings.full_layers else super().select(layer, queries)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        anchor = self.anchor_of(layer)
        step, chosen = self._choices.get(anchor, (-1, None))
        if anchor != layer and chosen is not None and step == self.store.step:
            return Selection(chosen)
        self._feed(layer)
        found = side_by_side([self._of_sequence(layer, sequence, rows, tokens) for sequence, rows in enumerate(queries)])
        self._choices[layer] = self.store.step, found
        return Selection(found)

    def _of_sequence(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Int64s:
        """Return `tokens` tokens of the middle [kv_heads, tokens], ascending, or more for some heads that share a budget.

        The first tokens after padding act as a sink. Padding is chosen only if there are no other tokens.
        """
        size, lead, stop = self.page_tokens, self.inside.start, self.inside.stop
        start, first = (min(int(of[sequence]), stop) for of in (self._starts, self.first))  # the middle may be all padding
        forced = np.arange(start - size if self.whole_pages else first, start) if lead < first < start else np.arange(0)
        scorer = self.indexes.found[layer][sequence]
        has = 0 if scorer is None else len(scorer)
        forced = forced[:tokens]
        rest = min(has, tokens - len(forced))
        best = np.empty((self.kv_heads, 0), np.int64)
        if scorer is not None and rest:
            best = self.best(scorer, sequence, queries, rest)
        padding = np.arange(lead, (int(forced[0]) if len(forced) else start))[::-1][: tokens - len(forced) - rest][::-1]
        sides = [np.broadcast_to(side, (self.kv_heads, len(side))) for side in (padding, forced)]
        return np.concatenate([*sides, best], axis=1)

    def best(self, scorer: Scorer, sequence: int, queries: Floats, count: int) -> Int64s:
        """Return the tokens [kv_heads, count], ascending, that `scorer` finds; heads that share a budget may differ."""
        return scorer.top(queries, count)

    def cropped(self, tokens: int) -> None:
        super().cropped(tokens)
        self._choices.clear()

    def reordered(self, index: Int64s) -> None:
        super().reordered(index)
        self._starts = self._starts[index]
        self._choices.clear()


class Quest(IndexedPolicy):
    """Chooses the pages whose keys could have the largest products, by summaries in host memory.

    Source: Tang et al., Quest, ICML 2024, section 3; baseline of icecache.txt, sections 2.2 and 5. Differs from Quest: the
    first layers have full attention only with `full_layers`.
    """

    name = "quest"
    title = "Quest"
    whole_pages = True

    def begin(self) -> None:
        knobs = ScorerSettings(combine=self.settings.combine, threads=self.store.config.threads)
        self._use(lambda first: QuestScorer(self.store.shape, first, knobs))


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

    With the largest product (IceCache, HillInfer), the head with the longest queries would decide for all. Key heads share
    the layer's budget, unless a choice serves several layers. If the mean of the values got all of the weight of the tokens
    that are not chosen, a model's loss would rise, because important ones among them differ from the mean.

    Source: Yuan et al., Native Sparse Attention, 2025, section 3.3.2, equation 10: importance by the sum of weights over a
    group. Differs from it: single tokens are chosen. Feng et al., Ada-KV, 2024, section 3.3: the largest weights of all
    heads of a layer share its budget. Differs from it: each step chooses again, and a head gets at most twice its even
    part. Ribar et al., SparQ Attention, 2024, section 3, algorithm 1: the mean of the values. Differs from it: the mean
    gets half of the other weight. The softmax excludes the newest token, and a model's cap of logits.
    """

    name = "mass"
    title = "Attention mass"
    sink_tokens = 0
    window_tokens = 0
    settings_class = MassSettings
    settings: MassSettings

    def begin(self) -> None:
        shape, made = self.store.shape, SCORERS[self.settings.scorer]
        knobs = ScorerSettings(threads=self.store.config.threads)
        self._use(lambda first: made(shape, first, knobs))
        self.values = PageIndexes(self.store, lambda first: ValueSums(shape, first))
        if self.settings.mean_share:
            self._feeds(self.values)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
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
        assert isinstance(scorer, ExactScorer)
        inside = scorer.products(queries)
        threads = self.store.config.threads
        mass, sums = weights(inside, self._pinned[sequence], self.scale, threads)
        shared = self.settings.allocation == "layer" and self.settings.anchor_every == 1
        chosen = (top_shared if shared else top)(mass, count, threads)
        if self.settings.mean_share:
            self._missed[sequence], self._sums[sequence] = left_out(inside, chosen, threads).reshape(-1), sums.reshape(-1)
        return chosen + scorer.first


log = logging.getLogger("llmcache.kv")


@dataclass(frozen=True)
class IceCacheSettings(IndexedSettings):
    """Settings of IceCache.

    `scorer`: "dci", "exact", "rounded" (keys of one byte per number), "quest", or "auto", which measures whether the tree is
    faster, and otherwise scans (see `policy.whys`). `whole_pages`: choose whole pages of the tree, as in the paper, instead
    of the best keys. `dci`: settings of the tree.
    """

    scorer: str = one_of("auto", SCORERS)
    whole_pages: bool = False
    dci: DciSettings = field(default_factory=DciSettings)


class IceCache(IndexedPolicy):
    """Keys are clustered in DCI-trees, which grow as pages leave the window; queries descend the trees.

        prefilled: a tree is built for each key head while the next layer computes
        select:    the tokens that the trees find (algorithms 3 and 4), from the union over the queries of a key head
        attended:  the page that leaves the window is inserted (algorithm 1, lines 27 to 37)

    Source: icecache.txt, section 4, appendix A and B, algorithms 1 to 4. Differs from the paper: the chosen rows are fetched
    individually, because pages of the tree are not pages of the store; all layers keep to the budget by default (the paper:
    `full_layers` 2); and the union is cut to the budget.
    """

    name = "icecache"
    title = "IceCache"
    settings_class = IceCacheSettings
    settings: IceCacheSettings

    def begin(self) -> None:
        settings, made = self.settings, SCORERS[self.settings.scorer]
        self.knobs = ScorerSettings(settings.combine, self.store.config.threads, settings.whole_pages, dci=settings.dci)
        self._use(lambda first: made(self.store.shape, first, self.knobs))

    @property
    def whys(self) -> list[str]:
        """The scorer of each layer's first sequence, and the reason."""
        firsts = [row[0] for row in self.indexes.found]
        return ["" if scorer is None else scorer.why for scorer in firsts]

    # Saving trees next to the spill file

    def saved(self) -> None:
        if self.store.config.path is None:
            return
        found: dict[tuple[int, int, int], Any] = {}
        for layer, row in enumerate(self.indexes.found):
            for sequence, scorer in enumerate(row):
                tree = scorer.used if isinstance(scorer, AutoScorer) else scorer
                if isinstance(tree, DciScorer):
                    found |= {(layer, sequence, head): index for head, index in enumerate(tree.indexes)}
        save_indexes(path_of(self.store.config.path), found, self._identity())

    def restored(self) -> None:
        """Restore saved trees; trees that are damaged, or of another state of the spill file, are ignored and rebuilt."""
        path = self.store.config.path
        if path is None or self.settings.scorer not in ("dci", "auto") or not path_of(path).exists():
            return
        try:
            found = load_indexes(path_of(path), self._identity())
        except DataError as error:
            log.warning("%s: the trees are rebuilt", error.message)
            return
        for layer, sequence in {place[:2] for place in found}:
            tree = DciScorer(self.store.shape, int(self._starts[sequence]), self.knobs)
            tree.indexes = [found[layer, sequence, head] for head in range(self.kv_heads)]
            tree.end = tree.first + len(tree.indexes[0])
            self.indexes.found[layer][sequence] = tree
        self.indexes.crop(self.store.length)  # the window may be larger than before

    def _identity(self) -> dict[str, Any]:
        store = self.store
        ids = zlib.crc32(np.ascontiguousarray(store.ids).tobytes())
        identity = {"shape": store.shape.to_json(), "batch": store.batch, "tokens": store.length}
        return {**identity, "ids": ids, "first": self.first.tolist(), "sink": store.config.sink_pages}
