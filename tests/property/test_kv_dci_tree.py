"""The DCI-tree against brute force: whatever is built, added, split and taken away, it stays what it is said to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.arrays import Floats
from llmcache.errors import DataError, EnvironmentProblem
from llmcache.kv.index.dci import DciIndex, DciSettings, load_indexes, save_indexes
from llmcache.kv.index.dci.file import fault_of
from llmcache.kv.index.dci.tree import BASE, COUNT, HOME, LEVEL, LEVELS, LIVE_PAGES, NODES, PAGES, ROOT, SIZE
from tests.conftest import examples
from tests.unit.kv_parts import ids
from tests.unit.test_kv_scorers import BOUNDLESS, keys_of

DIM = 24
SMALL = DciSettings(promotion=0.4, first_promotion=0.3, page_slots=4, seed=3)


def some_keys(count: int, seed: int = 0, spread: float = 1.0) -> Floats:
    """Return keys in a few clusters, of norms that differ."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((7, DIM)) * random.uniform(0.5, 2, (7, 1))
    found = centres[random.integers(0, 7, count)] + 0.3 * spread * random.standard_normal((count, DIM))
    return found.astype(np.float32)


def built(count: int, knobs: DciSettings = SMALL, base: int = 0) -> tuple[DciIndex, Floats]:
    index, keys = DciIndex(DIM, knobs, base), some_keys(count)
    index.insert(keys, ids(base, count))
    return index, keys


def held(index: DciIndex) -> dict[int, tuple[int, int]]:
    """Return level and parent (-1: the root) of each token, by the arrays alone."""
    tree, found = index.tree, {}
    size = index.settings.page_slots
    for page in range(int(tree.state[PAGES])):
        node = tree.pages[page, HOME]
        for slot in range(page * size, page * size + tree.pages[page, COUNT]):
            found[int(tree.tokens[slot])] = (int(tree.nodes[node, LEVEL]), int(tree.nodes[node, 1]))
    return found


def well_formed(index: DciIndex, tokens: set[int]) -> None:
    """Check a tree by its own checks, and by a walk that knows nothing of them."""
    assert fault_of(index.tree) is None
    found = held(index)
    assert set(found) == tokens and len(index) == len(tokens)
    top = int(index.tree.state[LEVELS])
    for level, parent in found.values():
        assert (parent == -1) == (level == top)
        assert parent == -1 or found[parent][0] == level + 1
    assert {level for level, _ in found.values()} == (set(range(1, top + 1)) if tokens else set())
    if tokens:
        bounded, index.settings = index.settings, replace(index.settings, **BOUNDLESS)
        everything = index.query(np.ones((1, DIM), np.float32), len(tokens))[0]
        index.settings = bounded
        assert sorted(everything.tokens) == sorted(tokens) and everything.touched == len(tokens)


Change = tuple[str, int]
CHANGES = st.lists(st.tuples(st.sampled_from(["add", "add", "add page", "remove", "crop"]), st.integers(1, 40)), max_size=14)


@given(CHANGES, st.integers(0, 60), st.sampled_from([1, 2, 4, 16]), st.integers(0, 5))
@settings(max_examples=examples(40), deadline=None)
def test_any_sequence_of_changes_keeps_the_tree_whole(changes: list[Change], count: int, slots: int, seed: int) -> None:
    knobs = replace(SMALL, page_slots=slots, seed=seed)
    index, random = DciIndex(DIM, knobs, 5), np.random.default_rng(seed)
    keys = some_keys(2000, seed)
    following, tokens = 5 + count, set(range(5, 5 + count))
    index.insert(keys[5 : 5 + count], ids(5, count))
    for what, size in changes:
        if what.startswith("add"):
            more = 16 if what == "add page" else size
            index.insert(keys[following : following + more] * (1 + size / 40), ids(following, more))
            tokens |= set(range(following, following + more))
            following += more
        elif tokens:
            present = sorted(tokens)
            gone = present[-size:] if what == "crop" else random.choice(present, min(size, len(present)), replace=False)
            index.remove(np.array(gone, np.int64))
            tokens -= set(map(int, gone))
        well_formed(index, tokens)


