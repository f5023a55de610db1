"""How a vector lies in 16-bit cells: as integers with one scale per vector, as halves, or (for comparison) unrounded.

Differs from the paper: it says "16 bits" and never which. The choice decides the result: a lost exponent bit of a half
wrecks the model at rates that integers hardly notice, so integers are the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
Format = Literal["int16", "fp16", "exact"]
FORMATS: tuple[Format, ...] = ("int16", "fp16", "exact")
LARGEST_HALF = 65504.0


@dataclass
class Stored:
    """Vectors as stored: `bits` [..., dim] and, for int16, `scales` [..., 1], which lie where nothing is lost.

    `exact` holds float32 [..., dim] instead of bits: nothing is rounded, and nothing can be lost.
    """

    bits: Bits
    scales: Floats | None = None
    exact: Floats | None = None


def encode(rows: Floats, how: Format) -> Stored:
    """Returns `rows` [..., dim] as stored. int16: the largest number of a vector becomes 32767."""
    if how == "exact":
        return Stored(np.empty((*rows.shape[:-1], 0), np.uint16), exact=rows.astype(np.float32))
    if how == "fp16":
        limited = np.clip(rows, -LARGEST_HALF, LARGEST_HALF)
        return Stored(limited.astype(np.float16).view(np.uint16))
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(32767), np.float32(1)).astype(np.float32)
    return Stored(np.rint(rows / scales).astype(np.int16).view(np.uint16), scales)


def decode(stored: Stored, how: Format, lost: Bits | None = None, nonfinite: str = "clamp") -> Floats:
    """Returns what is read, float32 [..., dim], if the bits `lost` [..., dim] are flipped.

    `nonfinite`, for halves whose flipped bits are no number: "clamp" reads NaN as 0 and infinities as the largest half,
    "keep" hands them on.
    """
    if stored.exact is not None:
        return stored.exact
    bits = stored.bits if lost is None else stored.bits ^ lost
    if how == "int16":
        assert stored.scales is not None
        return bits.view(np.int16).astype(np.float32) * stored.scales
    numbers = bits.view(np.float16).astype(np.float32)
    if nonfinite == "clamp":
        np.nan_to_num(numbers, copy=False, nan=0.0, posinf=LARGEST_HALF, neginf=-LARGEST_HALF)
    return numbers
