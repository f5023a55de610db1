"""The accelerator model over random configurations: what more of something can only cost, or can only gain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.edram.accelerator import Outcomes, evaluate
from llmcache.edram.constants import GB, KELLE_INTERVALS, MIB, PROFILES
from llmcache.edram.energy import REFRESH
from llmcache.edram.systems import MODELS, RECOMPUTE_MODES, SYSTEMS, AcceleratorSystem, Configuration, GenerationWorkload
from tests.conftest import examples

RISING = [1.0, 1.5, 2.0, 3.0, 5.0, 9.0]
SLACK = 1e-6
"""Of the means of groups of steps."""


@st.composite
def cases(draw: st.DrawFn, evicting: bool = False) -> Configuration:
    """A configuration around the paper's: its models and systems with other memories, rates and lengths."""
    names = [name for name, system in SYSTEMS.items() if system.policy.evict or not evicting]
    system = SYSTEMS[draw(st.sampled_from(names))].with_recompute(draw(st.sampled_from(RECOMPUTE_MODES)))
    hardware = replace(
        system.hardware,
        array_rows=draw(st.sampled_from([8, 16, 24, 32, 64])),
        kv_capacity_bytes=draw(st.integers(0, 64)) * MIB,
        kv_bytes_per_s=draw(st.sampled_from([64, 128, 256, 512])) * GB,
        dram_bytes_per_s=draw(st.sampled_from([8, 16, 64, 128])) * GB,
        overlap=draw(st.booleans()),
    )
    policy = replace(system.policy, intervals=KELLE_INTERVALS.scaled(draw(st.floats(0.05, 20))))
    workload = GenerationWorkload(
        "random",
        context=draw(st.integers(1, 4096)),
        decode=draw(st.integers(1, 4096)),
        budget=draw(st.integers(64, 4096)),
        batch=draw(st.integers(1, 32)),
    )
    profile = PROFILES[draw(st.sampled_from(list(PROFILES)))]
    return Configuration(
        MODELS[draw(st.sampled_from(list(MODELS)))], workload, AcceleratorSystem("random", hardware, policy), profile
    )


def with_workload(one: Configuration, **changes: Any) -> Configuration:
    return replace(one, workload=replace(one.workload, **changes))


def never_falls(values: np.ndarray[Any, Any], slack: float = SLACK) -> bool:
    return bool((values[1:] * (1 + slack) >= values[:-1]).all())


@given(cases(evicting=True))
@settings(max_examples=examples(60), deadline=None)
def test_a_larger_budget_only_costs(one: Configuration) -> None:
    budgets = [int(one.workload.budget * factor) for factor in RISING]
    found = evaluate([with_workload(one, budget=budget) for budget in budgets])
    assert never_falls(found.energy_j, STALLS)
    assert never_falls(found.latency_s - found.latencies_s["eviction"])
    # Inputs take less room than keys and values: where a larger budget makes more recomputing worth its while, memory falls.
    stored = one.on(one.system.with_recompute("none"))
    assert never_falls(evaluate([with_workload(stored, budget=budget) for budget in budgets]).peak_bytes)


STALLS = 2e-3
"""What the evictor's stalls cost at most in energy: leakage and refresh of a cycle per head, layer and sequence."""


@given(cases())
@settings(max_examples=examples(60), deadline=None)
def test_faster_memory_never_slows_and_more_work_never_speeds(one: Configuration) -> None:
    def changed(factor: float) -> Configuration:
        rate = one.hardware.dram_bytes_per_s * factor
        return one.on(replace(one.system, hardware=replace(one.hardware, dram_bytes_per_s=rate)))

    assert never_falls(1 / evaluate([changed(factor) for factor in RISING]).latency_s)
    for name in ("context", "decode", "batch"):
        many = evaluate([with_workload(one, **{name: int(getattr(one.workload, name) * factor)}) for factor in RISING])
        assert never_falls(many.latency_s)
        assert never_falls(many.energy_j)
        sums_hold(one, many)


def sums_hold(one: Configuration, found: Outcomes) -> None:
    """Totals against what they must be whatever the components: refresh is power times time, DRAM by the byte."""
    np.testing.assert_allclose([sum(each.by_kind().values()) for each in found], found.energy_j, rtol=1e-9)
    assert all((values >= 0).all() for values in (*found.energies_j.values(), *found.latencies_s.values()))
    groups = np.sum([found.energies_j[name] for name in REFRESH[:4]], axis=0)
    watts = one.profile.refresh_w(one.hardware.kv_capacity_bytes, one.policy.intervals.mean_ns)
    np.testing.assert_allclose(groups, one.hardware.edram * watts * found.latency_s, rtol=1e-9)
    by_byte = np.sum([found.energies_j[name] for name in ("dram_weights", "dram_kv", "dram_activations")], axis=0)
    np.testing.assert_allclose(by_byte, one.profile.dram_j_per_byte * found.dram_bytes, rtol=1e-9)