def test_memory_does_not_grow_with_what_has_gone() -> None:
    index, keys = built(1000)
    for _ in range(3):
        size = index.size_bytes
        index.remove(ids(200, 800))
        index.insert(keys[200:], ids(200, 800))
    assert index.size_bytes <= 1.1 * size
    pages = int(index.tree.state[LIVE_PAGES])
    # Splits leave at least half of a page; only one page of a node may hold less.
    assert pages <= 1000 / (index.settings.page_slots // 2) + int(index.tree.state[NODES])


def brute_parents(index: DciIndex, keys: Floats) -> tuple[int, int]:
    """Return how many points hang under the nearest of the level above, and how many there are below the top level."""
    bound = index.scale.bound
    lifted = np.concatenate([keys / bound, np.sqrt(np.maximum(1 - (keys**2).sum(1) / bound**2, 0))[:, None]], 1)
    found, right, below = held(index), 0, 0
    by_level: dict[int, list[int]] = {}
    for token, (level, _) in found.items():
        by_level.setdefault(level, []).append(token)
    for token, (_, parent) in found.items():
        if parent >= 0:
            above = by_level[found[token][0] + 1]
            distances = ((lifted[above] - lifted[token]) ** 2).sum(1)
            right += int(((lifted[parent] - lifted[token]) ** 2).sum() <= distances.min() * (1 + 1e-2) + 1e-6)
            below += 1
    return right, below


def test_parents_are_the_nearest_points_of_the_next_level() -> None:
    knobs = DciSettings(promotion=0.2, first_promotion=0.1)
    exact, keys = built(2000, replace(knobs, build_view=0))
    right, below = brute_parents(exact, keys)
    assert right == below > 1900
    right, below = brute_parents(built(2000, knobs)[0], keys)
    assert right > 0.9 * below, "the search for a parent with a bounded field of view finds most of them"


def test_levels_follow_the_geometric_law() -> None:
    index = DciIndex(DIM, DciSettings(promotion=0.2, first_promotion=0.05, seed=11))
    count = 200_000
    levels = index.levels_of(ids(0, count))
    for level, share in ((2, 0.05), (3, 0.05 * 0.2), (4, 0.05 * 0.2**2)):
        found, deviation = (levels >= level).mean(), np.sqrt(share / count)
        assert abs(found - share) < 5 * deviation
    # One key's luck says nothing of its neighbour's, and another seed draws others.
    up = levels > 1
    assert abs((up[1:] & up[:-1]).mean() - 0.05**2) < 5 * np.sqrt(0.05**2 / count)
    other = DciIndex(DIM, DciSettings(promotion=0.2, first_promotion=0.05, seed=12)).levels_of(ids(0, count)) > 1
    assert abs((up & other).mean() - 0.05**2) < 5 * np.sqrt(0.05**2 / count)


def test_keys_come_back_as_halves_on_a_scale() -> None:
    index, keys = built(200)
    assert np.abs(keys_of(index, ids(0, 200)) - keys).max() <= 2.0**-11 * np.abs(keys).max()
    grown = DciIndex(DIM, SMALL)
    halves = keys.astype(np.float16).astype(np.float32)
    grown.insert(halves, ids(0, 200))
    assert (keys_of(grown, ids(0, 200)) == halves).all(), "s is a power of two"
    grown.insert(1e6 * keys[:5], ids(200, 5))
    well_formed(grown, set(range(205)))
    assert grown.scale.bound >= np.linalg.norm(1e6 * keys[:5], axis=1).max()
    zero = DciIndex(DIM, SMALL)
    zero.insert(np.zeros((50, DIM), np.float32), ids(0, 50))
    well_formed(zero, set(range(50)))


@pytest.mark.parametrize("knobs", [SMALL, replace(SMALL, retrieve=0.7, simple=2, composite=2)])
def test_saved_and_restored_it_is_the_same(tmp_path: Path, knobs: DciSettings) -> None:
    indexes = {(0, 0, head): built(100 + 100 * head, replace(knobs, seed=head), 16)[0] for head in range(2)}
    identity = {"model": "m", "tokens": 216}
    save_indexes(tmp_path / "dci-a.kv", indexes, identity)
    assert len(list(tmp_path.iterdir())) == 1
    restored = load_indexes(tmp_path / "dci-a.kv", identity)
    assert list(restored) == list(indexes)
    for place, index in indexes.items():
        again = restored[place]
        asked = some_keys(3, 8)
        for mine, theirs in zip(index.query(asked, 20), again.query(asked, 20), strict=True):
            assert (mine.tokens == theirs.tokens).all() and (mine.scores == theirs.scores).all()
        for one in (index, again):  # and they go on alike
            one.insert(some_keys(40, 5), ids(16 + 300, 40))
            one.remove(ids(20, 30))
        assert [held(index), len(index)] == [held(again), len(again)] and index.settings == again.settings
        well_formed(again, set(held(index)))


def test_what_is_damaged_or_of_another_file_is_refused(tmp_path: Path) -> None:
    path, identity = tmp_path / "dci-a.kv", {"model": "m", "tokens": 100}
    save_indexes(path, {(0, 0, 0): built(100)[0]}, identity)
    whole = path.read_bytes()
    for field, value in (("model", "other"), ("tokens", 99)):
        with pytest.raises(DataError, match=field):
            load_indexes(path, {**identity, field: value})
    for place, match in ((0, "magic"), (9, "version"), (40, "header"), (len(whole) - 3000, "damaged")):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=match):
            load_indexes(path, identity)
    path.write_bytes(whole[:-5000])
    with pytest.raises(DataError, match="the file has"):
        load_indexes(path, identity)
    with pytest.raises(EnvironmentProblem, match="reading an index"):
        load_indexes(tmp_path / "none", identity)
    with pytest.raises(EnvironmentProblem, match="writing an index"):
        save_indexes(tmp_path / "no" / "such", {}, identity)


