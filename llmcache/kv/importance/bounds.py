"""Bounds of scores from abstracts: the smallest and the largest number of each channel of a page's keys, and of a chunk's.

No key of a page can have a larger product with a query than the best corner of the box that holds them all.
Source: Sun et al., LeoAM, 2025 (KV abstracts of chunks); Tang et al., Quest, ICML 2024, section 3.
"""

from __future__ import annotations

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.importance.tables import TokenTable


class Abstracts:
    """Boxes around the keys of pages, and around those of chunks of `chunk_pages` pages, by layer and sequence."""

    def __init__(self, layers: int, batch: int, kv_heads: int, dim: int, page_tokens: int, chunk_pages: int) -> None:
        self.page_tokens, self.chunk_pages = page_tokens, chunk_pages
        self._pages, self._chunks = (TokenTable(layers, batch, (2, kv_heads, dim), np.float32) for _ in range(2))
        self._known, self._batch = [0] * layers, batch

    def missing(self, layer: int, pages: int) -> range:
        """Returns which of the first `pages` pages of a layer have no box yet."""
        return range(min(self._known[layer], pages), pages)

    def add(self, layer: int, first: int, keys: list[Floats]) -> None:
        """Takes the keys of pages from `first` on: for each sequence [pages, kv_heads, page_tokens, dim] float32."""
        for sequence, own in enumerate(keys):
            stop = first + len(own)
            boxes = self._pages.rows(layer, sequence, stop)
            own.min(axis=2, out=boxes[first:, 0])
            own.max(axis=2, out=boxes[first:, 1])
            self._join(layer, sequence, first, stop)
            self._known[layer] = stop

    def _join(self, layer: int, sequence: int, first: int, stop: int) -> None:
        """Makes the boxes of all chunks that have pages from `first` to `stop` - 1, the last of all."""
        boxes = self._pages.rows(layer, sequence, stop)
        chunks = self._chunks.rows(layer, sequence, -(-stop // self.chunk_pages))
        for chunk in range(first // self.chunk_pages, len(chunks)):
            inside = boxes[chunk * self.chunk_pages : (chunk + 1) * self.chunk_pages]
            inside[:, 0].min(axis=0, out=chunks[chunk, 0])
            inside[:, 1].max(axis=0, out=chunks[chunk, 1])

    def pages(self, layer: int, sequence: int, queries: Floats, pages: Int64s, combine: str) -> Floats:
        """Returns the bounds [kv_heads, n] of `pages` int64 [n]; `queries` [heads, dim], combined as scores are."""
        return _bounds(self._pages.whole(layer, sequence)[pages], queries, combine)

    def chunks(self, layer: int, sequence: int, queries: Floats, pages: int, combine: str) -> Floats:
        """Returns the bounds [kv_heads, chunks] of the chunks that have the first pages."""
        return _bounds(self._chunks.rows(layer, sequence, -(-pages // self.chunk_pages)), queries, combine)

    def crop(self, tokens: int) -> None:
        """Forgets the boxes of all pages that are not whole any more."""
        pages = tokens // self.page_tokens
        for layer, known in enumerate(self._known):
            if pages < known:
                self._known[layer] = pages
                for sequence in range(self._batch):
                    self._join(layer, sequence, max(0, pages - 1), pages)

    def reorder(self, index: Int64s) -> None:
        """Gives sequence i the boxes of what was sequence `index[i]`."""
        self._batch = len(index)
        self._pages.reorder(index)
        self._chunks.reorder(index)


def _bounds(boxes: Floats, queries: Floats, combine: str) -> Floats:
    """Bounds [kv_heads, n] of the products of `queries` [heads, dim] with keys in `boxes` [n, 2, kv_heads, dim]."""
    kv_heads, dim = boxes.shape[2:]
    grouped = queries.reshape(kv_heads, -1, dim)
    low, high = boxes[:, 0].transpose(1, 2, 0), boxes[:, 1].transpose(1, 2, 0)
    found = np.minimum(grouped, 0) @ low + np.maximum(grouped, 0) @ high
    out: Floats = found.max(axis=1) if combine == "max" else found.sum(axis=1)
    return out


def best_pages(
    abstracts: Abstracts, layer: int, sequence: int, queries: Floats, pages: range, count: int, combine: str
) -> list[Int64s]:
    """Returns for each head the `count` of `pages` with the largest bounds, ascending; looks only into chunks that matter.

    First into those with the largest bounds of their own; then into all that could still have a better page than the
    `count`-th so far. So it finds what the bounds of all pages would tell.
    """
    coarse = abstracts.chunks(layer, sequence, queries, pages.stop, combine)
    known = np.zeros(coarse.shape[1], bool)
    sizes = _pages_inside(pages, coarse.shape[1], abstracts.chunk_pages)
    for bounds in coarse:
        order = np.argsort(-bounds, kind="stable")
        known[order[: int(np.searchsorted(np.cumsum(sizes[order]), count)) + 1]] = True
    found = _inside(known, pages, abstracts.chunk_pages)
    fine = abstracts.pages(layer, sequence, queries, found, combine)
    least = np.partition(fine, len(found) - count, axis=1)[:, len(found) - count]
    found = _inside(known | (coarse > least[:, None]).any(axis=0), pages, abstracts.chunk_pages)
    fine = abstracts.pages(layer, sequence, queries, found, combine)
    return [found[np.sort(np.argsort(-bounds, kind="stable")[:count])] for bounds in fine]


def _pages_inside(pages: range, chunks: int, chunk_pages: int) -> Int64s:
    """How many of `pages` each chunk has, [chunks]."""
    first = np.arange(chunks) * chunk_pages
    sizes: Int64s = np.minimum(first + chunk_pages, pages.stop) - np.maximum(first, pages.start)
    return np.maximum(sizes, 0)


def _inside(chosen: Flags, pages: range, chunk_pages: int) -> Int64s:
    """Those of `pages` that are in chosen chunks, ascending."""
    all_pages = np.arange(pages.start, pages.stop)
    return all_pages[chosen[all_pages // chunk_pages]]
