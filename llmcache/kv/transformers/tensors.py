"""Tensors as numpy arrays and back, without copying, and attention masks cut to the tokens that count.

Numpy has no bfloat16, so its bits travel as uint16. Masks are made for all tokens, as a model knows no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.errors import UsageError

Numbers = NDArray[np.int64]
NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The types a cache can hold, and their names in `KvShape.dtype`."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of `dtype` in a spill file; UsageError for a type that has none."""
    if dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise UsageError(f"dtype: keys and values of type {dtype}, known are {known}", "load the model with one of them")
    return NAMES[dtype]


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns `tensor` as numpy has it, sharing its memory where it lies on the host."""
    found = tensor.detach().cpu()
    if found.dtype == torch.bfloat16:
        bits: NDArray[Any] = found.view(torch.int16).numpy().view(np.uint16)
        return bits
    return found.numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns `array` as a tensor of `dtype` on `device`, sharing its memory on the host; uint16 are bits of bfloat16."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def first_tokens(mask: torch.Tensor | None, batch: int) -> Numbers:
    """Returns the first token of each sequence that is not padding [batch], by the newest query's row of `mask`.

    `mask` [batch or 1, heads or 1, queries, tokens], booleans or numbers to add; None: there is no padding. A sequence
    that is all padding so far has as its first the one after the last.
    """
    if mask is None:
        return np.zeros(batch, np.int64)
    seen = visible(mask[:, 0, -1]).expand(batch, -1)
    first = torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
    found: Numbers = first.cpu().numpy().astype(np.int64)
    return found


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Returns which entries of `mask` let a token be seen."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def cut_mask(mask: torch.Tensor | None, positions: Numbers, heads: int) -> torch.Tensor | None:
    """Returns the columns of `mask` [batch or 1, heads or 1, 1, tokens] at `positions` [batch, kv_heads, k].

    [batch, heads, 1, k]; the mask itself where all tokens are there, as every head then has the same.
    """
    batch, kv_heads, count = positions.shape
    if mask is None or count == mask.shape[3]:
        return mask
    index = torch.from_numpy(positions).to(mask.device).repeat_interleave(heads // kv_heads, 1)
    return mask.expand(batch, heads, -1, -1).gather(3, index[:, :, None])
