"""The DCI-tree against brute force: its invariants hold after builds, inserts, splits and removals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.arrays import Floats
from llmcache.errors import DataError, MissingRequirement
from llmcache.kv.index.dci import DciIndex, DciSettings, load_indexes, save_indexes
from llmcache.kv.index.dci.file import fault_of
from llmcache.kv.index.dci.tree import BASE, COUNT, HOME, LEVEL, LEVELS, LIVE_PAGES, NODES, PAGES, ROOT, SIZE
from tests.conftest import examples
from tests.unit.kv_parts import ids
from tests.unit.test_kv_scorers import BOUNDLESS, keys_of

DIM = 24
SMALL = DciSettings(promotion=0.4, first_promotion=0.3, page_slots=4, seed=3)


def some_keys(count: int, seed: int = 0, spread: float = 1.0) -> Floats:
    """Return keys in a few clusters, with different norms."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((7, DIM)) * random.uniform(0.5, 2, (7, 1))
    found = centres[random.integers(0, 7, count)] + 0.3 * spread * random.standard_normal((count, DIM))
    return found.astype(np.float32)


def built(count: int, options: DciSettings = SMALL, base: int = 0) -> tuple[DciIndex, Floats]:
    index, keys = DciIndex(DIM, options, base), some_keys(count)
    index.insert(keys, ids(base, count))
    return index, keys


def levels_and_parents(index: DciIndex) -> dict[int, tuple[int, int]]:
    """Return level and parent (-1: the root) of each token, read from the arrays alone."""
    tree, found = index.tree, {}
    size = index.settings.page_slots
    for page in range(int(tree.state[PAGES])):
        node = tree.pages[page, HOME]
        for slot in range(page * size, page * size + tree.pages[page, COUNT]):
            found[int(tree.tokens[slot])] = (int(tree.nodes[node, LEVEL]), int(tree.nodes[node, 1]))
    return found


def check_tree(index: DciIndex, tokens: set[int]) -> None:
    """Check a tree by `fault_of`, and by an independent walk."""
    assert fault_of(index.tree) is None
    found = levels_and_parents(index)
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
def test_any_sequence_of_changes_keeps_the_tree_valid(changes: list[Change], count: int, slots: int, seed: int) -> None:
    options = replace(SMALL, page_slots=slots, seed=seed)
    index, random = DciIndex(DIM, options, 5), np.random.default_rng(seed)
    keys = some_keys(2000, seed)
    following, tokens = 5 + count, set(range(5, 5 + count))
    index.insert(keys[5 : 5 + count], ids(5, count))
    for kind, size in changes:
        if kind.startswith("add"):
            more = 16 if kind == "add page" else size
            index.insert(keys[following : following + more] * (1 + size / 40), ids(following, more))
            tokens |= set(range(following, following + more))
            following += more
        elif tokens:
            present = sorted(tokens)
            removed = present[-size:] if kind == "crop" else random.choice(present, min(size, len(present)), replace=False)
            index.remove(np.array(removed, np.int64))
            tokens -= set(map(int, removed))
        check_tree(index, tokens)


