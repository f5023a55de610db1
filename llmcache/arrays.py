"""Names of array types. The code that uses an array documents its shape, unit and meaning."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]
Uint32s = NDArray[np.uint32]
Uint64s = NDArray[np.uint64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Records = NDArray[np.void]
"""Rows of a structured dtype."""