def test_the_check_of_a_tree_sees_what_is_wrong() -> None:
    tree = built(200)[0].tree
    for name, at, value in (
        ("pages", (0, COUNT), 5),
        ("pages", (3, HOME), 10_000),
        ("nodes", (ROOT, SIZE), 99),
        ("nodes", (1, 0), 9999),
        ("where", 150, -1),
        ("children", int(np.flatnonzero(tree.children[: tree.state[PAGES] * 4] > 0)[0]), 0),
        ("population", 1, 3),
        ("state", LEVELS, 1),
    ):
        array = getattr(tree, name).copy()
        array[at] = value
        assert fault_of(tree._replace(**{name: array})), (name, at)


def test_arguments_that_do_not_fit() -> None:
    index, _ = built(50, SMALL, 10)
    before, good = index.tree, np.zeros((2, DIM), np.float32)
    calls: list[tuple[str, Any, list[int]]] = [
        ("keys: must be float32 .*, not float64", good.astype(np.float64), [3000, 3001]),
        ("tokens: must be 2 ascending numbers", good, [3001, 3000]),
        ("tokens: some", good, [20, 3001]),
        ("keys: must be finite, but key 1", np.array([[0.0] * DIM, [np.nan] * DIM], np.float32), [3000, 3001]),
    ]
    for message, keys, tokens in calls:
        with pytest.raises(ValueError, match=message):
            index.insert(keys, np.array(tokens))
    assert index.tree is before and int(index.tree.state[BASE]) == 10
    for gone in ([60], [-1], [13, 13], [10**9]):
        with pytest.raises(ValueError, match="tokens: some"):
            index.remove(np.array(gone))
    assert len(index) == 50
    with pytest.raises(ValueError, match="k: must be at least 1, not 0"):
        index.query(np.zeros((1, DIM), np.float32), 0)
    with pytest.raises(ValueError, match=r"queries: must be float32 .*, not float64"):
        index.query(np.zeros((1, DIM)), 1)  # type: ignore[arg-type]
    for field, wrong in (("promotion", 1.0), ("retrieve", 0.0), ("field_of_view", 0), ("page_slots", 0), ("margin", -1.0)):
        with pytest.raises(ValueError, match=field):
            DciSettings(**{field: wrong})  # type: ignore[arg-type]
