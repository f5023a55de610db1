"""Calls of attention functions: conversions between tensors and numpy arrays without copies, masks, and the GPU tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.spill.layout import DTYPES
from llmcache.kv.tiers import Gathered, repeated

Output = tuple[torch.Tensor, torch.Tensor | None]


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
    """Return `tensor` as an array, which shares its memory if that is on the host; bfloat16 as its bits, uint16."""
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

    `mask` [batch or 1, heads or 1, queries, tokens] is boolean or additive; None means no padding. For a sequence of
    padding only, the result is the number of tokens.
    """
    if mask is None:
        return np.zeros(batch, np.int64)
    seen = visible(mask[:, 0, -1]).expand(batch, -1)
    first = torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
    return first.cpu().numpy().astype(np.int64)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Return which entries of `mask` make a token visible."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def cut_mask(mask: torch.Tensor | None, positions: Int64s, query: torch.Tensor) -> torch.Tensor | None:
    """Return the mask [batch, heads, 1, k] of the chosen `positions` [batch, kv_heads, k], with `repeated` ones hidden.

    `mask` [batch or 1, heads or 1, 1, tokens]. `query` [batch, heads, 1, dim] gives the heads, type and device. None: no
    token is hidden.
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


@dataclass
class Call:
    """Arguments of a call of an attention function: `stock` is transformers' own, `options` its further arguments.

    `query` [batch, heads, tokens, dim], `key` and `value` [batch, kv_heads, tokens, dim] are of the new tokens only;
    `mask` is [batch or 1, heads or 1, tokens, all tokens], or None if only future tokens are masked.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    stock: Callable[..., Output]

    @property
    def tokens(self) -> int:
        return int(self.query.shape[2])

    def run(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Output:
        return self.stock(self.module, self.query, key, value, mask, **self.options)

    def run_chosen(self, gathered: Gathered, length: int, weighed: bool) -> tuple[Output, Floats | None]:
        """Return the output for the gathered rows of a context of `length` tokens and, if `weighed`, the attention weights.

        It avoids cuDNN, which takes about 20 ms to plan for each new number of keys, so in every layer.
        """
        keys, values = self.tensors(gathered)
        mask = cut_mask(self.mask, gathered.positions, self.query)
        if self.query.device.type == "cuda" and keys.shape[2] <= length:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                output = self.run(keys, values, mask)
        else:
            output = self.run(keys, values, mask)
        return output, _weights(self, keys, mask, output[1]) if weighed else None

    def arrays(self, with_queries: bool = True) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
        queries = self.query if with_queries else self.query[:, :, :0]
        return as_array(queries.float().contiguous()), as_array(self.key), as_array(self.value)

    def tensors(self, gathered: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_tensor(gathered.keys):
            return gathered.keys, gathered.values
        keys, values = (as_tensor(side, self.key.dtype, self.key.device) for side in (gathered.keys, gathered.values))
        return keys, values


def refuse_backward(output: torch.Tensor) -> None:
    """Make a backward pass through `output` an error: stored keys are copies, through which no gradient flows."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UsageError("backward: a SpillCache does not support gradients", "train with transformers' own cache")

    if output.requires_grad:
        output.register_hook(refuse)


def with_unseen(output: torch.Tensor, shares: Floats, values: Floats) -> torch.Tensor:
    """Replace `shares` [batch, heads] of an output [batch, 1, heads, dim] by `values` [batch, kv_heads, dim]."""
    each = np.repeat(values, shares.shape[1] // values.shape[1], axis=1)
    target, share = (torch.from_numpy(side).to(output.device) for side in (each[:, None], shares[:, None, :, None]))
    found = torch.lerp(output.float(), target, share)
    return found.to(output.dtype)


def _weights(call: Call, keys: torch.Tensor, mask: torch.Tensor | None, weights: torch.Tensor | None) -> Floats:
    if weights is None:
        batch, heads, _, dim = call.query.shape
        grouped = call.query.float().view(batch, keys.shape[1], -1, dim)
        scores = (grouped @ keys.float().transpose(2, 3)).view(batch, heads, 1, -1)
        scores = scores * (call.options.get("scaling") or dim**-0.5)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
    return as_array(weights[:, :, 0].float().contiguous())


class TorchFastTier:
    """A `FastTier` of up to `pages` pages on a torch `device`, with one LRU order for all layers."""

    def __init__(self, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.dtype, self.device = pages, dtype, device
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(pages))
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def have(self, layer: int, pages: Int64s) -> Flags:
        found = np.array([(layer, page) in self._slots for page in pages.tolist()], np.bool_)
        for page in pages[found].tolist():
            self._slots.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Int64s, keys: NDArray[Any], values: NDArray[Any]) -> None:
        if len(pages) > self.pages:
            raise ValueError(f"pages: must be at most {self.pages} at once, not {len(pages)}")
        slots = torch.tensor([self._slot(layer, page) for page in pages.tolist()], dtype=torch.int64, device=self.device)
        self._keys = self._write(self._keys, slots, keys)
        self._values = self._write(self._values, slots, values)

    def rows(self, layer: int, pages: Int64s, offsets: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        used, where = np.unique(pages, return_inverse=True)
        missing = [page for page in used.tolist() if (layer, page) not in self._slots]
        if missing or self._keys is None or self._values is None:
            raise ValueError(f"pages: one gather needs {len(used)}, but there is room for {self.pages}")
        slots = np.array([self._slots[layer, page] for page in used.tolist()], np.int64)[where.reshape(pages.shape)]
        heads = np.broadcast_to(np.arange(pages.shape[1])[:, None], pages.shape)
        index = tuple(torch.tensor(part, device=self.device) for part in (slots, heads, offsets))
        return self._keys[index], self._values[index]

    def drop(self, pages: Int64s) -> None:
        dropped = set(pages.tolist())
        for key in [key for key in self._slots if key[1] in dropped]:
            self._free.append(self._slots.pop(key))

    def _slot(self, layer: int, page: int) -> int:
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
