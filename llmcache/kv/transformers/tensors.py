"""Tensors as numpy arrays and back, without copying; attention masks cut to the tokens that count; and the gpu tier.

Numpy has no bfloat16, so its bits travel as uint16. Masks are made for all tokens, as a model knows no others. The gpu tier
keeps pages that were sent lately in the memory of the device that attention computes on: one pair of arrays and one order
of use for all layers, so a layer that needs much takes from one that needs little.
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
    """Returns the name of `dtype` in a spill file; UsageError for a type that has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise UsageError(
            f"dtype: of keys and values must be one of {known}, not {dtype}", "load the model with one of these types"
        )
    return name


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns `tensor` as numpy has it, sharing its memory where it lies on the host."""
    found = tensor.detach().cpu()
    if found.dtype == torch.bfloat16:
        return found.view(torch.int16).numpy().view(np.uint16)
    return found.numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns `array` as a tensor of `dtype` on `device`, sharing its memory on the host; uint16 are bits of bfloat16."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def first_tokens(mask: torch.Tensor | None, batch: int) -> Int64s:
    """Returns the first token of each sequence that is not padding [batch], by the newest query's row of `mask`.

    `mask` [batch or 1, heads or 1, queries, tokens], booleans or numbers to add; None: there is no padding. A sequence
    that is all padding so far has as its first the one after the last.
    """
    if mask is None:
        return np.zeros(batch, np.int64)
    seen = visible(mask[:, 0, -1]).expand(batch, -1)
    first = torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
    return first.cpu().numpy().astype(np.int64)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Returns which entries of `mask` let a token be seen."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def cut_mask(mask: torch.Tensor | None, positions: Int64s, query: torch.Tensor) -> torch.Tensor | None:
    """Returns the columns of `mask` [batch or 1, heads or 1, 1, tokens] at `positions` [batch, kv_heads, k], for `query`
    [batch, heads, 1, dim]; what is `repeated` is hidden.

    [batch, heads, 1, k]; the mask itself where all tokens are there, as every head then has the same.
    """
    (batch, kv_heads, count), heads = positions.shape, query.shape[1]
    again = repeated(positions)
    found = mask
    if mask is not None and count != mask.shape[3]:
        index = torch.from_numpy(positions).to(mask.device).repeat_interleave(heads // kv_heads, 1)
        found = mask.expand(batch, heads, -1, -1).gather(3, index[:, :, None])
    if not again.any():
        return found
    hidden = again.repeat(heads // kv_heads, 1)[:, :, None]
    if found is None:  # of every layer and step, mostly: made at once
        least = np.float32(torch.finfo(query.dtype).min)
        return torch.from_numpy(hidden * least).to(query.device, query.dtype)
    least = False if found.dtype == torch.bool else torch.finfo(found.dtype).min
    return found.masked_fill(torch.from_numpy(hidden).to(query.device), least)


class TorchFastTier:
    """A `FastTier` of up to `pages` pages of `dtype` on a torch `device`; sizes are those of the first page put there."""

    def __init__(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.dtype, self.device = pages, dtype, device
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(pages))
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def have(self, layer: int, pages: Int64s) -> Flags:
        """Returns for each of `pages` whether it is there, and counts it as used."""
        found = np.array([(layer, page) in self._slots for page in pages.tolist()], np.bool_)
        for page in pages[found].tolist():
            self._slots.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Int64s, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copies pages [n, kv_heads, page_tokens, dim], in place of the longest unused; ValueError if n is more than fit."""
        if len(pages) > self.pages:
            raise ValueError(f"pages: must be at most {self.pages} at once, not {len(pages)}")
        slots = torch.tensor([self._slot(layer, page) for page in pages.tolist()], dtype=torch.int64, device=self.device)
        self._keys = self._filled(self._keys, slots, keys)
        self._values = self._filled(self._values, slots, values)

    def rows(self, layer: int, pages: Int64s, offsets: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [batch, kv_heads, k, dim] on the device: head h's rows `offsets` in `pages`, both [.., k].

        ValueError if a page had to go for others of the same gather.
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

    def _filled(self, side: torch.Tensor | None, slots: torch.Tensor, rows: NDArray[Any]) -> torch.Tensor:
        sent = as_tensor(np.ascontiguousarray(rows), self.dtype, self.device)
        if side is None:
            side = torch.empty((self.pages, *sent.shape[1:]), dtype=self.dtype, device=self.device)
        side[slots] = sent
        return side
