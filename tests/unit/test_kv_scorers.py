"""Scorers: the exact one is exact, trees find most of clustered keys, bounds hold, and auto takes the better in a trial."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.arrays import Floats
from llmcache.errors import UsageError
from llmcache.kv.index.dci import DciIndex, DciSettings
from llmcache.kv.index.dci.tree import BASE
from llmcache.kv.index.scorers import (
    QUERIES,
    SCORERS,
    SUM_TOKENS,
    AutoScorer,
    ChunkScorer,
    DciScorer,
    ExactScorer,
    PackedScorer,
    QuestScorer,
    Scorer,
    ScorerSettings,
    ValueSums,
    recall_of,
    rounded,
)
from llmcache.kv.spill.layout import KvShape
from tests.unit.kv_parts import carried

HEADS, DIM, PAGE = 2, 32, 16
BOUNDLESS: dict[str, Any] = {"field_of_view": 1 << 40, "visit_each": 1 << 40, "margin": np.inf}
"""Of a tree: a query looks at everything."""


def clustered(count: int, seed: int = 0, clusters: int = 64) -> tuple[Floats, Floats]:
    """Return keys [HEADS, count, DIM] around centers, and 64 queries for each head near some of these."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((clusters, DIM))
    keys = centres[random.integers(0, clusters, (HEADS, count))] + 0.3 * random.standard_normal((HEADS, count, DIM))
    query_sets = centres[random.integers(0, clusters, (64, HEADS))] + 0.5 * random.standard_normal((64, HEADS, DIM))
    return keys.astype(np.float32), query_sets.astype(np.float32)


def keys_of(index: DciIndex, tokens: NDArray[np.int64]) -> Floats:
    """Return the keys [n, dim] of tokens, in the precision of a tree."""
    rows = index.tree.rows.reshape(-1, index.dim)[index.tree.where[tokens - int(index.tree.state[BASE])]]
    found: Floats = rows.view(np.float16).astype(np.float32) * np.float32(index.scale.unit)
    return found


def made(name: str, keys: Floats, first: int = 0, dtype: str = "float32", **settings: Any) -> Scorer:
    shape = KvShape("m", 1, HEADS, DIM, dtype, PAGE)
    scorer = SCORERS[name](shape, first, ScorerSettings(threads=1, **settings))
    scorer.add(carried(keys, dtype))
    return scorer


def best(keys: Floats, queries: Floats, k: int) -> NDArray[np.int64]:
    """Return the tokens [HEADS, k] with the largest product with some query of the head, ascending."""
    scores = np.einsum("hgd,hnd->hgn", queries.reshape(HEADS, -1, DIM), keys).max(axis=1)
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_scorer_returns_the_requested_number(name: str, dtype: str) -> None:
    keys, query_sets = clustered(320)
    scorer = made(name, keys, 48, dtype)
    for k in (1, 16, 50, 319, 320, 1000):
        found = scorer.top(np.repeat(query_sets[0], 2, axis=0), k)
        assert found.dtype == np.int64 and found.shape == (HEADS, min(k, 320))
        assert (np.diff(found, axis=1) > 0).all() and found.min() >= 48 and found.max() < 48 + 320
    assert len(scorer) == 320 and scorer.size_bytes > 0
    assert scorer.why.startswith("exact" if name == "auto" else name)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_that_was_cropped_and_extended_is_complete(name: str) -> None:
    keys, query_sets = clustered(400)
    whole, cut = made(name, keys[:, :320], 32), made(name, keys, 32)
    again = copy.deepcopy(cut)
    cut.crop(32 + 325)  # the page of token 325 is no longer complete
    assert len(cut) == 320 and len(again) == 400
    for scorer in (whole, cut):
        scorer.crop(5000)
        assert (scorer.top(query_sets[0], 320) == np.arange(32, 352)).all()
        scorer.add(keys[:, 320:])
    found = [scorer.top(query_sets[0], 24) for scorer in (whole, cut, again)]
    if name in ("exact", "rounded", "quest", "auto"):
        assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    cut.crop(0)
    assert len(cut) == 0 and cut.top(query_sets[0], 5).shape == (HEADS, 0)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.29), ("bfloat16", 0.57)])
