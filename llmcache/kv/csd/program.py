"""The function that the *emulated* device's engine runs (CSF): scores keys of a layer, buffer by buffer.

While the engine works on one buffer, a thread reads the next from the file and compares its checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels import score_pages
from llmcache.kv.spill.file import SpillFile
from llmcache.kv.spill.reading import KeyRange, check_keys, rows
from llmcache.kv.spill.shape import Bytes, aligned

SCORE_KEYS = "score_keys"
PROGRAMS = (SCORE_KEYS,)
"""Programs that can be loaded."""


@dataclass(frozen=True)
class Piece:
    """What fits one buffer: `pages` pages of `range` from its page `first` on."""

    range: KeyRange
    first: int
    pages: int


@dataclass(frozen=True)
class Scored:
    """Scores [kv_heads, tokens] of a piece, whose first token is at position `base` of the layer."""

    base: int
    scores: NDArray[np.float32]
    read_bytes: int


def pieces(ranges: list[KeyRange], pages: int) -> list[Piece]:
    """Returns `ranges` in pieces of at most `pages` pages."""
    return [Piece(one, first, min(pages, one.pages - first)) for one in ranges for first in range(0, one.pages, pages)]


def score_keys(
    file: SpillFile,
    sequence: int,
    layer: int,
    queries: NDArray[np.float32],
    combine: str,
    buffer_bytes: int,
    threads: int,
    pages: list[int] | None = None,
) -> Iterator[Scored]:
    """Yields the scores of all keys of a layer, or of those in `pages`, in their order. `queries` [heads, head_dim]."""
    shape = file.shape
    length = file.length(sequence, layer)
    todo = pieces(file.key_ranges(sequence, layer, pages), max(1, buffer_bytes // shape.key_slot_bytes))
    buffers = [aligned(max((piece.pages for piece in todo), default=0) * shape.key_slot_bytes) for _ in range(2)]
    with ThreadPoolExecutor(1, thread_name_prefix="csd-read") as reader:
        ahead = reader.submit(_read, file, todo[0], buffers[0]) if todo else None
        for index, piece in enumerate(todo):
            assert ahead is not None
            slots = ahead.result()
            if index + 1 < len(todo):
                ahead = reader.submit(_read, file, todo[index + 1], buffers[(index + 1) % 2])
            keys, scales = rows(shape, slots, shape.head_dim)
            base = (piece.range.first_page + piece.first) * shape.page_tokens
            scores: Any = score_pages(queries, keys, scales, combine=combine, threads=threads)
            yield Scored(base, scores[:, : length - base], slots.size)


def _read(file: SpillFile, piece: Piece, buffer: Bytes) -> Bytes:
    size = file.shape.key_slot_bytes
    slots = buffer[: piece.pages * size]
    file.read_range(slots, piece.range.offset + piece.first * size)
    slots = slots.reshape(piece.pages, size)
    check_keys(file.path, piece.range, piece.first, slots)
    return slots
