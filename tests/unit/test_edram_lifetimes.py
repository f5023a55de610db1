"""Lifetimes by equations 4 to 8, and the evictor that searches while the array computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.edram.accelerator import evaluate
from llmcache.edram.aerp import AerpSettings, Slots
from llmcache.edram.constants import PAPER
from llmcache.edram.evictor import evictor_cost, search
from llmcache.edram.lifetimes import Access, baseline, kelle, lifetimes_of
from tests.unit.accelerator_parts import configuration

LLAMA2 = Access(weight_bytes=4096 * 4096, kv_bytes=2048 * 4096 * 2)


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_totals_are_those_of_equations_7_and_8(weight: float, kv: float) -> None:
    access = Access(weight, kv)
    sram, edram = access.sram_ns, access.edram_ns
    assert baseline(access).total_ns == pytest.approx(6 * sram + 4 * edram)
    assert kelle(access).total_ns == pytest.approx(4 * sram + edram)
    assert 0.25 < kelle(access).total_ns / baseline(access).total_ns < 2 / 3


def test_times_are_bytes_over_bandwidth() -> None:
    assert pytest.approx(4096**2 / 128e9 * 1e9) == LLAMA2.sram_ns
    assert pytest.approx(2048 * 8192 / 256e9 * 1e9) == LLAMA2.edram_ns


def test_weights_that_stream_come_no_faster_than_dram_delivers_them() -> None:
    streamed = Access(LLAMA2.weight_bytes, LLAMA2.kv_bytes, dram_bytes_per_s=64e9)
    assert streamed.sram_ns == pytest.approx(2 * LLAMA2.sram_ns)
    assert Access(1, 1, dram_bytes_per_s=1e12).sram_ns == Access(1, 1).sram_ns


@pytest.mark.parametrize("name", ["Original+eDRAM", "Kelle+eDRAM"])
def test_the_accelerator_model_refreshes_activations_by_their_lifetimes(name: str) -> None:
    """One decode step, layer by layer, in whole intervals; what the prefill refreshes meanwhile is taken off."""
    one = configuration("llama2-7b", "PG19", name, context=2000, decode=1)
    found = evaluate([one])
    layers, width = one.model.layers, 16 * 4096 * 2.0
    lives = lifetimes_of(one)
    refreshes = sum(life // one.policy.activation_interval_ns for life in (lives.x_ns, lives.q_ns, lives.k_ns, lives.v_ns))
    wanted = layers * width * refreshes * PAPER.refresh_j_per_byte
    prefill_s = found.latencies_s["prefill_array"][0] + found.latencies_s["prefill_dram"][0]
    live = PAPER.refresh_w(one.hardware.activation_bytes, one.policy.activation_interval_ns) * prefill_s
    assert found.energies_j["refresh_activations"][0] - live == pytest.approx(wanted, rel=1e-6) and wanted > 0


@pytest.mark.parametrize("name", ["weight_bytes", "kv_bytes", "sram_bytes_per_s", "edram_bytes_per_s", "dram_bytes_per_s"])
def test_what_cannot_be_is_named(name: str) -> None:
    values: dict[str, Any] = {"weight_bytes": 1.0, "kv_bytes": 1.0} | {name: -1.0}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        Access(**values)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 32]))
def test_the_chain_finds_the_least_score_that_may_go_when_the_last_row_is_done(slots: int, seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    scores, products = random.integers(0, 9, slots).astype(float), random.integers(-3, 4, slots).astype(float)
    protected = random.random(slots) < 0.3
    protected[random.integers(slots)] = False
    found = search(scores, products, protected, rows)
    assert (found.scores == scores + products).all() and found.cycles == slots + 1
    assert found.slot == int(np.where(protected, np.inf, scores + products).argmin())


def test_the_chain_evicts_what_the_policy_evicts() -> None:
    slots = Slots(AerpSettings(40, sinks=3, window=8, score="logit"), 1)
    random = np.random.default_rng(0)
    slots.fill(random.random((1, 40)))
    for _ in range(50):
        gains = random.standard_normal((1, 41))
        found = search(slots.scores[0].copy(), gains[0, :40], slots.protected_at(slots.newest + 1)[0])
        assert slots.positions[0, found.slot] == slots.add(gains).evicted[0]


def test_a_search_with_nothing_to_find_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^protected: "):
        search(np.zeros(3), np.zeros(3), np.ones(3, np.bool_))


def test_the_evictor_stalls_for_a_cycle_where_a_scan_takes_one_per_token() -> None:
    cost = evictor_cost(2048, 32, 32, step_ns=1e8)
    assert cost.search_ns == 2048 * cost.stall_ns == 2048 * 1024
    assert cost.register_bytes == 1024 * 1024 and cost.search_bytes == 2 * cost.register_bytes
    assert cost.joules == pytest.approx(0.0028)
    assert evictor_cost(2048, 32, 32, batch=16).stall_ns == 16 * cost.stall_ns