def test_rounded_keys_take_less_memory_with_a_high_recall(dtype: str, share: float) -> None:
    keys, query_sets = clustered(4096, clusters=4096)
    exact, small = made("exact", keys, dtype=dtype), made("rounded", keys, dtype=dtype)
    assert small.size_bytes < share * exact.size_bytes
    assert np.mean([recall_of(small.top(one, 64), exact.top(one, 64)) for one in query_sets]) > 0.97


def test_packed_keys_take_two_bits_per_number() -> None:
    keys, query_sets = clustered(1600, clusters=4096)
    keys += np.linspace(-8, 8, DIM, dtype=np.float32)
    keys[:, 800:] -= 5  # of the keys added later
    exact, small = made("exact", keys), made("packed", keys[:, :784])
    small.add(keys[:, 784:800])  # a single page has no mean of its own
    small.add(keys[:, 800:])
    assert isinstance(exact, ExactScorer) and isinstance(small, PackedScorer)
    assert small.size_bytes < 0.085 * exact.size_bytes, "8.5 bytes instead of 32 numbers of 4 bytes, and two means"
    means = np.repeat([keys[:, :784].mean(axis=1), keys[:, 800:].mean(axis=1)], [800, 800], axis=0).swapaxes(0, 1)
    for queries in (query_sets[0], np.repeat(query_sets[1], 3, axis=0), np.repeat(query_sets[2], 7, axis=0)):
        queries = queries + np.arange(len(queries), dtype=np.float32)[:, None] / 8
        spread = np.std(queries.reshape(HEADS, -1, DIM) @ (keys - means).swapaxes(1, 2))
        assert np.std(small.products(queries) - exact.products(queries)) < 0.4 * spread, "four levels: 0.345"
    assert np.mean([recall_of(small.top(one, 64), exact.top(one, 64)) for one in query_sets]) > 0.6
    with pytest.raises(UsageError, match="a multiple of 4 numbers, not 30"):
        PackedScorer(KvShape("m", 1, HEADS, 30))


def test_keys_are_rounded_to_half_a_step_and_zeros_stay_zero() -> None:
    nothing, line = np.zeros((5000, DIM)), np.linspace(-3, 3, 5000)[:, None] * np.linspace(-1, 1, DIM)  # several blocks
    numbers, scales = rounded(np.stack([nothing, line]).astype(np.float32), threads=2)
    assert not numbers[0].any() and (scales > 0).all()
    assert (np.abs(numbers[1] * scales[1, :, None] - line) <= 0.5001 * scales[1, :, None]).all()
    assert (abs(numbers[1]).max(axis=1) == 127).all()


