"""Bringing what a layer attends to side by side: sink, chosen tokens, window and tail, wherever they are.

`stage` does the part that may have to wait for the disk ahead of time; `gather` completes it. One thread stages a layer
while another computes: memory is taken from `Buffers` under a lock, and each result has its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.tiers.config import Gathered, Selection
from llmcache.kv.tiers.copying import copy_pages, mark_missing
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.fetching import Fetcher

Numbers = NDArray[np.int64]
Sides = tuple[NDArray[Any], NDArray[Any]]
KEPT_BUFFERS = 4
"""Free buffers that are kept: of one layer that computes and one that is staged, twice."""


@dataclass
class Staged:
    """Chosen rows of one layer, fetched ahead of time, in memory that has room for sink, window and tail as well."""

    layer: int
    middle: range
    positions: Numbers
    memory: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    tokens: int


class Buffers:
    """Memory that results are gathered in, used again once they are released: fresh memory is slow to get."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []

    def take(self, key_bytes: int, value_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Returns memory for at least so many bytes of keys and of values."""
        with self._lock:
            for index, (keys, values) in enumerate(self._free):
                if keys.size >= key_bytes and values.size >= value_bytes:
                    return self._free.pop(index)
        # An eighth more: the next step needs a little more than this one.
        return np.empty(key_bytes + key_bytes // 8, np.uint8), np.empty(value_bytes + value_bytes // 8, np.uint8)

    def give_back(self, memory: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
        """Takes memory that nobody uses any more."""
        with self._lock:
            self._free = [memory, *self._free][:KEPT_BUFFERS]


class Gatherer:
    """Gathers for one store."""

    def __init__(self, core: Core, fetcher: Fetcher | None) -> None:
        self._core, self._fetcher = core, fetcher
        self._buffers = Buffers()

    def stage(self, layer: int, selection: Selection, length: int | None = None) -> Staged:
        """Fetches the chosen rows of a layer, which will be `length` tokens long when the result is completed."""
        core = self._core
        core.checked(layer)
        middle = core.middle
        positions = self._checked(selection, middle)
        # Else as in a decode step: one token will have been appended.
        expected = self._total(middle, selection.count, core.tokens.length + 1 if length is None else length)
        staged = Staged(layer, middle, positions, self._memory(expected), expected)
        self._copy_in(staged, positions, middle.start * core.shape.page_tokens, True)
        return staged

    def gather(self, layer: int, chosen: Selection | Staged) -> Gathered:
        """Returns all that a layer attends to now."""
        core = self._core
        core.checked(layer)
        size, length = core.shape.page_tokens, int(core.lengths[layer])
        staged = chosen if isinstance(chosen, Staged) else self.stage(layer, chosen, length)
        if staged.layer != layer:
            raise ValueError(f"staged: it is of layer {staged.layer}, not of {layer}")
        lead, end = staged.middle.start * size, staged.middle.stop * size
        count = staged.positions.shape[2]
        total = self._total(staged.middle, count, length)
        if total != staged.tokens:
            self._resize(staged, lead, count, total)
        positions = np.concatenate([self._span(0, lead), staged.positions, self._span(end, length)], axis=2)
        self._copy_in(staged, positions[:, :, :lead], 0, False)
        self._copy_in(staged, positions[:, :, lead + count :], lead + count, False)
        keys, values = self._views(staged)
        return Gathered(keys, values, positions, partial(self._buffers.give_back, staged.memory))

    def positions(self, layer: int, selection: Selection) -> Numbers:
        """Returns the positions [batch, kv_heads, k] of all that a layer attends to now."""
        middle, size = self._core.middle, self._core.shape.page_tokens
        chosen = self._checked(selection, middle)
        length = int(self._core.lengths[layer])
        return np.concatenate([self._span(0, middle.start * size), chosen, self._span(middle.stop * size, length)], axis=2)

    def _checked(self, selection: Selection, middle: range) -> Numbers:
        core, found = self._core, selection.positions
        if found.shape[:2] != (core.table.batch, core.shape.kv_heads):
            raise ValueError(f"positions: shape {found.shape}, [{core.table.batch}, {core.shape.kv_heads}, k] is needed")
        size = core.shape.page_tokens
        if found.size and (found[..., 0].min() < middle.start * size or found[..., -1].max() >= middle.stop * size):
            raise ValueError(f"positions: only tokens {middle.start * size} to {middle.stop * size - 1} can be chosen")
        # The compiled loops are made for one kind of array.
        plain = found.flags.writeable and found.strides[2] == found.itemsize
        return found if plain else found.copy()

    def _total(self, middle: range, count: int, length: int) -> int:
        return length - len(middle) * self._core.shape.page_tokens + count

    def _span(self, start: int, stop: int) -> Numbers:
        heads = (self._core.table.batch, self._core.shape.kv_heads)
        return np.broadcast_to(np.arange(start, stop, dtype=np.int64), (*heads, stop - start))

    def _memory(self, tokens: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        shape = self._core.shape
        rows = self._core.table.batch * shape.kv_heads * tokens * self._dtype().itemsize
        return self._buffers.take(rows * shape.head_dim, rows * shape.value_dim)

    def _dtype(self) -> np.dtype[Any]:
        shape = self._core.shape
        return np.dtype(np.float32) if shape.dtype == "int8" else shape.numpy_dtype

    def _views(self, staged: Staged) -> Sides:
        shape, dtype = self._core.shape, self._dtype()
        forms = ((self._core.table.batch, shape.kv_heads, staged.tokens, dim) for dim in (shape.head_dim, shape.value_dim))
        keys, values = (
            memory[: int(np.prod(form)) * dtype.itemsize].view(dtype).reshape(form)
            for memory, form in zip(staged.memory, forms, strict=True)
        )
        return keys, values

    def _resize(self, staged: Staged, lead: int, count: int, total: int) -> None:
        """Moves the chosen rows to memory for `total` tokens: more were appended meanwhile than one, or none."""
        old, memory = self._views(staged), staged.memory
        staged.memory, staged.tokens = self._memory(total), total
        for into, rows in zip(self._views(staged), old, strict=True):
            into[:, :, lead : lead + count] = rows[:, :, lead : lead + count]
        self._buffers.give_back(memory)

    def _copy_in(self, staged: Staged, positions: Numbers, first: int, chosen: bool) -> None:
        """Copies the rows at `positions` [batch, kv_heads, k] to `first` and behind it."""
        if not positions.size:
            return
        sides = self._views(staged)
        outs = [side[:, :, first : first + positions.shape[2]] for side in sides]
        pool = self._core.checked(staged.layer)
        table = self._core.table.table
        with pool.lock:
            pool.know(self._core.table.numbers)  # another layer may have got pages since it was checked
            index = pool.slot_of[table]
            marked = [mark_missing(*pair, self._core.shape.page_tokens) for pair in zip(index, positions, strict=True)]
            missing = sum(count for count, _ in marked)
            if missing < positions.size:
                copy_pages((pool.keys, pool.values), index, positions, outs, self._core.config.threads)
        if missing and self._fetcher is not None:
            # Not under the lock: who waits for the disk must not keep others from the pool.
            self._fetcher.fetch(staged.layer, [pages for _, pages in marked], positions, outs)
        if chosen:
            self._core.traffic.add_hits(cpu=positions.size - missing, ssd=missing)
