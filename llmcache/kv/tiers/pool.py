"""The cpu tier of one layer: pages in slots of arrays that grow by doubling, found by their number.

Whoever uses a pool holds `lock`: while one thread copies rows out of a slot, no other gives the slot to another page, and
the arrays do not move. Nobody waits for the disk or the device while holding it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.spill import KvShape
from llmcache.kv.tiers.copying import Rows

Numbers = NDArray[np.int64]
NOT_HERE = -1


class Pool:
    """Slots of pages, [slots, kv_heads, page_tokens, dim]. `slot_of` [numbers] int64: where a page is, NOT_HERE if nowhere.

    `most`: slots that are enough in the mean.
    `since` [numbers]: a count that tells which page came in first. `down_at` [numbers]: the step in which it last went down.
    """

    def __init__(self, shape: KvShape) -> None:
        self.shape = shape
        self.lock = threading.RLock()
        self.most: int | None = None
        self._free: list[int] = []
        self._slots = 0
        self._clock = 0
        self.slot_of, self.since, self.down_at = (np.empty(0, np.int64) for _ in range(3))
        self._arrays: list[NDArray[Any]] = []
        self._grow(0)

    def _forms(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        shape = self.shape
        rows = (shape.kv_heads, shape.page_tokens)
        forms: list[tuple[tuple[int, ...], np.dtype[Any]]]
        forms = [((*rows, dim), shape.numpy_dtype) for dim in (shape.head_dim, shape.value_dim)]
        return forms + ([(rows, np.dtype(np.float32))] * 2 if shape.dtype == "int8" else [])

    @property
    def keys(self) -> Rows:
        """Keys in all slots, with their scales."""
        return Rows(self._arrays[0], self._arrays[2] if len(self._arrays) > 2 else None)

    @property
    def values(self) -> Rows:
        """Values in all slots, with their scales."""
        return Rows(self._arrays[1], self._arrays[3] if len(self._arrays) > 2 else None)

    @property
    def size_bytes(self) -> int:
        """Memory of all slots, used or not."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def used(self) -> int:
        """Pages in it."""
        return self._slots - len(self._free)

    def know(self, numbers: int) -> None:
        """Makes it know page numbers below `numbers`."""
        with self.lock:
            more = numbers - len(self.slot_of)
            if more > 0:
                self.slot_of = np.concatenate([self.slot_of, np.full(more, NOT_HERE, np.int64)])
                self.since = np.concatenate([self.since, np.zeros(more, np.int64)])
                self.down_at = np.concatenate([self.down_at, np.full(more, -(1 << 62), np.int64)])

    def add(self, numbers: Numbers) -> Numbers:
        """Returns the slots of pages, giving one to each that has none; what is in a new slot is undefined."""
        fresh = numbers[self.slot_of[numbers] == NOT_HERE]
        if len(fresh):
            self._grow(len(fresh))
            self.slot_of[fresh] = [self._free.pop() for _ in range(len(fresh))]
            self.since[fresh] = np.arange(self._clock, self._clock + len(fresh))
            self._clock += len(fresh)
        return self.slot_of[numbers]

    def _grow(self, more: int) -> None:
        """Has at least `more` slots free: doubles up to the bound, and goes beyond it only as far as it must."""
        needed = self._slots - len(self._free) + more
        if needed <= self._slots and self._arrays:
            return
        slots = max(16, 2 * self._slots)
        slots = max(needed, slots if self.most is None else min(slots, self.most))
        old = self._arrays
        self._arrays = [np.empty((slots, *form), dtype) for form, dtype in self._forms()]
        for into, array in zip(self._arrays, old, strict=False):
            into[: self._slots] = array
        self._free = [*range(slots - 1, self._slots - 1, -1), *self._free]
        self._slots = slots

    def drop(self, numbers: Numbers) -> None:
        """Gives the slots of those pages back that have one."""
        slots = self.slot_of[numbers]
        # The lowest on top: slots of neighbours stay neighbours.
        self._free += sorted(slots[slots != NOT_HERE].tolist(), reverse=True)
        self.slot_of[numbers] = NOT_HERE

    def forget(self, numbers: Numbers) -> None:
        """As `drop`, for pages that are no more: their numbers will be those of others."""
        numbers = numbers[numbers < len(self.slot_of)]
        self.drop(numbers)
        self.down_at[numbers] = -(1 << 62)

    def copy(self, source: int, target: int) -> None:
        """Makes page `target` a copy of page `source`."""
        into = self.add(np.array([target]))[0]
        for array in self._arrays:
            array[into] = array[self.slot_of[source]]

    def fill(self, numbers: Numbers, rows: list[NDArray[Any]], offset: int = 0) -> None:
        """Lays tokens out in pages, from token `offset` of the first page on.

        `rows`: keys, values and for int8 their scales, [kv_heads, tokens, ..]; they end in the last of the pages `numbers`.
        """
        slots = self.add(numbers)
        size = self.shape.page_tokens
        first = size - offset if len(slots) > 1 else rows[0].shape[1]
        whole = len(slots) - 2
        for array, part in zip(self._arrays, rows, strict=True):
            array[slots[0], :, offset : offset + first] = part[:, :first]
            if whole > 0:
                middle = part[:, first : first + whole * size]
                array[slots[1:-1]] = middle.reshape(len(part), whole, size, *part.shape[2:]).swapaxes(0, 1)
            if whole >= 0:
                rest = part[:, first + whole * size :]
                array[slots[-1], :, : rest.shape[1]] = rest

    def put(self, numbers: Numbers, pages: list[NDArray[Any]]) -> None:
        """Lays whole pages in: `pages` are keys, values and for int8 their scales, each [pages, ..]."""
        slots = self.add(numbers)
        for array, part in zip(self._arrays, pages, strict=True):
            array[slots] = part

    def take(self, slots: Numbers) -> list[NDArray[Any]]:
        """Returns copies of keys, values and for int8 their scales in `slots`, [slots, ..]."""
        return [array[slots] for array in self._arrays]

    def rows(self, number: int) -> list[NDArray[Any]]:
        """Returns keys, values and for int8 their scales of a page, [kv_heads, page_tokens, ..]; not copied."""
        return [array[self.slot_of[number]] for array in self._arrays]