def test_page_bounds_hold_and_the_best_pages_are_chosen() -> None:
    keys, query_sets = clustered(320)
    scorer = made("quest", keys)
    assert isinstance(scorer, QuestScorer)
    bounds = scorer.bounds(query_sets[0])
    pages = keys.reshape(HEADS, -1, PAGE, DIM)
    scores = np.einsum("hd,hpnd->hpn", query_sets[0], pages)
    assert (bounds >= scores.max(axis=2) - 1e-4).all()
    corners = np.maximum(query_sets[0][:, None] * pages.max(2), query_sets[0][:, None] * pages.min(2)).sum(-1)
    assert np.allclose(bounds, corners, atol=1e-4), "not larger than necessary"
    found = scorer.top(query_sets[0], 40)
    for head in range(HEADS):
        counts = np.bincount(found[head] // PAGE, minlength=20)
        assert counts[np.argsort(-bounds[head])[:3]].tolist() == [PAGE, PAGE, 8]


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_the_best_pages_are_found_without_scoring_every_chunk(combine: str) -> None:
    keys = np.random.default_rng(0).standard_normal((HEADS, 64 * PAGE, DIM), np.float32)
    keys[:, 40 * PAGE : 44 * PAGE] += 1  # one chunk has larger bounds
    made, plain = (
        ChunkScorer(KvShape("m", 1, HEADS, DIM, "float32", PAGE), 0, ScorerSettings(combine, 1, chunk_pages=5)) for _ in "ab"
    )
    made.add(keys[:, : 32 * PAGE])
    made.add(np.ones((HEADS, 13 * PAGE, DIM), np.float32))
    made.crop(32 * PAGE + 3)  # chunks may end anywhere
    made.add(keys[:, 32 * PAGE :])
    plain.add(keys)
    for seed in range(30):
        queries = np.random.default_rng(seed).standard_normal((2 * HEADS, DIM), np.float32)
        for pages, count in ((range(64), 5), (range(3, 60), 1), (range(2, 9), 7), (range(1, 64), 40)):
            bounds = plain.bounds(queries)[:, pages.start : pages.stop]
            expected = np.sort(np.argsort(-bounds, axis=1, kind="stable")[:, :count]) + pages.start
            np.testing.assert_array_equal(made.best_pages(queries, pages, count), expected)


@pytest.mark.parametrize("inserted", [False, True])
def test_a_tree_finds_most_of_the_best_on_clustered_keys(inserted: bool) -> None:
    """Recall of the 64 best of 16 Ki keys, with 1/20 of the keys visited; a third of them was added one page at a time."""
    keys, query_sets = clustered(16384)
    index = DciIndex(DIM)
    built = 11008 if inserted else 16384
    index.insert(keys[0, :built], np.arange(built))
    for first in range(built, 16384, PAGE):
        index.insert(keys[0, first : first + PAGE], np.arange(first, first + PAGE))
    truth = np.argsort(-(query_sets[:, 0] @ keys[0].T), axis=1)[:, :64]
    found = index.query(query_sets[:, 0], 64)
    recall = np.mean([len(np.intersect1d(one.tokens, best)) / 64 for one, best in zip(found, truth, strict=True)])
    touched = np.mean([one.touched for one in found]) / 16384
    assert recall > 0.85 and touched < 0.06
    exact = keys[0][found[0].tokens] @ query_sets[0, 0]
    assert np.abs(found[0].scores - exact).max() < 1e-2 and (np.diff(found[0].scores) <= 0).all()
    index.settings = replace(index.settings, **BOUNDLESS)
    missed = [set(truth[i]) - set(one.tokens) for i, one in enumerate(index.query(query_sets[:, 0], 64))]
    assert sum(map(len, missed)) <= 64, "without bounds, only the rounding to fp16 causes misses"
    if not inserted:
        halves = keys.astype(np.float16).astype(np.float32)
        tree = DciIndex(DIM, index.settings)
        tree.insert(halves[0], np.arange(16384))
        scores = query_sets[:8, 0] @ halves[0].T
        for query, one in zip(scores, tree.query(query_sets[:8, 0], 64), strict=True):
            assert query[one.tokens].min() >= np.sort(query)[-64] - 1e-4


def test_prioritized_queries_visit_the_configured_share() -> None:
    """P-DCI with random directions: fewer products, and better than a random choice."""
    keys, query_sets = clustered(4096)
    knobs = DciSettings(first_promotion=0.01, retrieve=0.5, simple=2, composite=4, **{**BOUNDLESS, "field_of_view": 32})
    pruned, whole = DciIndex(DIM, knobs), DciIndex(DIM, replace(knobs, retrieve=1.0))
    for index in (pruned, whole):
        index.insert(keys[0], np.arange(4096))
    products, hits = [], []
    for query in query_sets[:32, 0]:
        half, full = (index.query(query[None], 10)[0] for index in (pruned, whole))
        products.append(half.touched / full.touched)
        hits.append(len(np.intersect1d(half.tokens, full.tokens)) / 10)
    assert 0.3 < np.mean(products) < 0.6
    assert np.mean(hits) > np.mean(products) + 0.05


def test_pages_of_a_tree_are_chosen_whole_up_to_the_budget() -> None:
    keys, query_sets = clustered(4096)
    tree = made("dci", keys, 16)
    assert isinstance(tree, DciScorer)
    queries = np.repeat(query_sets[0], 2, axis=0)
    queries[1::2] = query_sets[7]
    chosen, alone = tree.pages(queries, 100), tree.best(queries, 100)
    assert chosen.shape == alone.shape == (HEADS, 100)
    for head, index in enumerate(tree.indexes):
        slots = index.tree.where[chosen[head] - 16]
        pages, counts = np.unique(slots // 16, return_counts=True)
        partly = [page for page, count in zip(pages, counts, strict=True) if count < index.tree.pages[page, 0]]
        assert len(partly) <= 1, "all pages but the last are complete"
        own = queries.reshape(HEADS, -1, DIM)[head]
        for query in own:
            first = 16 + int(np.argmax(keys[head] @ query))
            assert first in alone[head], "GQA: the best of every query is in the union"
        scores = own @ keys[head].T
        short = (scores - scores.max(axis=1, keepdims=True)).max(axis=0)
        assert short[alone[head] - 16].mean() > short[chosen[head] - 16].mean() > short.mean()


def test_auto_takes_a_tree_that_wins_its_trial() -> None:
    keys, query_sets = clustered(4096)
    scorer = made("auto", keys, least=2048)
    assert isinstance(scorer, AutoScorer) and isinstance(scorer.used, ExactScorer)
    for number in range(QUERIES):
        scorer.top(query_sets[number], 32)
    assert scorer.trial is not None and scorer.trial.tokens == 4096 and scorer.trial.recall > 0
    expected: type[Scorer] = DciScorer if scorer.trial.chosen == "dci" else ExactScorer
    assert type(scorer.used) is expected
    assert scorer.why.startswith(scorer.trial.chosen) and "measured at 4096 keys" in scorer.why
    scorer.add(keys[:, :512])
    assert len(scorer.used) == len(scorer) == 4608 and scorer.top(query_sets[0], 9).shape == (HEADS, 9)


def test_auto_stays_exact_if_the_recall_of_the_tree_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, query_sets = clustered(2048)
    scorer = made("auto", keys, least=1024, recall=0.99)
    monkeypatch.setattr("llmcache.kv.index.scorers.recall_of", lambda found, wanted: 0.5)
    found = [scorer.top(query_sets[number], 32) for number in range(QUERIES)]
    assert isinstance(scorer, AutoScorer) and isinstance(scorer.used, ExactScorer) and scorer.trial is not None
    assert not scorer.trial.enough and "recall 0.50" in scorer.why
    assert (found[-1] == best(keys, query_sets[QUERIES - 1], 32)).all()
    tried = scorer.trial
    scorer.top(query_sets[0], 32)
    assert scorer.trial is tried, "the next trial is at twice the number of keys"


def test_value_sums_equal_those_of_the_remaining_tokens() -> None:
    """For any order of additions and removals, and for a copy."""
    values, _ = clustered(3 * SUM_TOKENS)
    sums = ValueSums(KvShape("m", 1, HEADS, 8, "float32", PAGE, value_dim=DIM), first=PAGE)
    assert not sums.mean.any()
    for count in (PAGE, 5 * PAGE, 2 * SUM_TOKENS):
        sums.add(values[:, len(sums) : len(sums) + count])
        np.testing.assert_allclose(sums.mean, values[:, : len(sums)].mean(1), rtol=1e-4, atol=1e-6)
    other = copy.deepcopy(sums)
    sums.crop(sums.end)
    assert len(sums) == len(other), "unknown tokens are ignored"
    for stop in (2 * SUM_TOKENS + 3 * PAGE, SUM_TOKENS + PAGE, 40, 0):
        sums.crop(stop)
        assert len(sums) % SUM_TOKENS == 0 and stop - PAGE - SUM_TOKENS < len(sums) <= max(0, stop - PAGE)
        if len(sums):
            np.testing.assert_allclose(sums.mean, values[:, : len(sums)].mean(1), rtol=1e-4, atol=1e-6)
    sums.add(values[:, : len(other)])
    np.testing.assert_allclose(sums.mean, other.mean, rtol=1e-6)
    assert sums.size_bytes == 4 * HEADS * DIM * 8
    with pytest.raises(ValueError, match="values: "):
        sums.add(values[..., :8])


def test_errors_name_the_invalid_argument() -> None:
    keys, query_sets = clustered(32)
    scorer = made("quest", keys)
    for wrong in (keys[:1], keys[:, :17], keys[..., :5], keys.astype(np.float16)):
        with pytest.raises(ValueError, match="keys: "):
            scorer.add(wrong)
    with pytest.raises(ValueError, match="queries: "):
        scorer.top(query_sets[0][:1], 3)
    with pytest.raises(ValueError, match="k: must be at least 1, not 0"):
        scorer.top(query_sets[0], 0)
