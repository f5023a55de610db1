"""Kelle over a store selects the tokens in AERP's slots, restores evicted ones only if spilled, and records runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmcache.arrays import Floats
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.policies.h2o import Kelle, KelleSettings
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore, Selection, StoreConfig
from llmcache.papers.edram.aerp import AerpSettings, Slots
from llmcache.papers.edram.constants import KELLE_INTERVALS, PAPER
from llmcache.papers.edram.kelle import KelleRecorder
from llmcache.papers.edram.refresh import account, read_run
from tests.conftest import examples
from tests.unit.kv_policy_parts import KV_HEADS, LAYERS, Case, commit, running

DIM = 4


def append_tokens(store: KvStore, tokens: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for layer in range(store.shape.layers):
        rows = random.standard_normal((2, store.batch, store.shape.kv_heads, tokens, DIM), np.float32)
        store.append(layer, rows[0], rows[1])


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_with_pages_of_one_token_it_selects_the_slots_of_aerp(
    sinks: int, window: int, spare: int, prompt: int, seed: int
) -> None:
    budget = sinks + window + spare
    shape = KvShape("kelle", layers=1, kv_heads=2, head_dim=DIM, dtype="float32", page_tokens=1)
    random = np.random.default_rng(seed)
    with KvStore(StoreConfig(shape, 1, sinks, window, threads=1)) as store:
        policy = Kelle(store, KelleSettings(token_budget=budget))
        append_tokens(store, prompt, 1)
        queries = random.standard_normal((1, 4, prompt, DIM), np.float32)
        policy.prefilled(0, queries, 0)
        commit(store, prompt)
        slots = Slots(AerpSettings(budget, sinks, window), 2)
        slots.fill(policy.sums.rows(0, 0, prompt).T.astype(np.float64))
        for step in range(20):
            selection = policy.select(0, random.standard_normal((1, 4, DIM), np.float32))
            append_tokens(store, 1, step)
            positions = policy.store.attended_positions(0, selection)
            for head in range(2):
                tokens = set(slots.positions[head, : slots.count].tolist())
                assert tokens | {slots.newest + 1} == set(positions[0, head].tolist())
            weights = random.random((1, 4, positions.shape[2]), np.float32)
            policy.attended(0, selection, weights)
            commit(store, 1)
            slots.add(in_slots(slots, positions[0], weights[0].reshape(2, 2, -1).sum(1)))


def in_slots(slots: Slots, positions: NDArray[np.int64], weights: Floats) -> NDArray[np.float64]:
    """Return the weights in the order of the slots, the new token last."""
    rows = []
    for own, tokens, weight in zip(slots.positions[:, : slots.count], positions, weights, strict=True):
        at = dict(zip(tokens.tolist(), weight.tolist(), strict=True))
        rows.append([at[position] for position in [*own.tolist(), slots.newest + 1]])
    return np.array(rows, np.float64)


def selected(policy: KvPolicy, step: int) -> NDArray[np.int64]:
    return policy.select(0, np.random.default_rng(step).standard_normal((1, 4, 16), np.float32)).positions


@pytest.mark.parametrize("evicted", ["lost", "spilled"])
def test_a_dropped_token_returns_only_if_it_was_spilled(evicted: str, tmp_path: Path) -> None:
    with running("kelle", KelleSettings(token_budget=100, evicted=evicted), Case(), tmp_path) as run:
        before = selected(run.policy, 0)
        run.step()
        dropped = np.setdiff1d(np.arange(16, 256), before[0, 0])[0]
        unlike = Selection(np.full((1, KV_HEADS, 1), dropped, np.int64))
        positions = run.policy.store.attended_positions(0, unlike)
        KvPolicy.attended(run.policy, 0, unlike)
        rows = run.policy.sums.rows(0, 0, positions.max() + 1)  # type: ignore[attr-defined]
        rows[dropped] += 1000
        assert (selected(run.policy, 1) == dropped).any() == (evicted == "spilled")


def test_a_recorded_run_can_be_accounted(tmp_path: Path) -> None:
    with running("kelle", KelleSettings(token_budget=100), Case(batch=2), tmp_path) as run:
        assert isinstance(run.policy, Kelle)
        recorder = KelleRecorder(run.policy, step_ns=2e6)
        with pytest.raises(ValueError, match=r"^end_record: "):
            recorder.run()
        for _ in range(20):
            run.step()
        found = recorder.run("a run", note=1)
    found.save(tmp_path / "run.json")
    again = read_run(tmp_path / "run.json")
    assert again == found and again.steps == 20 and again.title == "a run" and again.settings["note"] == 1
    assert again.settings["policy"] == "kelle" and again.clock.startswith("modelled")
    cached = again.column("kv", "high") + again.column("kv", "low")
    assert (cached == LAYERS * 2 * KV_HEADS * 101).all()  # the budget and the new token
    assert (again.column("kv", "evicted")[1:] == again.column("kv", "appended")[1:]).all()
    assert (again.column("kv", "high") > cached / 2).all()  # sink, window, and half of the rest
    for rule in ("ticks", "floor"):
        energy = account(again, KELLE_INTERVALS, PAPER.refresh_j_per_byte, rule=rule)
        assert energy.joules == pytest.approx(sum(group.joules for group in energy.groups), rel=1e-9)
        assert energy.joules > 0 and energy.seconds == pytest.approx(0.04)
