"""Scorer: finds the tokens of one layer and sequence whose keys matter most to queries. It keeps what it needs of the keys.

One thread at a time uses a scorer; those of different layers and sequences share nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.settings import DciSettings
from llmcache.kv.spill.shape import KvShape

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class ScorerSettings:
    """`combine`: "max" or "sum" over the query heads of a key head (the tree: see `DciHeads`). `threads`: None for one a
    processor. `whole_pages`: the tree gives the pages of the best keys (algorithm 3), not the best keys alone. `recall`:
    what share of the best keys `auto` asks of the tree; `least`: from how many tokens on it considers it. `dci`: its knobs.

    Differs from the paper: best keys alone by default. There, a page of the tree is what is loaded; here rows are, for each
    head apart, from a file in the order of tokens that all heads share, so that a page would only bring less wanted keys.
    """

    combine: str = "max"
    threads: int | None = None
    whole_pages: bool = False
    recall: float = 0.9
    least: int = 8192
    dci: DciSettings = field(default_factory=DciSettings)


class Scorer(ABC):
    """Keys of consecutive tokens of `shape`'s heads, from number `first` on, in whole pages."""

    name: ClassVar[str]

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        self.shape, self.first = shape, first
        self.settings = settings or ScorerSettings()
        self.end = first
        self.touched = 0.0

    def __len__(self) -> int:
        """Tokens that can be found."""
        return self.end - self.first

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Memory it takes."""

    @property
    def why(self) -> str:
        """Which way of scoring is in use, and why."""
        return f"{self.name}: as asked for"

    def add(self, keys: NDArray[Any], scales: Floats | None = None) -> None:
        """Adds keys [kv_heads, tokens, dim] in the shape's numpy type, of the tokens that follow; whole pages.

        `scales` [kv_heads, tokens], for int8. ValueError names what does not fit.
        """
        heads, size, dim = self.shape.kv_heads, self.shape.page_tokens, self.shape.head_dim
        if keys.ndim != 3 or keys.shape[::2] != (heads, dim) or keys.shape[1] % size or keys.dtype != self.shape.numpy_dtype:
            wanted = f"{self.shape.numpy_dtype} [{heads}, a multiple of {size}, {dim}]"
            raise ValueError(f"keys: {keys.dtype} {keys.shape}, {wanted} is needed")
        if (scales is not None) != (self.shape.dtype == "int8"):
            raise ValueError(f"scales: they belong to int8 keys and only to these, the type is {self.shape.dtype}")
        if keys.shape[1]:
            self._add(keys, scales)
            self.end += keys.shape[1]

    def crop(self, tokens: int) -> None:
        """Forgets all tokens from number `tokens` on, and the page that is not whole any more."""
        size = self.shape.page_tokens
        end = min(self.end, max(self.first, tokens - (tokens - self.first) % size))
        if end < self.end:
            self._crop(end)
            self.end = end

    def top(self, queries: Floats, k: int) -> Positions:
        """Returns tokens [kv_heads, k], ascending, that matter most to `queries` [heads, dim] float32; k at most all.

        `touched` is then how many keys of a head were looked at, in the mean, for all its queries.
        """
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        if queries.ndim != 2 or queries.shape[1] != dim or queries.shape[0] % heads or queries.dtype != np.float32:
            raise ValueError(f"queries: {queries.dtype} {queries.shape}, float32 [a multiple of {heads}, {dim}] is needed")
        if k < 1:
            raise ValueError(f"k: {k}, at least 1 is needed")
        k = min(k, len(self))
        return self._top(queries, k) if k else np.empty((heads, 0), np.int64)

    def copy(self) -> Scorer:
        """Returns one of its own that knows the same."""
        return copy.deepcopy(self)

    @abstractmethod
    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None: ...

    @abstractmethod
    def _crop(self, end: int) -> None: ...

    @abstractmethod
    def _top(self, queries: Floats, k: int) -> Positions: ...


class Grown:
    """An array that grows along its first axis, by a quarter when it is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._array: NDArray[Any] = np.empty((0, *shape), dtype)
        self._used = 0

    @property
    def rows(self) -> NDArray[Any]:
        """What is in it."""
        return self._array[: self._used]

    @property
    def size_bytes(self) -> int:
        """Memory, room for growth included."""
        return self._array.nbytes

    def append(self, rows: NDArray[Any]) -> None:
        """Adds rows at the end."""
        end = self._used + len(rows)
        if end > len(self._array):
            longer = np.empty((max(end, len(self._array) * 5 // 4), *self._array.shape[1:]), self._array.dtype)
            longer[: self._used] = self.rows
            self._array = longer
        self._array[self._used : end] = rows
        self._used = end

    def cut(self, rows: int) -> None:
        """Keeps the first `rows`."""
        self._used = rows


def as_pages(rows: NDArray[Any], page_tokens: int) -> NDArray[Any]:
    """Returns [kv_heads, tokens, ...] as [pages, kv_heads, page_tokens, ...]."""
    pages: NDArray[Any] = rows.reshape(len(rows), -1, page_tokens, *rows.shape[2:]).swapaxes(0, 1)
    return pages
