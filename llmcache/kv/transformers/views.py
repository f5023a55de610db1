"""Tensors as numpy arrays and back, without copying: numpy has no bfloat16, so its bits travel as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.errors import UsageError

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
