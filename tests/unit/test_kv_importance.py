"""Hits, column sums of attention, boxes around keys, and which pages change places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.kv.importance.bkp import cpu_pages_for, moves
from llmcache.kv.importance.bounds import Abstracts, best_pages
from llmcache.kv.importance.columns import column_sums
from llmcache.kv.importance.tables import MOST, HitTable, TokenTable
from llmcache.kv.spill import KvShape

Array = NDArray[Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Hits


def chosen(*heads: list[int]) -> Array:
    """What one sequence's heads chose, [1, heads, k]."""
    return np.array([heads], np.int64)


def test_a_token_is_hit_once_for_each_head_that_chose_it() -> None:
    table = HitTable(layers=2, batch=1)
    table.record(1, chosen([0, 3], [3, 40]))
    table.record(1, chosen([3, 4], [3, 4]))
    assert table.rows(1, 0, 48).nonzero()[0].tolist() == [0, 3, 4, 40]
    assert table.rows(1, 0, 48)[[0, 3, 4, 40]].tolist() == [1, 4, 2, 1]
    assert table.pages(1, 0, 3, 16).tolist() == [7, 0, 1]
    assert not table.pages(0, 0, 3, 16).any()


def test_hits_are_two_bytes_a_token() -> None:
    table = HitTable(layers=1, batch=2)
    table.record(0, np.full((2, 1, 1), 100_000 - 1, np.int64))
    assert table.rows(0, 0, 100_000).dtype == np.uint16
    assert 2 * 2 * 100_000 <= table.size_bytes <= 1.2 * 2 * 2 * 100_000  # room for growth


