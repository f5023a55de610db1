"""Attention masks of a spilled cache: made for all tokens, as the model knows no others, then cut to those that count."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


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
