"""IndexedPolicy: what policies have in common that keep an index of keys: feeding it, padding, layers that do without."""

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
    """`full_layers`: how many of the first layers attend to everything (the papers: 2), whatever the budget.

    `anchor_every`: every so many layers one chooses, and those behind it take its choice (IceCache's `reuse`: 3).
    """

    full_layers: int = setting(0, lambda layers: layers >= 0, "use 0 or more layers")
    anchor_every: int = setting(1, lambda layers: layers >= 1, "use at least 1; with 1, each layer chooses by itself")


class IndexedPolicy(KvPolicy):
    """Feeds scorers with the keys that leave the window, and asks them; see `PageIndexes` and the file of the policy."""

    ahead = True
    interleaved = True
    settings_class = IndexedSettings
    settings: IndexedSettings
    indexes: PageIndexes[Scorer]

    def _use(self, make: Callable[[int], Scorer]) -> None:
        """Takes the scorers that `make` returns, for tokens from a given number on."""
        self.indexes = PageIndexes(self.store, make)
        self._fed: list[PageIndexes[Any]] = []
        self._feeds(self.indexes)
        self._choices: dict[int, tuple[int, Int64s]] = {}  # at which step an anchor chose what
        self._starts = self._first_indexed()

    def _feeds(self, indexes: PageIndexes[Any]) -> None:
        """Has `indexes` know what is behind the sink and has left the window, of layers that choose."""
        self._fed.append(indexes)
        self.remembered.append(indexes)

    def anchor_of(self, layer: int) -> int:
        """Returns the layer whose choice `layer` takes; itself if it chooses."""
        behind = layer - self.settings.full_layers
        return layer if behind < 0 else layer - behind % self.settings.anchor_every

    def _first_indexed(self) -> Int64s:
        """First token [batch] of the first page of each sequence that is indexed: behind the sink, and all of it real."""
        return self.page_tokens * np.maximum(self.store.config.sink_pages, -(-self.first // self.page_tokens))

    def pad(self, first: Int64s) -> None:
        """Says which tokens are padding: an index of tokens that now are is forgotten."""
        before = self._starts
        super().pad(first)
        self._starts = self._first_indexed()
        for sequence in np.flatnonzero(self._starts != before):
            for each in self._fed:
                each.forget(int(sequence))

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Indexes what of a prefill will be in the middle, while the next layer computes; `queries` are not looked at."""
        self._feed(layer)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Indexes the page that leaves the window, if one does; `selection` and `weights` are not looked at."""
        self._feed(layer)

    def _feed(self, layer: int) -> None:
        if layer >= self.settings.full_layers and self.anchor_of(layer) == layer:
            for each in self._fed:
                each.feed(layer, self._starts)

    def select(self, layer: int, queries: Floats) -> Selection:
        """Returns the tokens to attend to; all of the middle in the first `full_layers` layers."""
        return self.store.everything if layer < self.settings.full_layers else super().select(layer, queries)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns what the layer's scorers find, or what its anchor chose at this step."""
        anchor = self.anchor_of(layer)
        step, chosen = self._choices.get(anchor, (-1, None))
        if anchor != layer and chosen is not None and step == self.store.step:
            return Selection(chosen)
        self._feed(layer)
        found = side_by_side([self._of_sequence(layer, sequence, asked, tokens) for sequence, asked in enumerate(queries)])
        self._choices[layer] = self.store.step, found
        return Selection(found)

    def _of_sequence(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Int64s:
        """`tokens` tokens of the middle [kv_heads, tokens], ascending, or more where heads share.

        The first tokens behind padding are as a sink: of the page that they share with it all are taken. Padding itself is
        taken only where there is nothing else, the last of it first.
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
        """Returns `count` tokens [kv_heads, count] that `scorer` knows of a sequence, ascending; as many in the mean where
        heads share.
        """
        return scorer.top(queries, count)

    def cropped(self, tokens: int) -> None:
        """Follows the store; choices are forgotten."""
        super().cropped(tokens)
        self._choices.clear()

    def reordered(self, index: Int64s) -> None:
        """Follows the store; choices are forgotten."""
        super().reordered(index)
        self._starts = self._starts[index]
        self._choices.clear()
