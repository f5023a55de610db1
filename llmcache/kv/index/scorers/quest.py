"""Quest: the smallest and the largest number of each channel of a page bound the scores of its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.transforms import single
from llmcache.kv.index.scorers.base import Floats, Grown, Positions, Scorer, ScorerSettings, as_pages
from llmcache.kv.kernels import score_pages, top
from llmcache.kv.spill.shape import KvShape


class Quest(Scorer):
    """Keeps 2 of a page's 16 rows; gives the whole pages with the largest bounds, those tokens that fit of the last.

    The bound of query q is the product of [max(q, 0), min(q, 0)] with [largest, smallest]: one product with a row twice as
    long, which the kernels of scoring compute.
    Source: Tang et al., Quest, ICML 2024, section 3; baseline of icecache.txt, section 2.2.
    """

    name = "quest"

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first, settings)
        self._boxes = Grown((shape.kv_heads, 2 * shape.head_dim), np.dtype(np.float32))

    @property
    def size_bytes(self) -> int:
        """Memory of the summaries."""
        return self._boxes.size_bytes

    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None:
        pages = as_pages(single(keys, scales), self.shape.page_tokens)
        self._boxes.append(np.concatenate([pages.max(axis=2), pages.min(axis=2)], axis=-1))

    def _crop(self, end: int) -> None:
        self._boxes.cut((end - self.first) // self.shape.page_tokens)

    def bounds(self, queries: Floats) -> Floats:
        """Returns the bounds [kv_heads, pages] of the scores of each page's keys, combined as scores are."""
        asked = np.concatenate([np.maximum(queries, 0), np.minimum(queries, 0)], axis=1)
        rows = self._boxes.rows[:, :, None]  # to the kernels, pages of one token
        return score_pages(asked, rows, combine=self.settings.combine, threads=self.settings.threads)

    def _top(self, queries: Floats, k: int) -> Positions:
        size = self.shape.page_tokens
        bounds = self.bounds(queries)
        self.touched = 2 * bounds.shape[1]
        count, rest = -(-k // size), -k % size
        pages = top(bounds, count, self.settings.threads)
        tokens: Positions = (pages[..., None] * size + np.arange(size)).reshape(len(pages), -1)
        if rest:  # of the page with the least bound only the first tokens fit
            least = np.take_along_axis(bounds, pages, 1).argmin(axis=1)
            kept = np.ones(tokens.shape, bool)
            for head, page in enumerate(least):
                kept[head, (page + 1) * size - rest : (page + 1) * size] = False
            tokens = tokens[kept].reshape(len(pages), k)
        return tokens + self.first
