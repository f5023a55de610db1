"""IceCache and Quest over a store: when keys are indexed, which tokens are selected, and how an index is restored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcache.kv.index.dci import DciSettings
from llmcache.kv.index.scorers import DciScorer, Scorer
from llmcache.kv.policies.base import PolicySettings
from llmcache.kv.policies.indexed import IceCache, IceCacheSettings, IndexedPolicy
from llmcache.kv.tiers import KvStore
from tests.unit.kv_policy_parts import KV_HEADS, LAYERS, PAGE, Case, Run, running
from tests.unit.test_kv_scorers import keys_of

CASE = Case(batch=2)
BUDGET = IceCacheSettings(token_budget=128, scorer="dci", dci=DciSettings(visit=1.0))


def policy_of(run: Run) -> IndexedPolicy:
    assert isinstance(run.policy, IndexedPolicy)
    return run.policy


def scorer_of(run: Run, layer: int, sequence: int) -> Scorer:
    found = policy_of(run).indexes.found[layer][sequence]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scorer", "dtype"),
    [("dci", "float32"), ("dci", "float16"), ("exact", "float16"), ("rounded", "float32"), ("quest", "float16")],
)
def test_a_prefill_is_indexed_in_its_step_and_pages_when_they_leave_the_window(
    scorer: str, dtype: str, tmp_path: Path
) -> None:
    case = replace(CASE, dtype=dtype)
    with running("icecache", IceCacheSettings(token_budget=128, scorer=scorer), case, tmp_path) as run:
        # 300 tokens have 18 whole pages: the first is the sink, the last two the window; `prefilled` was called before
        # `commit`.
        assert [scorer_of(run, layer, 1).end for layer in range(LAYERS)] == [256, 256]
        ends = []
        for _ in range(24):
            run.step()
            ends.append(scorer_of(run, 0, 0).end)
        assert ends == [256] * 3 + [272] * 16 + [288] * 5
        assert policy_of(run).indexes.size_bytes > 0


def test_first_layers_attend_to_all_and_others_reuse_the_selection_of_their_anchor(tmp_path: Path) -> None:
    with running("icecache", replace(BUDGET, full_layers=1), CASE, tmp_path) as run:
        first, second = (run.policy.select(layer, run.queries(layer)) for layer in range(2))
        assert first.count == len(run.store.middle) * PAGE and second.count == 128 - (300 - 240)
        assert policy_of(run).indexes.found[0] == [None, None], "no index where none is queried"
    with running("icecache", replace(BUDGET, anchor_every=3), CASE, tmp_path / "b") as run:
        for _ in range(3):
            (anchor, _), (behind, _) = run.step()
            assert np.array_equal(anchor.positions, behind.positions)
        assert policy_of(run).indexes.found[1] == [None, None]
        alone = run.policy.select(1, run.queries(1))
        assert not np.array_equal(alone.positions, behind.positions), "its anchor did not select in this step"
    with running("icecache", replace(BUDGET, full_layers=2, anchor_every=3), CASE, tmp_path / "c") as run:
        anchors = [policy_of(run).anchor_of(layer) for layer in range(10)]
        assert anchors == [0, 1, 2, 2, 2, 5, 5, 5, 8, 8]


def test_forks_share_an_index_until_their_pages_differ(tmp_path: Path) -> None:
    with running("icecache", BUDGET, CASE, tmp_path) as run:
        run.reorder([1, 1])
        assert scorer_of(run, 0, 0) is scorer_of(run, 0, 1)
        size = policy_of(run).indexes.size_bytes
        for _ in range(4):
            run.step()
        assert scorer_of(run, 0, 0) is not scorer_of(run, 0, 1)
        assert scorer_of(run, 0, 0).end == scorer_of(run, 0, 1).end == 272
        assert policy_of(run).indexes.size_bytes > 1.5 * size
        for sequence in range(2):
            tree = scorer_of(run, 0, sequence)
            assert isinstance(tree, DciScorer)
            assert np.abs(keys_of(tree.indexes[0], np.arange(16, 272)) - run.keys[0][sequence, 0, 16:272]).max() < 0.01


@pytest.mark.parametrize("name", ["icecache", "quest"])
def test_padding_is_selected_last_and_the_following_tokens_always(name: str, tmp_path: Path) -> None:
    with running(name, PolicySettings(token_budget=144), CASE, tmp_path, first=100) as run:
        for _ in range(3):
            found = run.policy.select(0, run.queries(0)).positions
            share = found[found >= 100].size / found[:, :, 0].size
            assert share >= found.shape[2] - (4 if name == "quest" else 0), "Quest takes the page of the first tokens whole"
            assert all(np.isin(np.arange(100, 112), found[b, h]).all() for b in range(2) for h in range(KV_HEADS))
            run.step()
    with running(name, PolicySettings(token_budget=240), CASE, tmp_path / "b", first=230) as run:
        found = run.policy.select(0, run.queries(0)).positions
        expected = np.arange(256 - found.shape[2], 256)
        assert (found == expected).all(), "only the padding that is needed, the last of it first"


def test_padding_set_later_is_removed_from_the_index(tmp_path: Path) -> None:
    with running("icecache", BUDGET, CASE, tmp_path) as run:
        run.policy.pad(np.array([0, 100]))
        assert policy_of(run).indexes.found[0][1] is None and scorer_of(run, 0, 0).first == 16
        run.policy.select(0, run.queries(0))
        assert scorer_of(run, 0, 1).first == 112


def test_an_index_is_saved_next_to_the_file_and_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running("icecache", BUDGET, CASE, tmp_path) as run:
        run.step()
        policy = run.policy
        assert isinstance(policy, IceCache)
        run.store.save()
        policy.saved()
        queries = run.queries(0)
        expected = policy.select(0, queries).positions
    with KvStore.restore(tmp_path / "kv.spill", CASE.config(tmp_path)) as store:
        again = IceCache(store, BUDGET)
        again.restored()
        assert all(isinstance(scorer, DciScorer) for row in again.indexes.found for scorer in row)
        before = store.traffic.to_json()
        assert np.array_equal(again.select(0, queries).positions, expected)
        assert store.traffic.to_json() == before, "the selection read no key"
        store.crop(290)
        other = IceCache(store, BUDGET)
        with caplog.at_level("WARNING"):
            other.restored()
        assert "tokens: the index has 301, but the spill file 290: the trees are rebuilt" in caplog.text.replace("\n", " ")
        assert other.indexes.found[0][0] is None


@pytest.mark.parametrize(("sink", "window"), [(16, 64), (16, 16), (32, 32), (0, 32)])
def test_a_saved_index_fits_another_sink_and_window(sink: int, window: int, tmp_path: Path) -> None:
    with running("icecache", BUDGET, CASE, tmp_path) as run:
        run.store.save()
        run.policy.saved()
        queries = run.queries(0)
    with KvStore.restore(
        tmp_path / "kv.spill", replace(CASE.config(tmp_path), sink_tokens=sink, window_tokens=window)
    ) as store:
        policy = IceCache(store, BUDGET)
        policy.restored()
        assert (policy.indexes.found[0][0] is not None) == (sink == 16)
        found = store.gather(0, policy.select(0, queries)).positions
        assert found.shape[2] == 128 and (np.diff(found, axis=2) > 0).all()
