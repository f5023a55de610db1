"""Conversions between tensors and numpy arrays without copies, attention masks of chosen tokens, and the GPU tier.

Numpy has no bfloat16, so its bits are passed as uint16. The GPU tier caches the pages last sent to the device: one pair
of arrays with one LRU order for all layers, so that a layer that needs more pages can take slots of another.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.arrays import Flags, Int64s
from llmcache.errors import UsageError
from llmcache.kv.spill.layout import DTYPES
from llmcache.kv.tiers import repeated


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in a spill file; UsageError for an unsupported type."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise UsageError(
            f"dtype: of keys and values must be one of {known}, not {dtype}", "load the model with one of these types"
        )
    return name


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return `tensor` as an array that shares its memory if that is on the host."""
    found = tensor.detach().cpu()
    if found.dtype == torch.bfloat16:
        return found.view(torch.int16).numpy().view(np.uint16)
    return found.numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `array` as a tensor of `dtype` on `device`, sharing host memory; uint16 stands for the bits of bfloat16."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def first_tokens(mask: torch.Tensor | None, batch: int) -> Int64s:
    """Return the first token of each sequence [batch] that is not padding, from the newest query's row of `mask`.

    `mask` [batch or 1, heads or 1, queries, tokens] is boolean or additive; None means no padding. For a sequence of padding
    only, the result is the number of tokens.
    """
    if mask is None:
        return np.zeros(batch, np.int64)
    seen = visible(mask[:, 0, -1]).expand(batch, -1)
    first = torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
    return first.cpu().numpy().astype(np.int64)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Return which entries of `mask` make a token visible, as booleans."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def cut_mask(mask: torch.Tensor | None, positions: Int64s, query: torch.Tensor) -> torch.Tensor | None:
    """Return the mask [batch, heads, 1, k] of the chosen `positions` [batch, kv_heads, k], with `repeated` ones hidden.

    `mask` [batch or 1, heads or 1, 1, tokens] is returned unchanged if all tokens are chosen. `query` [batch, heads, 1, dim]
    gives the heads, type and device. Returns None if no token is hidden.
    """
    (batch, kv_heads, count), heads = positions.shape, query.shape[1]
    is_repeated = repeated(positions)
    found = mask
    if mask is not None and count != mask.shape[3]:
        index = torch.from_numpy(positions).to(mask.device).repeat_interleave(heads // kv_heads, 1)
        found = mask.expand(batch, heads, -1, -1).gather(3, index[:, :, None])
    if not is_repeated.any():
        return found
    hidden = is_repeated.repeat(heads // kv_heads, 1)[:, :, None]
    if found is None:  # the common case, in every layer and step: computed in one operation
        least = np.float32(torch.finfo(query.dtype).min)
        return torch.from_numpy(hidden * least).to(query.device, query.dtype)
    least = False if found.dtype == torch.bool else torch.finfo(found.dtype).min
    return found.masked_fill(torch.from_numpy(hidden).to(query.device), least)


class TorchFastTier:
    """A `FastTier` of up to `pages` pages of `dtype` on a torch `device`; the first page that is put sets the page size."""

    def __init__(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.dtype, self.device = pages, dtype, device
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(pages))
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def have(self, layer: int, pages: Int64s) -> Flags:
        """Return which of `pages` are cached, and mark them as used."""
        found = np.array([(layer, page) in self._slots for page in pages.tolist()], np.bool_)
        for page in pages[found].tolist():
            self._slots.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Int64s, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy pages [n, kv_heads, page_tokens, dim] over the least recently used; ValueError if there are too many."""
        if len(pages) > self.pages:
            raise ValueError(f"pages: must be at most {self.pages} at once, not {len(pages)}")
        slots = torch.tensor([self._slot(layer, page) for page in pages.tolist()], dtype=torch.int64, device=self.device)
        self._keys = self._write(self._keys, slots, keys)
        self._values = self._write(self._values, slots, values)

    def rows(self, layer: int, pages: Int64s, offsets: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [batch, kv_heads, k, dim] on the device, of the rows `offsets` in `pages`, both [..., k].

        ValueError: a page of the same gather was evicted.
        """
        used, where = np.unique(pages, return_inverse=True)
        missing = [page for page in used.tolist() if (layer, page) not in self._slots]
        if missing or self._keys is None or self._values is None:
            raise ValueError(f"pages: one gather needs {len(used)}, but there is room for {self.pages}")
        slots = np.array([self._slots[layer, page] for page in used.tolist()], np.int64)[where.reshape(pages.shape)]
        heads = np.broadcast_to(np.arange(pages.shape[1])[:, None], pages.shape)
        index = tuple(torch.tensor(part, device=self.device) for part in (slots, heads, offsets))
        return self._keys[index], self._values[index]

    def drop(self, pages: Int64s) -> None:
        """Remove pages from all layers."""
        dropped = set(pages.tolist())
        for key in [key for key in self._slots if key[1] in dropped]:
            self._free.append(self._slots.pop(key))

    def _slot(self, layer: int, page: int) -> int:
        """Return the slot for a page: its own, a free one, or that of the least recently used page."""
        if (layer, page) in self._slots:
            slot = self._slots.pop((layer, page))
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._slots.popitem(last=False)[1]
        self._slots[layer, page] = slot
        return slot

    def _write(self, side: torch.Tensor | None, slots: torch.Tensor, rows: NDArray[Any]) -> torch.Tensor:
        copied = as_tensor(np.ascontiguousarray(rows), self.dtype, self.device)
        if side is None:
            side = torch.empty((self.pages, *copied.shape[1:]), dtype=self.dtype, device=self.device)
        side[slots] = copied
        return side
