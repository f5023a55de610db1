"""Kernels compared with numpy: exact for exact numbers, close for rounded sums, and the same selections."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmcache.arrays import Floats
from llmcache.kv.kernels import RunningTop, left_out, products, score, top, top_shared, weights
from llmcache.kv.kernels.scores import _half_by_shifts, widened
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.kernels.top import first_from, sort
from tests.conftest import examples
from tests.unit.kv_parts import carried


@numba.extending.intrinsic
def widened_by_shifts(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the fp16 number with the bits `value` as float32, as on a CPU without an instruction for it."""
    return numba.types.float32(value), lambda context, builder, signature, values: _half_by_shifts(builder, values[0])


@numba.njit
def _widen_all(bits, out, shifted):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        out[i] = widened(bits[i])
        shifted[i] = widened_by_shifts(bits[i])


def test_every_fp16_number_is_converted_exactly_in_both_ways() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out, shifted = np.empty((2, 1 << 16), np.float32)
    _widen_all(bits, out, shifted)
    expected = bits.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    for found in (out, shifted):
        assert (found.view(np.uint32) == expected.view(np.uint32))[numbers].all()
        assert np.isnan(found[~numbers]).all()


def whole(shape: tuple[int, ...], seed: int) -> Floats:
    """Return small integers, for which all products and sums are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def plain(queries: Floats, keys: Floats, combine: str) -> Floats:
    """Return the scores, computed by numpy."""
    batch, heads, _, dim = keys.shape
    grouped = queries.reshape(batch, heads, -1, dim).astype(np.float64)
    products = np.einsum("bhgd,bhnd->bhgn", grouped, keys.astype(np.float64))
    found: Floats = (products.max(2) if combine == "max" else products.sum(2)).astype(np.float32)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("group", "dim"), [(3, 33), (9, 64)])
def test_scores_of_whole_numbers_are_exact(dtype: str, group: int, dim: int) -> None:
    keys, queries = whole((2, 3, 301, dim), 1), whole((2, 3 * group, dim), 2)
    by = np.random.default_rng(3).integers(1, 5, (2, 3, 301)).astype(np.float32) if dtype == "int8" else None
    for combine in ("max", "sum"):
        expected = plain(queries, keys, combine) * (1 if by is None else by)
        for threads in (1, 3):
            found = score(queries, carried(keys, dtype), by, combine=combine, threads=threads)
            assert found.dtype == np.float32 and (found == expected).all()


def test_any_strides_of_keys() -> None:
    keys, queries = whole((2, 5, 40, 64), 1).astype(np.float16), whole((2, 5, 64), 2)
    expected = plain(queries, keys.astype(np.float32), "max")
    swapped, turned = keys.swapaxes(1, 2).copy().swapaxes(1, 2), keys[::-1, ::-1].copy()[::-1, ::-1]
    for same in (swapped, turned, np.asfortranarray(keys), np.repeat(keys, 2, 2)[:, :, ::2]):
        assert (score(queries, same) == expected).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_products_of_each_query(dtype: str) -> None:
    # Loops are compiled by number of queries and type; several threads multiply 400 pages.
    for group, pages in ((1, 3), (2, 1), (3, 4), (4, 2), (7, 400)) if dtype == "float16" else ((3, 4), (7, 400)):
        keys, queries = whole((pages, 3, 16, 200), group), whole((3 * group, 200), 9)
        scales = whole((pages, 3, 16), 4) if dtype == "int8" else None
        expected = np.einsum("hgd,phtd->hgpt", queries.reshape(3, group, 200), keys)
        expected = expected if scales is None else expected * scales.swapaxes(0, 1)[:, None]
        found = products(queries, carried(keys, dtype), scales, threads=2)
        assert (found == expected.reshape(3, group, -1)).all()


def test_softmax_weights_are_summed() -> None:
    random = np.random.default_rng(3)
    for spread, inside, around in ((1, 1, 0), (3, 17, 5), (40, 1000, 15), (3000, 64, 64)):
        sides = [(random.standard_normal((2, 3, n)) * spread).astype(np.float32) for n in (inside, around)]
        sides[1][0, :, : around // 2] = -np.inf  # padding
        logits = 0.125 * np.concatenate(sides, axis=2).astype(np.float64)
        powers = np.exp(logits - logits.max(axis=2, keepdims=True))
        expected = (powers / powers.sum(axis=2, keepdims=True))[..., :inside].sum(axis=1)
        found, sums = weights(sides[0], sides[1], 0.125)
        assert np.allclose(found, expected, rtol=3e-6 * max(1, spread), atol=1e-30)
        assert np.allclose(sums, logits.max(axis=2) + np.log(powers.sum(axis=2)), rtol=1e-6)
        each = (powers / powers.sum(axis=2, keepdims=True))[..., :inside]
        assert np.allclose(sides[0], each, rtol=3e-6 * max(1, spread), atol=1e-30), "the weights of each query"
        chosen = np.array([[0, inside // 2, inside - 1, inside - 1], [0, 0, 0, 0]])  # repeated tokens count once
        rest = each.sum(axis=2) - np.stack([each[0][:, np.unique(chosen[0])].sum(axis=1), each[1][:, 0]])
        assert np.allclose(left_out(sides[0], chosen), np.maximum(0, rest), atol=1e-5)


def test_the_interpreter_runs_while_scores_are_computed() -> None:
    keys, queries = np.zeros((1, 1, 1 << 20, 64), np.float16), np.ones((1, 1, 64), np.float32)
    score(queries, keys[:, :, :8])
    loops, during, ended = 0, [0], threading.Event()

    def compute() -> None:
        while len(during) < 200 and (len(during) < 8 or np.median(during) <= 3):  # either thread may pause
            before = loops
            score(queries, keys, threads=1)
            during.append(loops - before)
        ended.set()

    worker = threading.Thread(target=compute)
    worker.start()
    while not ended.is_set():
        loops += 1
        ended.wait(0.0001)
    worker.join()
    assert np.median(during) > 3, "with the GIL, only one or two of them run"


def test_an_error_in_a_thread_is_raised_after_all_jobs_have_ended() -> None:
    """The memory that the jobs write to may be reused afterwards."""
    failed, ended = threading.Event(), []

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    def late() -> None:
        failed.wait()
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(ZeroDivisionError):
        run_all([fail, late], 2)
    assert ended


def test_a_forked_child_has_its_own_threads() -> None:
    jobs: list[Callable[[], None]] = [lambda: None, lambda: None]
    run_all(jobs, 2)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        run_all(jobs, 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_invalid_arguments_are_refused() -> None:
    queries, keys = np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 5, 8), np.float16)
    calls: list[tuple[str, Any, Any, Any]] = [
        ("queries: must be", np.zeros((1, 3, 8), np.float32), keys, None),
        ("queries: dtype", np.zeros((1, 2, 8)), keys, None),
        ("keys: dtype", queries, keys.astype(np.float64), None),
        ("keys: must be", queries, keys[0], None),
        ("scales: must be given for int8", queries, keys.astype(np.int8), None),
        ("scales: must be", queries, keys.astype(np.int8), np.zeros((2, 5), np.float32)),
    ]
    for message, wrong_queries, wrong_keys, scales in calls:
        with pytest.raises(ValueError, match=message):
            score(wrong_queries, wrong_keys, scales)


def chosen(scores: Floats, k: int) -> NDArray[np.int64]:
    """Return the expected selection, by a full sort."""
    order = np.lexsort((np.arange(len(scores)), -np.nan_to_num(scores, nan=-np.inf), np.isnan(scores)))
    return np.sort(order[:k])


SCORES = {
    "random": lambda random, count: random.standard_normal(count),
    "few": lambda random, count: random.integers(0, 4, count),
    "equal": lambda random, count: np.full(count, 3.0),
    "ascending": lambda random, count: np.arange(count),
    "descending": lambda random, count: -np.arange(count),
    "periodic": lambda random, count: np.where(np.arange(count) % 7, 1.0, 1000.0) + np.arange(count) / count,
    "wide": lambda random, count: random.standard_normal(count) * 10.0 ** random.integers(-30, 30, count),
    "special": lambda random, count: random.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 5.0], count),
}


@pytest.mark.parametrize("kind", SCORES)
def test_top_selects_the_same_as_a_sort(kind: str) -> None:
    for count in (1, 2, 100, 4096, 5000, 70_001):
        scores = np.asarray(SCORES[kind](np.random.default_rng(count), count), np.float32)  # type: ignore[no-untyped-call]
        for k in sorted({1, min(2, count), max(1, count // 100), max(1, count // 5), max(1, count - 1), count}):
            found = top(scores, k)
            assert found.dtype == np.int64 and (found == chosen(scores, k)).all(), (count, k)
        assert (top(scores, count + 5) == np.arange(count)).all()


def test_a_misleading_sample_is_corrected() -> None:
    """Large scores at all sampled positions: the bound is too high, and is corrected."""
    scores = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    scores[:: (1 << 16) // 1024] += 1000
    assert (top(scores, 5000) == chosen(scores, 5000)).all()


def test_top_of_many_rows() -> None:
    scores = np.random.default_rng(0).standard_normal((3, 4, 9000)).astype(np.float32)
    found = top(scores, 50, threads=3)
    assert found.shape == (3, 4, 50)
    assert all((found[b, h] == chosen(scores[b, h], 50)).all() for b in range(3) for h in range(4))
    assert top(np.empty((2, 0), np.float32), 3).shape == (2, 0)
    for wrong in (scores.astype(np.float64), np.float32(1)):
        with pytest.raises(ValueError, match="scores: "):
            top(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k: must be at least 1, not 0"):
        top(scores, 0)


def test_heads_share_the_best_of_all() -> None:
    scores = np.random.default_rng(5).standard_normal((3, 500), np.float32) + np.array([[0], [1], [-9]], np.float32)
    found = top_shared(scores, 40)
    of_head = [np.unique(row) for row in found]
    assert [len(row) for row in of_head] == [39, 80, 1]  # at most twice the even part, at least one
    for row, best, own in zip(found, of_head, scores, strict=True):
        assert set(best) == set(np.argsort(-own)[: len(best)])
        assert row.tolist() == [*best, *[best[-1]] * (found.shape[1] - len(best))]
    even = top_shared(scores[:1].repeat(3, 0), 40)
    np.testing.assert_array_equal(even, top(scores[:1], 40).repeat(3, 0))
    np.testing.assert_array_equal(top_shared(scores, 500), top(scores, 500))


@given(
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, np.nan, -np.inf, np.inf]), max_size=30), max_size=12),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_order_of_merged_blocks_does_not_matter(blocks: list[list[float]], k: int, chance: Any) -> None:
    scores = np.array([value for block in blocks for value in block], np.float32)
    starts = np.cumsum([0, *map(len, blocks)])
    order = list(range(len(blocks)))
    chance.shuffle(order)
    merged = RunningTop(k)
    for index in order:
        positions = np.arange(starts[index], starts[index + 1])
        merged.add(positions, scores[positions])
    assert (merged.result() == chosen(scores, k)).all()


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62), max_size=60), st.integers(-6, 6))
@settings(max_examples=examples(200))
def test_compiled_sort_and_search_equal_numpy(numbers: list[int], least: int) -> None:
    found = np.array(numbers, np.int64)
    sort(found)
    assert (found == np.sort(np.array(numbers, np.int64))).all()
    assert first_from(found, least) == np.searchsorted(found, least)
