"""Copying chosen rows of pages side by side, as they are: one compiled loop for every type, another one for int8.

All that the compiled loops contain is in this file: numba keeps them by its date alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.threads import Job, processors, run_all

JOB_BYTES = 1 << 18
"""Rows that are worth handing to a thread."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Pages of keys or values in memory, [n, kv_heads, page_tokens, dim]; int8 has `scales` [n, kv_heads, page_tokens]."""

    pages: NDArray[Any]
    scales: NDArray[np.float32] | None = None


def copy_pages(
    sides: tuple[Rows, Rows], index: Numbers, positions: Numbers, outs: list[NDArray[Any]], threads: int | None
) -> None:
    """Copies the rows that `sides` (keys, values) have to `outs` [batch, kv_heads, k, dim].

    `index` [batch, pages] and `positions` [batch, kv_heads, k]: as `copy_jobs`, for each sequence.
    """
    jobs: list[Job] = []
    for b in range(len(index)):
        for rows, out in zip(sides, outs, strict=True):
            jobs += copy_jobs(rows, index[b], positions[b], out[b], threads)
    run_all(jobs, threads)


def copy_jobs(
    source: Rows, index: Numbers, positions: Numbers, out: NDArray[Any], threads: int | None = None
) -> list[Job]:
    """Returns what copies the rows of one sequence that `source` has to `out` [kv_heads, k, dim]; the others stay.

    `index` [pages]: which page of `source` each page of the sequence is, below 0 if none. `positions` [kv_heads, k].
    """
    heads, count = positions.shape
    tokens = source.pages.shape[2]
    row_bytes = out.shape[2] * out.itemsize
    share = max(JOB_BYTES // row_bytes, -(-heads * count // (threads or processors())))
    jobs: list[Job] = []
    for head in range(heads):
        for first in range(0, count, share):
            part = slice(first, min(count, first + share))
            place = (index, positions[head, part], tokens)
            if source.scales is None:
                jobs.append(partial(_copy_words, *_in_words(source.pages, head), *place, _words(out[head, part])))
            else:
                jobs.append(partial(_copy_scaled, source.pages[:, head], source.scales[:, head], *place, out[head, part]))
    return jobs


def mark_missing(index: Numbers, positions: Numbers, tokens: int) -> tuple[int, Numbers]:
    """Returns how many of `positions` [kv_heads, k] are in pages whose `index` is below 0, and these pages, ascending."""
    marks = np.zeros(len(index), np.uint8)
    count = sum(_mark(index, of_head, tokens, marks) for of_head in positions) if (index < 0).any() else 0
    return count, np.flatnonzero(marks)


def _word(row_bytes: int) -> np.dtype[Any]:
    """The longest type that a row is a whole number of."""
    return np.dtype(np.uint64 if row_bytes % 8 == 0 else np.uint8)


def _words(rows: NDArray[Any]) -> NDArray[Any]:
    """`rows` [k, dim], side by side, as words [k, words]."""
    found: NDArray[Any] = rows.view(_word(rows.shape[1] * rows.itemsize))
    return found


def _in_words(pages: NDArray[Any], head: int) -> tuple[NDArray[Any], int]:
    """The rows of one head, from its first page to the last of all pages, as words; and the words from page to page."""
    word = _word(pages.shape[3] * pages.itemsize)
    of_head = pages[:, head]
    span = (len(pages) - 1) * pages.strides[0] + of_head[0].nbytes if len(pages) else 0
    flat = np.lib.stride_tricks.as_strided(of_head, (span // pages.itemsize,), (pages.itemsize,))
    return flat.view(word), pages.strides[0] // word.itemsize


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
def _copy_words(words, stride, index, positions, tokens, out):  # type: ignore[no-untyped-def]
    size = out.shape[1]
    for i in range(positions.size):
        page = index[positions[i] // tokens]
        if page >= 0:
            at = page * stride + positions[i] % tokens * size
            for j in range(size):
                out[i, j] = words[at + j]


@numba.njit(nogil=True, cache=True)
def _copy_scaled(pages, scales, index, positions, tokens, out):  # type: ignore[no-untyped-def]
    for i in range(positions.size):
        page = index[positions[i] // tokens]
        if page >= 0:
            token = positions[i] % tokens
            for j in range(out.shape[1]):
                out[i, j] = np.float32(pages[page, token, j]) * scales[page, token]