def test_hits_are_halved_before_one_overflows_and_keep_their_order() -> None:
    table = HitTable(layers=1, batch=1)
    counts = table.rows(0, 0, 2000)
    counts[[1, 2, 3, 1999]] = [MOST - 1, MOST // 2, 10, 9]
    table.record(0, chosen([1], [1], [2]))  # the second of the two does not fit
    assert table.rows(0, 0, 2000)[[1, 2, 3, 1999]].tolist() == [(MOST - 1) // 2 + 2, MOST // 4 + 1, 5, 4]
    for _ in range(3 * MOST):
        table.record(0, chosen([5]))
    assert MOST // 2 <= table.rows(0, 0, 6)[5] <= MOST
    assert table.rows(0, 0, 2)[1] < table.rows(0, 0, 6)[5]


def test_hits_of_one_layer_fade() -> None:
    table = HitTable(layers=2, batch=2)
    for layer in (0, 1):
        for _ in range(6):
            table.record(layer, np.full((2, 1, 1), 2000, np.int64))
    table.halve(1)
    assert [[int(table.rows(layer, sequence, 2001)[-1]) for sequence in (0, 1)] for layer in (0, 1)] == [[6, 6], [3, 3]]


def test_hits_follow_their_sequences() -> None:
    table = HitTable(layers=1, batch=2)
    table.record(0, np.array([[[1, 2]], [[3, 20]]]))
    table.reorder(np.array([1, 1, 0]))
    assert [table.rows(0, sequence, 32).nonzero()[0].tolist() for sequence in range(3)] == [[3, 20], [3, 20], [1, 2]]
    table.record(0, np.array([[[3]], [[4]], [[5]]]))
    assert table.rows(0, 0, 4)[3] == 2
    assert table.rows(0, 1, 4)[3] == 1
    table.crop(4)
    assert [table.rows(0, sequence, 32).nonzero()[0].tolist() for sequence in range(3)] == [[3], [3], [1, 2]]


def test_a_table_grows_and_keeps_what_it_has() -> None:
    table = TokenTable(1, 1, (2,), np.float32)
    table.rows(0, 0, 3)[:] = 7
    grown = table.rows(0, 0, 5000)
    assert grown.shape == (5000, 2)
    assert (grown[:3] == 7).all()
    assert not grown[3:].any()


# Column sums


def plain_column_sums(queries: Array, keys: Array, start: int, first: int, scale: float) -> Array:
    """As the formula says, in float64, row by row."""
    sums = np.zeros(keys.shape[:2])
    group = len(queries) // len(keys)
    for head, rows in enumerate(queries.astype(np.float64)):
        for row, query in enumerate(rows):
            if start + row >= first:
                logits = keys[head // group, first : start + row + 1].astype(np.float64) @ query * scale
                weights = np.exp(logits - logits.max())
                sums[head // group, first : start + row + 1] += weights / weights.sum()
    return sums


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "start", "first"),
    [(4, 4, 40, 0, 0), (4, 2, 300, 0, 0), (6, 2, 33, 290, 0), (2, 1, 64, 0, 17), (2, 1, 20, 30, 40), (1, 1, 1, 0, 0)],
)
def test_column_sums(heads: int, kv_heads: int, rows: int, start: int, first: int) -> None:
    queries, keys = numbers(heads, rows, 32), numbers(kv_heads, start + rows, 32, seed=1)
    found = column_sums(3 * queries, keys, start, first)
    np.testing.assert_allclose(found, plain_column_sums(3 * queries, keys, start, first, 32**-0.5), rtol=2e-5, atol=1e-6)
    asking = start + rows - max(start, first)
    np.testing.assert_allclose(found.sum(axis=1), np.full(kv_heads, asking * heads / kv_heads), rtol=1e-4)
    assert not found[:, :first].any()


def test_column_sums_of_parts_add_up() -> None:
    queries, keys = numbers(4, 100, 16), numbers(2, 100, 16, seed=1)
    whole = column_sums(queries, keys, scale=0.5)
    parts = np.zeros_like(whole)
    for start, stop in ((0, 37), (37, 90), (90, 100)):
        parts[:, :stop] += column_sums(queries[:, start:stop], keys[:, :stop], start, scale=0.5)
    np.testing.assert_allclose(parts, whole, rtol=1e-4)


@pytest.mark.parametrize(
    ("queries", "keys", "start", "first", "field"),
    [
        ((3, 8, 4), (2, 8, 4), 0, 0, "queries"),
        ((2, 8, 4), (2, 8, 5), 0, 0, "queries"),
        ((2, 8, 4), (2, 8), 0, 0, "keys"),
        ((2, 8, 4), (2, 9, 4), 0, 0, "start"),
        ((2, 8, 4), (2, 8, 4), 0, 9, "first"),
    ],
)
def test_column_sums_name_what_does_not_fit(
    queries: tuple[int, ...], keys: tuple[int, ...], start: int, first: int, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        column_sums(numbers(*queries), numbers(*keys), start, first)


# Abstracts


def test_no_key_scores_above_the_bounds_of_its_page_and_chunk() -> None:
    pages, heads, dim = 11, 2, 8
    keys = numbers(pages, heads, 16, dim)
    for combine in ("max", "sum"):
        abstracts = Abstracts(1, 1, heads, dim, 16, chunk_pages=4)
        abstracts.add(0, 0, [keys[:5]])
        abstracts.add(0, 5, [keys[5:]])
        queries = numbers(4, dim, seed=2)
        products = np.einsum("pktd,kgd->kgpt", keys, queries.reshape(heads, 2, dim)).max(axis=3)
        best = products.max(axis=1) if combine == "max" else products.sum(axis=1)
        fine = abstracts.pages(0, 0, queries, np.arange(pages), combine)
        coarse = abstracts.chunks(0, 0, queries, pages, combine)
        assert (fine >= best - 1e-4).all()
        assert coarse.shape == (heads, 3)
        assert (coarse.repeat(4, axis=1)[:, :pages] >= fine - 1e-4).all()


def test_the_best_pages_are_found_without_looking_into_every_chunk() -> None:
    keys = numbers(64, 2, 4, 8)
    keys[40:44] += 1  # one chunk stands out
    abstracts = Abstracts(1, 1, 2, 8, page_tokens=4, chunk_pages=4)
    abstracts.add(0, 0, [keys])
    for seed in range(50):
        queries = numbers(4, 8, seed=seed)
        for pages, count in ((range(64), 5), (range(3, 60), 1), (range(2, 9), 7), (range(1, 64), 40)):
            bounds = abstracts.pages(0, 0, queries, np.arange(pages.start, pages.stop), "max")
            wanted = np.sort(np.argsort(-bounds, axis=1, kind="stable")[:, :count]) + pages.start
            found = best_pages(abstracts, 0, 0, queries, pages, count, "max")
            np.testing.assert_array_equal(np.stack(found), wanted)


def test_the_box_of_one_key_is_the_key() -> None:
    abstracts = Abstracts(1, 1, 1, 4, page_tokens=1, chunk_pages=2)
    keys, queries = numbers(3, 1, 1, 4), numbers(1, 4, seed=1)
    abstracts.add(0, 0, [keys])
    np.testing.assert_allclose(abstracts.pages(0, 0, queries, np.arange(3), "max"), queries @ keys[:, 0, 0].T, rtol=1e-5)


def test_abstracts_follow_their_sequences() -> None:
    first, second = numbers(6, 1, 4, 8), numbers(6, 1, 4, 8, seed=1)
    queries = numbers(1, 8, seed=2)
    made = Abstracts(1, 2, 1, 8, page_tokens=4, chunk_pages=4)
    made.add(0, 0, [first, second])
    made.reorder(np.array([1]))
    made.crop(4 * 5 + 3)
    assert made.missing(0, 6) == range(5, 6)
    plain = Abstracts(1, 1, 1, 8, page_tokens=4, chunk_pages=4)
    plain.add(0, 0, [second[:5]])
    np.testing.assert_array_equal(made.chunks(0, 0, queries, 5, "max"), plain.chunks(0, 0, queries, 5, "max"))
    five = np.arange(5)
    np.testing.assert_array_equal(made.pages(0, 0, queries, five, "max"), plain.pages(0, 0, queries, five, "max"))


# Moves


def moved(
    in_cpu: str, hits: list[int], important: int, room: int, recent: int = 0, clearly: int = 1
) -> tuple[list[int], list[int]]:
    found = moves(np.array([place == "c" for place in in_cpu]), np.array(hits), important, room, recent, clearly)
    return found.up.tolist(), found.down.tolist()


def test_the_most_hit_come_up_and_as_many_of_the_least_hit_go_down() -> None:
    assert moved("ccccss", [5, 1, 7, 2, 9, 8], important=2, room=4) == ([4, 5], [1, 3])


def test_what_has_not_clearly_more_hits_does_not_take_the_place_of_another() -> None:
    assert moved("ccss", [4, 2, 8, 5], important=2, room=2, clearly=1) == ([2, 3], [0, 1])
    assert moved("ccss", [4, 2, 8, 5], important=2, room=2, clearly=2) == ([2], [1])
    assert moved("ccss", [4, 2, 4, 4], important=2, room=2, clearly=2) == ([], [])


def test_a_page_too_many_goes_down_without_another_coming_up() -> None:
    assert moved("cccs", [3, 1, 2, 0], important=1, room=2) == ([], [1])


def test_what_is_recent_stays_up_whatever_its_hits() -> None:
    assert moved("sscc", [9, 8, 0, 0], important=2, room=2, recent=1) == ([0], [2])


def test_nothing_moves_that_is_not_hit_more() -> None:
    assert moved("ccss", [3, 3, 3, 0], important=2, room=2) == ([], [])
    assert moved("ccss", [0, 0, 0, 0], important=2, room=2) == ([], [])


def test_free_room_is_taken_without_anything_going_down() -> None:
    assert moved("cssss", [1, 4, 3, 2, 0], important=2, room=3) == ([1, 2], [])
    assert moved("cssss", [1, 4, 3, 2, 0], important=4, room=3) == ([1, 2, 3], [0])


def test_a_pool_without_room_for_the_middle_holds_none_of_it() -> None:
    assert moved("sss", [1, 2, 3], important=3, room=0, recent=2) == ([], [])


def test_moves_keep_to_the_room() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        pages = int(random.integers(1, 30))
        room = int(random.integers(0, pages + 2))
        in_cpu = np.zeros(pages, bool)
        in_cpu[random.permutation(pages)[:room]] = True
        hits = random.integers(0, 5, pages)
        important, recent = (int(x) for x in random.integers(0, pages + 2, 2))
        found = moves(in_cpu, hits, important, room, recent)
        assert not in_cpu[found.up].any()
        assert in_cpu[found.down].all()
        assert int(in_cpu.sum()) + len(found.up) - len(found.down) <= room
        assert hits[found.up].sum() >= hits[found.down].sum() + len(found.down)
        assert len(found.up) <= important


# Sizes of the pools

SHAPE = KvShape("m", layers=4, kv_heads=2, head_dim=8, dtype="float32")
PAGE_BYTES = 16 * 2 * 8 * 2 * 4


def test_the_pool_is_the_share_that_beta_says() -> None:
    assert cpu_pages_for(SHAPE, 16_000, 1.0, None) == 500
    assert cpu_pages_for(SHAPE, 16_000, 3.0, None) == 750
    assert cpu_pages_for(SHAPE, 16_000, math.inf, None) == 1000


def test_the_memory_binds_where_it_is_less() -> None:
    assert cpu_pages_for(SHAPE, 16_000, 1.0, 10 * PAGE_BYTES * 4 * 2 + 1, batch=2) == 10
    assert cpu_pages_for(SHAPE, 16_000, None, 1 << 40) == 1000


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("length", (0, 1.0, 1)), ("beta", (16, 0.0, 1)), ("beta", (16, math.nan, 1)), ("memory_bytes", (16, 1.0, 0))],
)
def test_sizes_that_are_not_positive_are_named(field: str, arguments: tuple[int, float, int]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        cpu_pages_for(SHAPE, *arguments)
