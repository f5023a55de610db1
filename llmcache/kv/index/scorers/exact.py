"""Exact: every key is scored, as fast as memory gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.transforms import single
from llmcache.kv.index.scorers.base import Floats, Grown, Positions, Scorer, ScorerSettings, as_pages
from llmcache.kv.kernels import score_pages, top
from llmcache.kv.spill.shape import KvShape


class Exact(Scorer):
    """Keeps all keys as they are (their own size in memory) and scores them all; none is missed."""

    name = "exact"

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first, settings)
        self._keys = Grown((shape.kv_heads, shape.page_tokens, shape.head_dim), shape.numpy_dtype)
        self._scales = Grown((shape.kv_heads, shape.page_tokens), np.dtype(np.float32)) if shape.dtype == "int8" else None

    @property
    def size_bytes(self) -> int:
        """Memory of the keys."""
        return self._keys.size_bytes + (self._scales.size_bytes if self._scales else 0)

    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None:
        self._keys.append(as_pages(keys, self.shape.page_tokens))
        if self._scales is not None and scales is not None:
            self._scales.append(as_pages(scales, self.shape.page_tokens))

    def _crop(self, end: int) -> None:
        pages = (end - self.first) // self.shape.page_tokens
        self._keys.cut(pages)
        if self._scales is not None:
            self._scales.cut(pages)

    def _top(self, queries: Floats, k: int) -> Positions:
        scales = None if self._scales is None else self._scales.rows
        asked, threads = self.settings.combine, self.settings.threads
        self.touched = float(len(self))
        found: Positions = top(score_pages(queries, self._keys.rows, scales, combine=asked, threads=threads), k, threads)
        return found + self.first

    def products(self, queries: Floats) -> Floats:
        """Returns the products [kv_heads, heads of each, tokens] of `queries` [heads, dim] float32 and all keys."""
        grouped = queries.reshape(self.shape.kv_heads, -1, self.shape.head_dim)
        scales = None if self._scales is None else self._scales.rows
        rows, threads = self._keys.rows, self.settings.threads
        return np.stack([score_pages(grouped[:, of], rows, scales, threads=threads) for of in range(grouped.shape[1])], 1)

    def singles(self, first: int, end: int) -> Floats:
        """Returns the keys [kv_heads, tokens, dim] of whole pages of tokens as float32."""
        size = self.shape.page_tokens
        part = slice((first - self.first) // size, (end - self.first) // size)
        scales = None if self._scales is None else self._scales.rows[part]
        pages = single(self._keys.rows[part], scales)
        return np.ascontiguousarray(pages.swapaxes(0, 1)).reshape(self.shape.kv_heads, -1, self.shape.head_dim)
