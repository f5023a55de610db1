"""Bidirectional pools over decode steps of a synthetic stream: what goes up and down, and what comes back in vain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmcache.kv.pipeline import KvEngine
from llmcache.kv.policies.hillinfer import HillInfer, HillInferSettings
from llmcache.kv.tiers import KvStore, StoreConfig, Traffic
from llmcache.kv.workload import StreamSpec, SyntheticStream

STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """What was counted after the prompt, and where the pages of each layer are at the end."""

    traffic: Traffic
    in_cpu: list[np.ndarray[tuple[int], np.dtype[np.bool_]]]
    policy: HillInfer


def decoded(path: Path, settings: HillInferSettings, share: float, context: int = 2048, batch: int = 1) -> Outcome:
    """Decodes `STEPS` tokens; the host's pool has `share` of the pages."""
    spec = StreamSpec(layers=1, kv_heads=2, heads=4, head_dim=32, context=context, batch=batch)
    stream = SyntheticStream(spec)
    path.mkdir(exist_ok=True)
    config = StoreConfig(spec.shape, batch, 16, 32, int(share * context / 16), path / "kv", threads=1)
    with KvStore(config) as store, KvEngine(store, policy := HillInfer(store, settings), app=False) as engine:
        engine.prefill(0, None, *stream.keys_values(0, range(context)))
        for position in range(context, context + STEPS):
            finish(engine, position)
            engine.step(0, stream.queries(0, position - context), *stream.keys_values(0, range(position, position + 1)))
            engine.attended(0)
            bound = config.cpu_pages
            assert bound is not None
            for sequence in range(batch):
                assert store.in_cpu(0, sequence).sum() <= bound
        return Outcome(store.traffic, [store.in_cpu(0, sequence) for sequence in range(batch)], policy)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """With a pool of half of the pages, of which a fifth is chosen."""
    return decoded(tmp_path_factory.mktemp("half"), HillInferSettings(alpha=0.2), 0.5)


def finish(engine: KvEngine, length: int) -> None:
    """Ends the step before the one whose token is at `length`."""
    ids = np.tile(np.arange(engine.store.length, length), (engine.store.batch, 1))
    engine.finish_step(ids, ids)


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.3), (0.2, 0.3)])
def test_pools_move_next_to_nothing_in_vain(alpha: float, share: float, tmp_path: Path) -> None:
    """At most 1 % of what comes up had gone down within 16 steps; without BKP more than 10 % has."""
    kept = decoded(tmp_path / "with", HillInferSettings(alpha=alpha), share).traffic
    naive = decoded(tmp_path / "without", HillInferSettings(alpha=alpha, bkp=False), share).traffic
    assert kept.pages_up > 10
    assert kept.ping_pong_share <= 0.01
    assert naive.ping_pong_share > 0.1
    assert naive.pages_up > 1.5 * kept.pages_up


def test_hits_rise_by_what_comes_up(half: Outcome) -> None:
    """More of what is chosen is in the pool than when nothing ever comes up but what the window leaves."""
    found = half.policy.pools.hits.pages(0, 0, 128, 16)
    still = np.arange(128) >= 128 - 64 + 1  # the pool as the prompt has left it
    assert found[half.in_cpu[0][:128]].sum() > 1.2 * found[still].sum()


def test_recent_pages_stay_up(half: Outcome) -> None:
    recent = int(0.2 * (2048 + STEPS) / 16)
    assert half.in_cpu[0][-recent:].all()


def test_pools_of_sequences_are_their_own(tmp_path: Path) -> None:
    outcome = decoded(tmp_path, HillInferSettings(alpha=0.2), 0.4, batch=2)
    assert (outcome.in_cpu[0] != outcome.in_cpu[1]).any()


def test_sequences_that_share_pages_keep_to_the_bound_in_the_end(tmp_path: Path) -> None:
    """A page that comes up for one sequence comes up for all that share it: the others drop one at their next step."""
    spec = StreamSpec(layers=1, kv_heads=2, heads=4, head_dim=32, context=1024)
    stream = SyntheticStream(spec)
    random = np.random.default_rng(0)
    config = StoreConfig(spec.shape, 1, 16, 32, 24, tmp_path / "kv", threads=1)
    with KvStore(config) as store, KvEngine(store, policy := HillInfer(store), app=False) as engine:
        engine.prefill(0, None, *stream.keys_values(0, range(1024)))
        finish(engine, 1024)
        store.select(np.zeros(3, np.int64))
        policy.reordered(np.zeros(3, np.int64))
        for position in range(1024, 1064):
            queries = 3 * random.standard_normal((3, 4, 32)).astype(np.float32)
            rows = stream.keys_values(0, range(position, position + 1))
            engine.step(0, queries, *(side.repeat(3, axis=0) for side in rows))
            engine.attended(0)
            finish(engine, position + 1)
        up = store.traffic.pages_up
        assert up > 0
        assert max(store.in_cpu(0, sequence).sum() for sequence in range(3)) <= 24 + 2


def test_a_pool_without_a_bound_never_moves_anything(tmp_path: Path) -> None:
    spec = StreamSpec(layers=1, kv_heads=2, heads=4, head_dim=32, context=512)
    stream = SyntheticStream(spec)
    with KvStore(StoreConfig(spec.shape)) as store, KvEngine(store, HillInfer(store), app=False) as engine:
        engine.prefill(0, None, *stream.keys_values(0, range(512)))
        finish(engine, 512)
        engine.step(0, stream.queries(0, 0), *stream.keys_values(0, range(512, 513)))
        engine.attended(0)
        assert (store.traffic.pages_up, store.traffic.pages_down) == (0, 0)
