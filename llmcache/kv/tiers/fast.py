"""FastTier: what a store needs of the memory of an accelerator, and one in host memory for machines without any."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class FastTier(Protocol):
    """Pages that were sent lately, kept where attention computes (gpu): `KvStore.gather_fast` sends only what is not there.

    To implement: keep pages of one shape in two arrays [slots, kv_heads, page_tokens, dim] on the device, a dict
    (layer, number) -> slot in the order of use, and an index_select for `rows`. Numbers are the store's: one for a page in
    all layers, shared by the sequences that share the page. The store calls, for each gather of a layer and in this order:
    `have` (touches the pages it finds), `put` with what was missing and with the page that is being filled, `rows`, `drop`
    of the page that is being filled, which will be another at the next step. Pages of a gather must survive until `rows`:
    what is evicted for them is older. The store also calls `drop` when pages are no more, as their numbers will be given to
    others. One thread at a time.
    """

    def have(self, layer: int, pages: Numbers) -> NDArray[np.bool_]:
        """Returns for each of `pages` [n] whether it is there, and counts it as used."""

    def put(self, layer: int, pages: Numbers, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Takes pages, [n, kv_heads, page_tokens, dim] (int8 as float32), in place of the longest unused; copies them.

        ValueError if more pages are used in one gather than there is room.
        """

    def rows(self, layer: int, pages: Numbers, offsets: Numbers) -> tuple[Any, Any]:
        """Returns keys and values [batch, kv_heads, k, dim] of head h's tokens `offsets` [.., k] in `pages` [.., k]."""

    def drop(self, pages: Numbers) -> None:
        """Forgets pages, in all layers."""


class HostFastTier:
    """A FastTier of up to `pages` pages in host memory: what a gpu would do, for tests and for machines without one."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages: {pages}, at least 1 is needed")
        self._most = pages
        self._pages: OrderedDict[tuple[int, int], tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()

    def have(self, layer: int, pages: Numbers) -> NDArray[np.bool_]:
        """Returns for each of `pages` whether it is there, and counts it as used."""
        found = np.array([(layer, int(page)) in self._pages for page in pages], np.bool_)
        for page in pages[found].tolist():
            self._pages.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Numbers, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Takes copies of pages, in place of the longest unused; ValueError if there is no room for them all."""
        if len(pages) > self._most:
            raise ValueError(f"pages: room for {self._most}, {len(pages)} are used at once")
        for index, page in enumerate(pages.tolist()):
            self._pages[layer, page] = (keys[index].copy(), values[index].copy())
            self._pages.move_to_end((layer, page))
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def rows(self, layer: int, pages: Numbers, offsets: Numbers) -> tuple[Any, Any]:
        """Returns keys and values [batch, kv_heads, k, dim]; ValueError if pages of one gather had no room."""
        used = np.unique(pages)
        if not len(used):
            raise ValueError("pages: none, there is nothing to attend to")
        missing = [int(page) for page in used if (layer, int(page)) not in self._pages]
        if missing:
            raise ValueError(f"pages: room for {self._most}, which is too little for the {len(used)} of one gather")
        index = np.searchsorted(used, pages)
        heads = np.arange(pages.shape[1])[:, None]
        sides = (np.stack([self._pages[layer, int(page)][side] for page in used]) for side in (0, 1))
        keys, values = (pages_of[index, heads, offsets] for pages_of in sides)
        return keys, values

    def drop(self, pages: Numbers) -> None:
        """Forgets pages, in all layers."""
        gone = set(pages.tolist())
        for key in [key for key in self._pages if key[1] in gone]:
            del self._pages[key]
