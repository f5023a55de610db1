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


def copy_rows(source: Rows, index: Numbers, positions: Numbers, out: NDArray[Any]) -> None:
    """Copies the rows of one sequence that `source` has to `out` [kv_heads, k, dim], in this thread.

    `index` [pages]: which page of `source` each page of the sequence is, below 0 if none. `positions` [kv_heads, k].
    """
    if not out.size:
        return
    dim, size = out.shape[2], source.pages.shape[2]
    place = (index, positions, size)
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
    words, page_stride, head_stride, index, positions, tokens, out, out_head, out_row, size
):
    for head in range(positions.shape[0]):
        of_head = positions[head]
        for i in range(of_head.size):
            page = index[of_head[i] // tokens]
            if page >= 0:
                # Unsigned: a place that may count from the end cannot be copied in one go.
                at = np.uint64(page * page_stride + head * head_stride + of_head[i] % tokens * size)
                to = np.uint64(head * out_head + i * out_row)
                for j in range(size):
                    out[to + np.uint64(j)] = words[at + np.uint64(j)]


@numba.njit(nogil=True, cache=True)
def _copy_scaled(rows, scales, index, positions, tokens, out):  # type: ignore[no-untyped-def]
    for head in range(positions.shape[0]):
        of_head = positions[head]
        for i in range(of_head.size):
            page = index[of_head[i] // tokens]
            if page >= 0:
                token = of_head[i] % tokens
                for j in range(out.shape[2]):
                    out[head, i, j] = np.float32(rows[page, head, token, j]) * scales[page, head, token]
