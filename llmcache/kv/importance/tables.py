"""TokenTable: numbers that a policy keeps for each token, by layer and sequence, in arrays that grow with the context."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Kind = TypeVar("Kind", bound=np.generic)
_SLACK = 1024
"""Tokens that a table grows by at least: growing is a copy."""


class TokenTable(Generic[Kind]):
    """Rows of `shape` for each token (or page: whatever is counted); zero until they are written.

    One thread at a time uses the tables of one layer.
    """

    def __init__(self, layers: int, batch: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        self._empty: NDArray[Kind] = np.zeros((0, *shape), dtype)
        self._tables: list[list[NDArray[Any]]] = [[self._empty] * batch for _ in range(layers)]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tables, room for growth included."""
        return sum(table.nbytes for tables in self._tables for table in tables)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._tables[0])

    def rows(self, layer: int, sequence: int, count: int) -> NDArray[Kind]:
        """Returns the first `count` rows [count, *shape]; a view to read and to write."""
        table = self._tables[layer][sequence]
        if len(table) < count:
            grown = np.zeros((count + max(_SLACK, count // 8), *table.shape[1:]), table.dtype)
            grown[: len(table)] = table
            self._tables[layer][sequence] = table = grown
        found: NDArray[Kind] = table[:count]
        return found

    def whole(self, layer: int, sequence: int) -> NDArray[Kind]:
        """Returns all rows that there is room for; a view."""
        found: NDArray[Kind] = self._tables[layer][sequence]
        return found

    def crop(self, count: int, layer: int | None = None) -> None:
        """Sets all rows from number `count` on to zero, in `layer` or (None) in all."""
        for tables in self._tables if layer is None else [self._tables[layer]]:
            for table in tables:
                table[count:] = 0

    def reorder(self, index: NDArray[np.int64]) -> None:
        """Gives sequence i the rows of what was sequence `index[i]`."""
        self._tables = [[tables[old].copy() for old in index] for tables in self._tables]
