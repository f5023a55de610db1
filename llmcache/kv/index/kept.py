"""KeyIndexes: the scorers of a store, one for each layer and sequence, fed with the pages that have left the window.

Concurrency: used by a policy, so by one thread at a time (see `KvPolicy`). With look-ahead that is the engine's worker:
the keys of layer l are indexed there while the caller computes layer l + 1, since the loops that do it hold no GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.scorers.base import Scorer
from llmcache.kv.tiers import KvStore, Selection

Positions = NDArray[np.int64]
FEED_PAGES = 512
"""Pages whose keys are read at a time from the store when many are missing; a prefill's keys come all at once."""


class KeyIndexes:
    """Scorers that know the keys of a store's middle; `make` returns an empty one for tokens from a given number on.

    Sequences that were forked share a scorer until one of them gets a page of its own.
    """

    def __init__(self, store: KvStore, make: Callable[[int], Scorer]) -> None:
        self.store, self._make = store, make
        self.scorers: list[list[Scorer | None]] = [[None] * store.batch for _ in range(store.shape.layers)]

    @property
    def size_bytes(self) -> int:
        """Memory of all scorers."""
        found = {id(scorer): scorer.size_bytes for layer in self.scorers for scorer in layer if scorer}
        return sum(found.values())

    def feed(self, layer: int, starts: Positions) -> None:
        """Adds what has left the window, as far as the layer was appended; `starts` [batch]: the first token of each."""
        size, config = self.store.shape.page_tokens, self.store.config
        stop = (self.store.layer_length(layer) // size - config.window_pages) * size
        for sequence, start in enumerate(starts):
            scorer = self.scorers[layer][sequence]
            known = int(start) if scorer is None else scorer.end
            if known < stop:
                self._feed_old(self._own(layer, sequence, known), layer, sequence, stop)
        # Of int8, what is gathered has lost its scales: it waits until its step is over.
        if self.store.layer_length(layer) > self.store.length and self.store.shape.dtype != "int8":
            self._feed_new(layer, stop)

    def _feed_old(self, own: Scorer, layer: int, sequence: int, stop: int) -> None:
        """Reads the keys of tokens whose step is over."""
        size = self.store.shape.page_tokens
        end = min(stop, self.store.length // size * size) // size
        for page in range(own.end // size, end, FEED_PAGES):
            pages = np.arange(page, min(end, page + FEED_PAGES))
            keys, scales = self.store.read_keys(layer, sequence, pages)
            own.add(_joined(keys), None if scales is None else _joined(scales))

    def _feed_new(self, layer: int, stop: int) -> None:
        """Takes the keys of a step that is under way: a prefill that is indexed before its last layer is computed."""
        waiting = [own for own in self.scorers[layer] if own is not None and own.end < stop]
        if not waiting:
            return
        with_tail = self.store.gather(layer, Selection.none(self.store.batch, self.store.shape.kv_heads))
        for sequence, own in enumerate(self.scorers[layer]):
            if own is not None and own.end < stop:
                at = int(np.searchsorted(with_tail.positions[sequence, 0], own.end))
                own.add(with_tail.keys[sequence, :, at : at + stop - own.end])
        with_tail.release()

    def _own(self, layer: int, sequence: int, start: int) -> Scorer:
        """The scorer of a sequence, which no other has: what is shared is copied before it is changed."""
        row = self.scorers[layer]
        found = row[sequence]
        if found is None:
            found = self._make(start)
        elif sum(other is found for other in row) > 1:
            found = found.copy()
        row[sequence] = found
        return found

    def forget(self, sequence: int) -> None:
        """Forgets what is known of a sequence."""
        for row in self.scorers:
            row[sequence] = None

    def crop(self, tokens: int) -> None:
        """Forgets all tokens from number `tokens` on, and what now lies in the window."""
        size = self.store.shape.page_tokens
        stop = (tokens // size - self.store.config.window_pages) * size
        for row in self.scorers:
            for scorer in {id(scorer): scorer for scorer in row if scorer}.values():
                scorer.crop(stop)

    def reorder(self, index: Positions) -> None:
        """Gives sequence i what is known of what was sequence `index[i]`."""
        self.scorers = [[row[old] for old in index] for row in self.scorers]


def _joined(pages: NDArray[Any]) -> NDArray[Any]:
    """[pages, kv_heads, page_tokens, ...] as [kv_heads, tokens, ...]."""
    rows = np.ascontiguousarray(pages.swapaxes(0, 1))
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
