"""The gpu tier: pages that were sent lately, kept in the memory of the device that attention computes on.

One pair of arrays and one order of use for all layers, so a layer that needs much takes from one that needs little.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.kv.transformers.tensors import Numbers, as_tensor


class TorchFastTier:
    """A `FastTier` of up to `pages` pages of `dtype` on a torch `device`; sizes are those of the first page put there.

    `moved_bytes`: what was copied to the device so far.
    """

    def __init__(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        if pages < 1:
            raise ValueError(f"pages: {pages}, at least 1 is needed")
        self.dtype, self.device, self.moved_bytes = dtype, device, 0
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(pages))
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory it takes on the device, from the first page on."""
        sides = (side for side in (self._keys, self._values) if side is not None)
        return sum(side.numel() * side.element_size() for side in sides)

    def have(self, layer: int, pages: Numbers) -> NDArray[np.bool_]:
        """Returns for each of `pages` whether it is there, and counts it as used."""
        found = np.array([(layer, page) in self._slots for page in pages.tolist()], np.bool_)
        for page in pages[found].tolist():
            self._slots.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Numbers, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copies pages [n, kv_heads, page_tokens, dim], in place of the longest unused; ValueError if n is more than fit."""
        room = len(self._slots) + len(self._free)
        if len(pages) > room:
            raise ValueError(f"pages: room for {room}, {len(pages)} are used at once")
        slots = torch.tensor([self._slot(layer, page) for page in pages.tolist()], dtype=torch.int64, device=self.device)
        self._keys = self._filled(self._keys, slots, keys, room)
        self._values = self._filled(self._values, slots, values, room)

    def rows(self, layer: int, pages: Numbers, offsets: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [batch, kv_heads, k, dim] on the device: head h's rows `offsets` in `pages`, both [.., k].

        ValueError if a page had to go for others of the same gather.
        """
        used, where = np.unique(pages, return_inverse=True)
        missing = [page for page in used.tolist() if (layer, page) not in self._slots]
        if missing or self._keys is None or self._values is None:
            room = len(self._slots) + len(self._free)
            raise ValueError(f"pages: room for {room}, too little for the {len(used)} that one gather needs")
        slots = np.array([self._slots[layer, page] for page in used.tolist()], np.int64)[where.reshape(pages.shape)]
        heads = np.broadcast_to(np.arange(pages.shape[1])[:, None], pages.shape)
        index = tuple(torch.tensor(part, device=self.device) for part in (slots, heads, offsets))
        return self._keys[index], self._values[index]

    def drop(self, pages: Numbers) -> None:
        """Forgets pages, in all layers."""
        gone = set(pages.tolist())
        for key in [key for key in self._slots if key[1] in gone]:
            self._free.append(self._slots.pop(key))

    def _slot(self, layer: int, page: int) -> int:
        """The slot for a page: its own, a free one, or that of the page that was not used for longest."""
        if (layer, page) in self._slots:
            slot = self._slots.pop((layer, page))
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._slots.popitem(last=False)[1]
        self._slots[layer, page] = slot
        return slot

    def _filled(self, side: torch.Tensor | None, slots: torch.Tensor, rows: NDArray[Any], room: int) -> torch.Tensor:
        sent = as_tensor(np.ascontiguousarray(rows), self.dtype, self.device)
        self.moved_bytes += rows.nbytes
        if side is None:
            side = torch.empty((room, *sent.shape[1:]), dtype=self.dtype, device=self.device)
        side[slots] = sent
        return side
