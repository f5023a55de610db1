"""IndexedPolicy: the base class of policies with an index of keys: updates, padding, and layers without an index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcache.arrays import Floats, Int64s
from llmcache.kv.index.scorers import PageIndexes, Scorer
from llmcache.kv.policies.base import KvPolicy, PolicySettings, setting
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
    """Adds the keys that leave the window to scorers, and queries these; see `PageIndexes` and the subclasses."""

    ahead = True
    interleaved = True
    settings_class = IndexedSettings
    settings: IndexedSettings
    indexes: PageIndexes[Scorer]

    def _use(self, make: Callable[[int], Scorer]) -> None:
        """Use the scorers that `make` returns for tokens from a given number on."""
        self.indexes = PageIndexes(self.store, make)
        self._fed: list[PageIndexes[Any]] = []
        self._feeds(self.indexes)
        self._choices: dict[int, tuple[int, Int64s]] = {}  # step and positions of the last choice of each anchor
        self._starts = self._first_indexed()

    def _feeds(self, indexes: PageIndexes[Any]) -> None:
        """Feed `indexes` with the tokens between sink and window, in layers that choose."""
        self._fed.append(indexes)
        self.remembered.append(indexes)

    def anchor_of(self, layer: int) -> int:
        """Return the layer whose choice `layer` uses; `layer` itself if it chooses."""
        offset = layer - self.settings.full_layers
        return layer if offset < 0 else layer - offset % self.settings.anchor_every

    def _first_indexed(self) -> Int64s:
        """Return the first indexed token [batch] of each sequence: that of the first page after the sink without padding."""
        return self.page_tokens * np.maximum(self.store.config.sink_pages, -(-self.first // self.page_tokens))

    def pad(self, first: Int64s) -> None:
        """Set the padding; indexes that contain padding now are removed."""
        before = self._starts
        super().pad(first)
        self._starts = self._first_indexed()
        for sequence in np.flatnonzero(self._starts != before):
            for each in self._fed:
                each.forget(int(sequence))

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Index the part of a prefill that will be in the middle, while the next layer computes."""
        self._feed(layer)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Index the page that leaves the window, if any."""
        self._feed(layer)

    def _feed(self, layer: int) -> None:
        if layer >= self.settings.full_layers and self.anchor_of(layer) == layer:
            for each in self._fed:
                each.feed(layer, self._starts)

    def select(self, layer: int, queries: Floats) -> Selection:
        """Return the tokens to attend to; the whole middle in the first `full_layers` layers."""
        return self.store.everything if layer < self.settings.full_layers else super().select(layer, queries)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return the tokens that the layer's scorers find, or the choice of its anchor in this step."""
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

        The first tokens after padding act as a sink: those in a page with padding are all chosen. Padding is chosen only if
        there are no other tokens, its last tokens first.
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
        """Return `count` tokens [kv_heads, count], ascending, that `scorer` finds for a sequence.

        Heads that share a budget may have more or fewer.
        """
        return scorer.top(queries, count)

    def cropped(self, tokens: int) -> None:
        """Follow the store, and discard choices."""
        super().cropped(tokens)
        self._choices.clear()

    def reordered(self, index: Int64s) -> None:
        """Follow the store, and discard choices."""
        super().reordered(index)
        self._starts = self._starts[index]
        self._choices.clear()
