"""LeoAM: abstracts tell which chunks can matter; only these are read and scored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.kv.importance.bounds import Abstracts, best_pages
from llmcache.kv.importance.hie import HierarchicalEvaluation
from llmcache.kv.pipeline.timeline import CPU, EVALUATE, NO_TIMELINE, Timeline
from llmcache.kv.policies.base import Floats, KvPolicy, Positions
from llmcache.kv.policies.settings import PolicySettings, check
from llmcache.kv.tiers import KvStore, Selection

INDEX_PAGES = 256
"""Pages whose keys are read at a time to make their abstracts."""


@dataclass(frozen=True)
class LeoAMSettings(PolicySettings):
    """`chunk_pages`: pages of a chunk. `promising`: tokens that are scored exactly, as a multiple of those chosen."""

    chunk_pages: int = 8
    promising: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.chunk_pages >= 1, "chunk_pages", self.chunk_pages, "at least 1 page is needed")
        check(self.promising >= 1, "promising", self.promising, "at least as many as are chosen: 1 or above")


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

    def __init__(self, store: KvStore, settings: PolicySettings | None = None, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(store, settings, timeline)
        asked, shape = self.settings, store.shape
        assert isinstance(asked, LeoAMSettings)
        self._promising, self._combine = asked.promising, asked.combine
        sizes = (shape.layers, store.batch, shape.kv_heads, shape.head_dim, shape.page_tokens)
        self.abstracts = Abstracts(*sizes, asked.chunk_pages)
        self.remembered.append(self.abstracts)
        self._evaluation = HierarchicalEvaluation(store, asked.score_block_tokens, asked.combine, parallel=False)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the best tokens of the pages that can have them."""
        self._index(layer)
        self._evaluation.timeline = self.timeline
        with self.timeline.span(CPU, EVALUATE, layer, self.store.step):
            pages = [self._pages(layer, sequence, asked, tokens) for sequence, asked in enumerate(queries)]
        return Selection(self._evaluation.important(layer, queries, tokens, self.first, pages))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Makes the abstracts of pages that have come to the middle; `selection` and `weights` are not looked at."""
        self._index(layer)

    def _index(self, layer: int) -> None:
        missing = self.abstracts.missing(layer, self.store.middle.stop)
        for first in range(missing.start, missing.stop, INDEX_PAGES):
            pages = np.arange(first, min(missing.stop, first + INDEX_PAGES))
            keys = [self.page_keys(layer, sequence, pages) for sequence in range(self.store.batch)]
            self.abstracts.add(layer, first, keys)

    def _pages(self, layer: int, sequence: int, queries: Floats, tokens: int) -> Positions:
        """Pages of the middle, ascending, that are promising for one of the heads."""
        middle = self.store.middle
        wanted = min(len(middle), -(-int(self._promising * tokens) // self.page_tokens))
        begin = min(int(self.first[sequence]) // self.page_tokens, middle.stop - wanted)  # what is before it is padding
        pages = range(max(middle.start, begin), middle.stop)
        found = best_pages(self.abstracts, layer, sequence, queries, pages, wanted, self._combine)
        return np.unique(np.concatenate(found))