def test_memory_does_not_grow_with_removed_tokens() -> None:
    index, keys = built(1000)
    for _ in range(3):
        size = index.size_bytes
        index.remove(ids(200, 800))
        index.insert(keys[200:], ids(200, 800))
    assert index.size_bytes <= 1.1 * size
    pages = int(index.tree.state[LIVE_PAGES])
    # Splits leave at least half a page; only one page per node may have less.
    assert pages <= 1000 / (index.settings.page_slots // 2) + int(index.tree.state[NODES])


def brute_parents(index: DciIndex, keys: Floats) -> tuple[int, int]:
    """Return how many points have the nearest point of the next level as parent, and how many points have a parent."""
    bound = index.scale.bound
    lifted = np.concatenate([keys / bound, np.sqrt(np.maximum(1 - (keys**2).sum(1) / bound**2, 0))[:, None]], 1)
    found, nearest, below = levels_and_parents(index), 0, 0
    by_level: dict[int, list[int]] = {}
    for token, (level, _) in found.items():
        by_level.setdefault(level, []).append(token)
    for token, (_, parent) in found.items():
        if parent >= 0:
            above = by_level[found[token][0] + 1]
            distances = ((lifted[above] - lifted[token]) ** 2).sum(1)
            nearest += int(((lifted[parent] - lifted[token]) ** 2).sum() <= distances.min() * (1 + 1e-2) + 1e-6)
            below += 1
    return nearest, below


def test_parents_are_the_nearest_points_of_the_next_level() -> None:
    options = DciSettings(promotion=0.2, first_promotion=0.1)
    exact, keys = built(2000, replace(options, build_view=0))
    nearest, below = brute_parents(exact, keys)
    assert nearest == below > 1900
    nearest, below = brute_parents(built(2000, options)[0], keys)
    assert nearest > 0.9 * below, "the search for a parent with a bounded field of view finds most of them"


def test_keys_are_stored_as_scaled_fp16() -> None:
    index, keys = built(200)
    assert np.abs(keys_of(index, ids(0, 200)) - keys).max() <= 2.0**-11 * np.abs(keys).max()
    grown = DciIndex(DIM, SMALL)
    fp16_keys = keys.astype(np.float16).astype(np.float32)
    grown.insert(fp16_keys, ids(0, 200))
    assert (keys_of(grown, ids(0, 200)) == fp16_keys).all(), "s is a power of two"
    grown.insert(1e6 * keys[:5], ids(200, 5))
    check_tree(grown, set(range(205)))
    assert grown.scale.bound >= np.linalg.norm(1e6 * keys[:5], axis=1).max()
    zero = DciIndex(DIM, SMALL)
    zero.insert(np.zeros((50, DIM), np.float32), ids(0, 50))
    check_tree(zero, set(range(50)))


@pytest.mark.parametrize("options", [SMALL, replace(SMALL, retrieve=0.7, simple=2, composite=2)])
def test_a_restored_tree_is_the_same(tmp_path: Path, options: DciSettings) -> None:
    indexes = {(0, 0, head): built(100 + 100 * head, replace(options, seed=head), 16)[0] for head in range(2)}
    identity = {"model": "m", "tokens": 216}
    save_indexes(tmp_path / "dci-a.kv", indexes, identity)
    assert len(list(tmp_path.iterdir())) == 1
    restored = load_indexes(tmp_path / "dci-a.kv", identity)
    assert list(restored) == list(indexes)
    for place, index in indexes.items():
        again = restored[place]
        queries = some_keys(3, 8)
        for first_result, second_result in zip(index.query(queries, 20), again.query(queries, 20), strict=True):
            assert (first_result.tokens == second_result.tokens).all() and (
                first_result.scores == second_result.scores
            ).all()
        for one in (index, again):  # both continue alike
            one.insert(some_keys(40, 5), ids(16 + 300, 40))
            one.remove(ids(20, 30))
        assert [levels_and_parents(index), len(index)] == [
            levels_and_parents(again),
            len(again),
        ] and index.settings == again.settings
        check_tree(again, set(levels_and_parents(index)))


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(MissingRequirement, match="reading an index"):
        load_indexes(tmp_path / "none", identity)
    with pytest.raises(MissingRequirement, match="writing an index"):
        save_indexes(tmp_path / "no" / "such", {}, identity)


def test_the_check_of_a_tree_finds_faults() -> None:
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


def test_bad_arguments_are_refused() -> None:
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
    for removed in ([60], [-1], [13, 13], [10**9]):
        with pytest.raises(ValueError, match="tokens: some"):
            index.remove(np.array(removed))
    assert len(index) == 50
    with pytest.raises(ValueError, match="k: must be at least 1, not 0"):
        index.query(np.zeros((1, DIM), np.float32), 0)
    with pytest.raises(ValueError, match=r"queries: must be float32 .*, not float64"):
        index.query(np.zeros((1, DIM)), 1)  # type: ignore[arg-type]
    for field, wrong in (("promotion", 1.0), ("retrieve", 0.0), ("field_of_view", 0), ("page_slots", 0), ("margin", -1.0)):
        with pytest.raises(ValueError, match=field):
            DciSettings(**{field: wrong})  # type: ignore[arg-type]
