"""Rows that land a few pages at a time lie where plain indexing puts them, in whichever order the pages come."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill.reader import HUGE_PAGE_BYTES, thread_memory
from llmcache.kv.tiers.pool import Destination

HEADS, SIZE, PAGES, UNTOUCHED = 2, 4, 12, 7


def rows_of(dtype: str, dim: int, pages: int) -> NDArray[Any]:
    """Return rows [pages, heads, tokens, dim], all different where the type has so many numbers."""
    count = pages * HEADS * SIZE * dim
    return (np.arange(count) % 251 - 125).astype(dtype).reshape(pages, HEADS, SIZE, dim)


@settings(max_examples=60)
@given(
    data=st.data(),
    dtype=st.sampled_from(["float16", "float32", "int8"]),
    dim=st.sampled_from([3, 8]),
    spread=st.booleans(),
)
def test_rows_land_where_they_belong(data: st.DataObject, dtype: str, dim: int, spread: bool) -> None:
    batch, k = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    choice = st.lists(st.integers(0, PAGES * SIZE - 1), min_size=k, max_size=k, unique=True).map(sorted)
    positions = np.array([[data.draw(choice) for _ in range(HEADS)] for _ in range(batch)], np.int64)
    index = np.full((batch, PAGES), -1, np.int64)
    came = 0
    for b in range(batch):  # the first pages may be those of another sequence too
        shared = data.draw(st.integers(0, 3)) if b else 0
        own = [page for page in range(shared, PAGES) if data.draw(st.booleans())]
        index[b, :shared], index[b, own] = index[0, :shared], came + np.arange(len(own))
        came += len(own)
    rows = [rows_of(dtype, dim, came), rows_of(dtype, dim + 1, came)]
    scales = np.linspace(0.5, 2, came * HEADS * SIZE, dtype=np.float32).reshape(came, HEADS, SIZE)
    of_type = np.float32 if dtype == "int8" else np.dtype(dtype)
    # Rows that do not touch must be copied one by one.
    outs = [np.full((batch, HEADS, k, 2 * d if spread else d), UNTOUCHED, of_type)[..., :d] for d in (dim, dim + 1)]
    wanted = [out.copy() for out in outs]
    for b, head, i in np.ndindex(positions.shape):
        page, token = divmod(int(positions[b, head, i]), SIZE)
        if index[b, page] >= 0:
            place = (index[b, page], head, token)
            for side in (0, 1):
                wanted[side][b, head, i] = rows[side][place] * (scales[place] if dtype == "int8" else 1)
    taken = Destination(index, positions, outs, SIZE)
    cuts = sorted({0, came, *data.draw(st.lists(st.integers(0, came), max_size=4))})
    parts = [slice(*pair) for pair in pairwise(cuts)]
    jobs = [
        partial(taken.take, side, part.start, rows[side][part], scales[part] if dtype == "int8" else None)
        for side in (0, 1)
        for part in data.draw(st.permutations(parts))
    ]
    run_all(jobs, 2)
    for found, expected in zip(outs, wanted, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_nothing_that_comes_is_wanted() -> None:
    out = np.zeros((1, HEADS, 1, 8), np.float32)
    taken = Destination(np.array([[-1, 0]]), np.zeros((1, HEADS, 1), np.int64), [out, out], SIZE)
    taken.take(0, 0, rows_of("float32", 8, 1) + 200, None)
    assert not out.any()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_memory_of_a_thread_is_of_its_own(threads: int) -> None:
    found: list[int] = []
    run_all([lambda: found.append(thread_memory(4096).ctypes.data) for _ in range(8)], threads)
    assert all(address % HUGE_PAGE_BYTES == 0 for address in found) and 1 <= len(set(found)) <= threads
    assert thread_memory(3 * HUGE_PAGE_BYTES).size == 3 * HUGE_PAGE_BYTES
