"""Copying chosen rows of pages side by side, as they are: one compiled loop for every type, another one for int8.

All that the compiled loops contain is in this file: numba keeps them by its date alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.threads import Job, processors, run_all

EVERYWHERE = range(1 << 62)
"""All positions."""
FEW_BYTES = 1 << 22
"""Rows that are copied in less time than it takes to hand them to threads."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Pages of keys or values in memory, [n, kv_heads, page_tokens, dim]; int8 has `scales` [n, kv_heads, page_tokens]."""

    pages: NDArray[Any]
    scales: NDArray[np.float32] | None = None

    def of_heads(self, heads: slice) -> Rows:
        """Returns those of some heads alone; not copied."""
        return Rows(self.pages[:, heads], None if self.scales is None else self.scales[:, heads])


def copy_pages(
    sides: tuple[Rows, Rows], index: Numbers, positions: Numbers, outs: list[NDArray[Any]], threads: int | None
) -> None:
    """Copies the rows that `sides` (keys, values) have to `outs` [batch, kv_heads, k, dim]; the others stay.

    `index` [batch, pages]: which page of `sides` each page of a sequence is, below 0 if none. `positions` [batch, kv_heads,
    k].
    """
    jobs: list[Job] = []
    for rows, out in zip(sides, outs, strict=True):
        for b in range(len(index)):
            if positions.size * out.shape[3] * out.itemsize < FEW_BYTES:
                copy_rows(rows, index[b], positions[b], out[b])
            else:
                jobs += _jobs(rows, index[b], positions[b], out[b], threads or processors())
    run_all(jobs, threads)


def _jobs(source: Rows, index: Numbers, positions: Numbers, out: NDArray[Any], threads: int) -> Iterator[Job]:
    """What copies the rows of one sequence, in about as many parts as there are threads, or as heads."""
    heads, count = positions.shape
    share = max(1, heads * count // threads)
    for head in range(heads):
        one = slice(head, head + 1)
        part = source.of_heads(one)
        for first in range(0, count, share):
            some = slice(first, first + share)
            yield partial(copy_rows, part, index, positions[one, some], out[one, some])


class Landing:
    """Where rows go whose pages come a few at a time, taken by many threads: each writes what no other does.

    `index` [batch, pages]: the place among all that come that each page of a sequence has, below 0 if none; pages come in
    the order that sequences have them in. `positions` [batch, kv_heads, k], ascending; `outs`: keys and values [batch,
    kv_heads, k, dim].
    """

    def __init__(self, index: Numbers, positions: Numbers, outs: list[NDArray[Any]], page_tokens: int) -> None:
        self._index, self._positions, self._outs = index, positions, outs
        self._page_tokens = page_tokens
        self._coming = [np.flatnonzero(of_sequence >= 0) for of_sequence in index]

    def take(self, side: int, first: int, rows: NDArray[Any], scales: NDArray[np.float32] | None) -> None:
        """Copies what is wanted of the keys (`side` 0) or values (1) of the pages from place `first` on."""
        for index, coming, positions, out in zip(self._index, self._coming, self._positions, self._outs[side], strict=True):
            low, high = np.searchsorted(index[coming], (first, first + len(rows))).tolist()
            if low < high:
                part = range(coming[low] * self._page_tokens, (coming[high - 1] + 1) * self._page_tokens)
                copy_rows(Rows(rows, scales), index, positions, out, first, part)


def copy_rows(
    source: Rows, index: Numbers, positions: Numbers, out: NDArray[Any], first: int = 0, part: range = EVERYWHERE
) -> None:
    """Copies the rows of one sequence that `source` has to `out` [kv_heads, k, dim], in this thread.

    `index` [pages]: which page of `source` each page of the sequence is, counted from `first` on, another number if none.
    `positions` [kv_heads, k], ascending, are looked at only within `part`.
    """
    if not out.size:
        return
    dim, size = out.shape[2], source.pages.shape[2]
    place = (first, len(source.pages), index, positions, part.start, part.stop, size)
    if source.scales is not None:
        _copy_scaled(source.pages, source.scales, *place, out)
        return
    word = np.dtype(np.uint64 if dim * out.itemsize % 8 == 0 else np.uint8)
    words, strides = _in_words(source.pages, word)
    into, into_strides = _in_words(out[:, :, None], word)
    _copy_words(words, *strides, *place, into, into_strides[0], into_strides[1], dim * out.itemsize // word.itemsize)


def _in_words(rows: NDArray[Any], word: np.dtype[Any]) -> tuple[NDArray[Any], tuple[int, int]]:
    """All from the first of `rows` [a, b, .., dim] to their last as words, and the words along the first two axes."""
    span = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) + rows.itemsize
    flat = np.lib.stride_tricks.as_strided(rows, (span // rows.itemsize,), (rows.itemsize,))
    return flat.view(word), (rows.strides[0] // word.itemsize, rows.strides[1] // word.itemsize)


def mark_missing(index: Numbers, positions: Numbers, tokens: int) -> tuple[int, Numbers]:
    """Returns how many of `positions` [kv_heads, k] are in pages whose `index` is below 0, and these pages, ascending."""
    marks = np.zeros(len(index), np.uint8)
    count = sum(_mark(index, of_head, tokens, marks) for of_head in positions) if (index < 0).any() else 0
    return count, np.flatnonzero(marks)


@numba.njit(nogil=True, cache=True)
def _mark(index, positions, tokens, marks):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(positions.size):
        page = positions[i] // tokens
        if index[page] < 0:
            marks[page] = 1
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _copy_words(  # type: ignore[no-untyped-def]
    words, page_stride, head_stride, first, pages, index, positions, begin, end, tokens, out, out_head, out_row, size
):
    for head in range(positions.shape[0]):
        of_head = positions[head]
        i = np.searchsorted(of_head, begin)
        while i < of_head.size and of_head[i] < end:
            page, token, many = index[of_head[i] // tokens] - first, of_head[i] % tokens, 1
            if page >= 0 and page < pages:
                # Tokens that follow each other within a page are copied in one go, where their rows touch.
                most = min(tokens - token, of_head.size - i) if out_row == size else 1
                while many < most and of_head[i + many] == of_head[i] + many:
                    many += 1
                # Unsigned: a place that may count from the end cannot be copied in one go.
                at = np.uint64(page * page_stride + head * head_stride + token * size)
                to = np.uint64(head * out_head + i * out_row)
                for j in range(many * size):
                    out[to + np.uint64(j)] = words[at + np.uint64(j)]
            i += many


@numba.njit(nogil=True, cache=True)
def _copy_scaled(rows, scales, first, pages, index, positions, begin, end, tokens, out):  # type: ignore[no-untyped-def]
    for head in range(positions.shape[0]):
        of_head = positions[head]
        i = np.searchsorted(of_head, begin)
        while i < of_head.size and of_head[i] < end:
            page, token = index[of_head[i] // tokens] - first, of_head[i] % tokens
            if page >= 0 and page < pages:
                for j in range(out.shape[2]):
                    out[head, i, j] = np.float32(rows[page, head, token, j]) * scales[page, head, token]
            i += 1
