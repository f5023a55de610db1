"""What a spill file holds: whose keys and values, of which shape and type, and how they lie in the slots of its pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
"""What O_DIRECT needs: offsets, lengths and addresses are multiples of it."""

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has none: the bits
    "int8": np.dtype(np.int8),
}
"""Names of the types of keys and values, and the numpy type that carries them."""

Bytes = NDArray[np.uint8]


def whole_blocks(size_bytes: int) -> int:
    """Returns `size_bytes` rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class KvShape:
    """Identity of a spill file: a file is opened only by what has the same `model`, shape and type.

    `value_dim` 0 stands for `head_dim`. Keys of type int8 carry a float32 scale per token and head, values likewise.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float16"
    page_tokens: int = 16
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or any("\ud800" <= character <= "\udfff" for character in self.model):
            raise ValueError(f"model: {self.model!r}, a text is needed")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r}, known are {', '.join(DTYPES)}")
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("layers", "kv_heads", "head_dim", "page_tokens", "value_dim"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 24:
                raise ValueError(f"{name}: {value!r}, a whole number of at least 1 is needed")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy type that carries keys and values."""
        return DTYPES[self.dtype]

    @property
    def key_slot_bytes(self) -> int:
        """Bytes of the keys of one page in the file, in whole blocks."""
        return self.slot_bytes(self.head_dim)

    @property
    def value_slot_bytes(self) -> int:
        """Bytes of the values of one page in the file, in whole blocks."""
        return self.slot_bytes(self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer, without padding."""
        scales = 8 if self.dtype == "int8" else 0
        return self.kv_heads * ((self.head_dim + self.value_dim) * self.numpy_dtype.itemsize + scales)

    def slot_bytes(self, dim: int) -> int:
        """Returns the bytes of one page of rows of `dim` in the file, in whole blocks."""
        rows = self.kv_heads * self.page_tokens
        return whole_blocks(rows * (dim * self.numpy_dtype.itemsize + (4 if self.dtype == "int8" else 0)))

    def pages_of(self, tokens: int) -> int:
        """Returns how many pages hold `tokens`."""
        return -(-tokens // self.page_tokens)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class KvPages:
    """Pages as they come from a file: arrays [pages, kv_heads, page_tokens, dim] over one buffer, not copied.

    `tokens` [pages]: how many tokens of each page are filled; what lies behind them is zero. Scales, float32
    [pages, kv_heads, page_tokens], only for int8.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    tokens: NDArray[np.int64]
    key_scales: NDArray[np.float32] | None = None
    value_scales: NDArray[np.float32] | None = None


class Room:
    """Memory for up to `pages` pages of keys and values, to fetch into again and again: fresh memory is slow to get."""

    def __init__(self, shape: KvShape, pages: int) -> None:
        sizes = (shape.key_slot_bytes, shape.value_slot_bytes)
        self.sides = tuple(aligned(pages * size).reshape(pages, size) for size in sizes)

    def __len__(self) -> int:
        return len(self.sides[0])


def aligned(size_bytes: int) -> Bytes:
    """Returns a buffer of `size_bytes` whose address O_DIRECT accepts; its contents are undefined."""
    raw = np.empty(size_bytes + BLOCK_BYTES, np.uint8)
    skip = -raw.ctypes.data % BLOCK_BYTES
    return raw[skip : skip + size_bytes]


def view_slots(shape: KvShape, slots: Bytes, dim: int) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Returns the rows [pages, kv_heads, page_tokens, dim] in `slots` [pages, slot bytes], and their scales (int8)."""
    pages, rows = len(slots), shape.kv_heads * shape.page_tokens
    size = rows * dim * shape.numpy_dtype.itemsize
    data = slots[:, :size].view(shape.numpy_dtype).reshape(pages, shape.kv_heads, shape.page_tokens, dim)
    if shape.dtype != "int8":
        return data, None
    scales = _scales_of(shape, slots, size)
    return data, scales


def _scales_of(shape: KvShape, slots: Bytes, at: int) -> NDArray[np.float32]:
    rows = shape.kv_heads * shape.page_tokens
    at = -(-at // 4) * 4
    scales: NDArray[np.float32] = slots[:, at : at + 4 * rows].view(np.float32)
    return scales.reshape(len(slots), shape.kv_heads, shape.page_tokens)


def fill_slots(shape: KvShape, slots: Bytes, rows: NDArray[Any], scales: NDArray[np.float32] | None) -> None:
    """Lays `rows` [kv_heads, tokens, dim] out in `slots` [pages, slot bytes]; what they do not fill becomes zero."""
    slots[:] = 0
    into, into_scales = view_slots(shape, slots, rows.shape[2])
    _lay_out(into, rows, shape.page_tokens)
    if into_scales is not None and scales is not None:
        _lay_out(into_scales, scales, shape.page_tokens)


def _lay_out(into: NDArray[Any], rows: NDArray[Any], page_tokens: int) -> None:
    heads, tokens = rows.shape[:2]
    full, rest = divmod(tokens, page_tokens)
    whole = rows[:, : full * page_tokens].reshape(heads, full, page_tokens, *rows.shape[2:])
    into[:full] = whole.swapaxes(0, 1)
    if rest:
        into[full, :, :rest] = rows[:, full * page_tokens :]


def checked_rows(shape: KvShape, rows: NDArray[Any], scales: NDArray[Any] | None, kind: str) -> NDArray[Any]:
    """Returns `rows` [kv_heads, tokens, dim] if they fit `shape`; ValueError naming `kind` ("keys", "values") if not."""
    dim = shape.head_dim if kind == "keys" else shape.value_dim
    if rows.ndim != 3 or rows.shape[0] != shape.kv_heads or rows.shape[2] != dim or not rows.shape[1]:
        raise ValueError(f"{kind}: shape {rows.shape}, [{shape.kv_heads}, tokens, {dim}] is needed")
    if rows.dtype != shape.numpy_dtype:
        raise ValueError(f"{kind}: type {rows.dtype}, {shape.dtype} as {shape.numpy_dtype} is needed")
    if (scales is not None) != (shape.dtype == "int8"):
        raise ValueError(f"{kind}: scales belong to int8 and only to int8, the type is {shape.dtype}")
    if scales is not None and (scales.shape != rows.shape[:2] or scales.dtype != np.float32):
        raise ValueError(f"{kind}: scales {scales.dtype} {scales.shape}, float32 {rows.shape[:2]} is needed")
    return rows
