"""The accelerator model: sums, groups of steps against single steps, recomputation against a search, work counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmcache.edram import accelerator, decode, energy
from llmcache.edram.accelerator import LATENCIES, evaluate
from llmcache.edram.columns import Array, Configuration, columns_of
from llmcache.edram.constants import GROUPS, KELLE_INTERVALS, MIB, PAPER, PROFILES
from llmcache.edram.decode import step_of, waits
from llmcache.edram.energy import COMPONENTS, KINDS, REFRESH
from llmcache.edram.models import MODELS
from llmcache.edram.recompute import recompute_share
from llmcache.edram.roofline import point_at, roofline_of
from llmcache.edram.steps import steps_of
from llmcache.edram.sweep import Axes
from llmcache.edram.systems import SYSTEMS, Hardware, Policy
from llmcache.edram.workloads import WORKLOADS, Workload
from tests.unit.accelerator_parts import configuration, outcome, with_hardware

EVERYTHING = [
    Configuration(model, workload, system.with_recompute(mode), profile)
    for model in MODELS.values()
    for workload in WORKLOADS.values()
    for system in SYSTEMS.values()
    for profile in PROFILES.values()
    for mode in ("first-principles", "declared")
]


def test_components_sum_to_the_total() -> None:
    found = evaluate(EVERYTHING)
    assert set(found.energies_j) == set(COMPONENTS) and set(found.latencies_s) == set(LATENCIES)
    np.testing.assert_allclose(sum(found.energies_j.values()), found.energy_j, rtol=1e-12)
    np.testing.assert_allclose(sum(found.latencies_s.values()), found.latency_s, rtol=1e-12)
    np.testing.assert_allclose(sum(found.energies_j[name] for name in REFRESH), found.refresh_j, rtol=1e-12)
    assert all((values >= 0).all() and np.isfinite(values).all() for values in found.energies_j.values())
    for one in (found[0], found[-1]):
        assert sum(one.by_kind().values()) == pytest.approx(one.energy_j, rel=1e-9)
    assert sorted(name for names in KINDS.values() for name in names) == sorted(COMPONENTS)


def test_refresh_is_the_sum_over_groups_by_their_intervals() -> None:
    one = outcome(profile=PAPER)
    by_group = np.array([one.energies_j[f"refresh_{group}"] for group in GROUPS])
    np.testing.assert_allclose(by_group * KELLE_INTERVALS.in_order(), (by_group * KELLE_INTERVALS.in_order())[0], rtol=1e-9)
    watts = by_group.sum() / one.latency_s
    assert watts == pytest.approx(PAPER.refresh_w(4 * MIB, KELLE_INTERVALS.mean_ns), rel=1e-9)
    assert outcome(system="AEP+SRAM").refresh_j == 0


def test_groups_of_steps_agree_with_every_step() -> None:
    some = EVERYTHING[::7]
    grouped, exact = evaluate(some), evaluate(some, groups=None)
    np.testing.assert_allclose(grouped.latency_s, exact.latency_s, rtol=1e-6)
    np.testing.assert_allclose(grouped.energy_j, exact.energy_j, rtol=1e-4)  # refreshes of activations are whole numbers
    np.testing.assert_array_equal(grouped.fits, exact.fits)


@pytest.mark.parametrize(("context", "decode_", "budget"), [(5, 40, 20), (30, 40, 20), (5, 7, 20), (1, 1, 11), (19, 1, 20)])
@pytest.mark.parametrize("system", ["Original+SRAM", "AEP+SRAM"])
def test_steps_are_counted_once_each(context: int, decode_: int, budget: int, system: str) -> None:
    workload = Workload("small", context, decode_, budget)
    columns = columns_of([Configuration(MODELS["llama2-7b"], workload, SYSTEMS[system])])
    cached = context + 1 + np.arange(decode_)
    cached = np.minimum(cached, budget) if SYSTEMS[system].policy.evict else cached
    for groups in (1, 3, 64, None):
        steps = steps_of(columns, groups)
        assert steps.count.sum() == decode_ and (steps.count >= 0).all()
        assert (steps.count * steps.cached).sum() == pytest.approx(cached.sum())
        tiles = np.ceil(cached / SYSTEMS[system].hardware.array_rows).sum()
        assert (steps.count * steps.row_tiles).sum() == pytest.approx(tiles)
    reached = np.minimum(context + 1, budget) if decode_ == 1 else None
    assert reached is None or reached in steps.cached


def test_one_step_by_hand() -> None:
    """LLaMA2-7B, batch 1, 100 tokens in SRAM that holds them: every term of the model, written out."""
    system = with_hardware(SYSTEMS["Original+SRAM"], kv_capacity_bytes=1 << 30)
    one = configuration(system=system, batch=1, context=99, decode=1)
    found = evaluate([one])[0]
    weights = 6_607_077_376
    tiles = 32 * (4 * 171**2 + 3 * 171 * 459) + 171 * 1334
    assert found.dram_bytes == pytest.approx(2 * weights + _prefill_bytes() + 32 * 16_384)
    linear_s = max(tiles * 576 / 128 / 1e9, weights / 64e9, weights / 128e9)
    attention_s = 32 * 32 * 2 * 6 * 5 * (576 * 2 / 128) / 1e9  # 6 tiles of 24 for 128 channels, 5 for 100 tokens
    kv_s = max(attention_s, 32 * 16_384 / 64e9, 100 * 32 * 16_384 / 128e9)
    assert sum(found.latencies_s[name] for name in decode.RESOURCES) == pytest.approx(linear_s + kv_s)
    macs = 100 * 32 * 2 * 4096 * 4 / 2
    prefill_macs = 32 * 32 * 99**2 * 128 * 4 / 2
    assert found.energies_j["array_attention"] == pytest.approx((macs + prefill_macs) * PAPER.pe_cycle_j)


def _prefill_bytes() -> int:
    """Activations and KV of 99 tokens: inputs once for each 2 MiB of a matrix (8 pieces of 4096 x 4096), outputs once."""
    per_layer = 4 * (8 * 4096 + 4096) + 2 * (22 * 4096 + 11008) + (22 * 11008 + 4096)
    return 32 * 99 * 2 * per_layer + 99 * 32 * 16_384


def test_weights_and_kv_are_loaded_at_the_same_time_only_by_the_scheduler() -> None:
    plain = configuration("llama2-7b", "TQ", "Original+eDRAM", batch=1)
    both = configuration("llama2-7b", "TQ", with_hardware(SYSTEMS["Original+eDRAM"], overlap=True), batch=1)
    one, two = evaluate([plain, both])
    assert two.latency_s <= one.latency_s
    assert two.latencies_s["dram_kv"] > 0


@pytest.mark.parametrize("system", ["AERP+SRAM", "Kelle+eDRAM"])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("task", ["LA", "TQ", "PG19"])
def test_no_other_share_makes_a_step_shorter(system: str, batch: int, task: str) -> None:
    columns = columns_of([configuration("llama2-7b", task, system, batch=batch)])
    steps = steps_of(columns, 4)
    best = recompute_share(columns, steps)

    def step_s(share: Array) -> Array:
        return np.asarray(sum(waits(columns, step_of(columns, steps, share)).values()))

    eligible = np.maximum(steps.cached - columns.sinks - columns.window, 0) / steps.cached
    for share in np.geomspace(1e-5, 1, 300):
        other = np.minimum(share, eligible)
        assert (step_s(best) <= step_s(other) * (1 + 1e-12))[steps.count > 0].all()


def test_inputs_are_never_stored_under_grouped_queries() -> None:
    grouped = [name for name, shape in MODELS.items() if shape.kv_heads < shape.heads]
    assert {"llama3.2-3b", "llama3-8b", "mistral-7b", "qwen2-7b"} == set(grouped)
    for model in grouped:
        assert outcome(model).recompute_share == 0
    assert 0 < outcome("llama2-7b").recompute_share < 0.05


def test_the_evictor_saves_time_and_area() -> None:
    without = with_hardware(SYSTEMS["Kelle+eDRAM"], systolic_evictor=False)
    slow, fast = outcome(system=without), outcome()
    assert slow.latencies_s["eviction"] > 1000 * fast.latencies_s["eviction"] > 0
    assert fast.energies_j["evictor"] == pytest.approx(0.028 * fast.latency_s) and slow.energies_j["evictor"] == 0
    assert outcome(system="Original+SRAM").latencies_s["eviction"] == 0


def test_a_roofline_has_its_points_under_the_roof() -> None:
    for model in ("llama2-7b", "llama3-8b"):
        for task in WORKLOADS:
            roof = roofline_of(configuration(model, task))
            assert [point.name for point in roof.points] == ["no recomputation", "recomputation", "over-recomputation"]
            for point in roof.points:
                assert point.ops_per_s <= roof.roof(point.intensity) * (1 + 1e-9)
            none, best, over = roof.points
            assert best.ops_per_s >= none.ops_per_s and best.share >= 0
            assert over.share > best.share and over.bound == "array" and over.ops_per_s < best.ops_per_s
    assert roofline_of(configuration()).ridge == 64
    assert point_at(configuration("llama2-7b", "LA", batch=256), "large", 0.0).bound == "array"


def test_ten_thousand_configurations_are_evaluated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of array operations for all of them, over groups of steps: work grows neither with steps nor with calls."""
    axes = Axes(
        [MODELS["llama2-7b"], MODELS["llama3-8b"]],
        list(WORKLOADS.values()),
        list(SYSTEMS.values()),
        batches=(1, 2, 4, 8, 16),
        budgets=(128, 256, 512, 1024, 2048),
        interval_factors=(0.1, 0.25, 0.5, 1.0, 2.0),
        dram_rates=(32e9, 64e9),
    )
    configurations = axes.configurations()
    assert len(configurations) == len(axes) == 10_000
    calls: list[tuple[int, ...]] = []
    real = decode.step_of

    def counted(*args: object) -> decode.Step:
        step = real(*args)  # type: ignore[arg-type]
        calls.append(step.stored_bytes.shape)
        return step

    for module in (accelerator, energy):
        monkeypatch.setattr(module, "step_of", counted, raising=False)
    monkeypatch.setattr("llmcache.edram.recompute.step_of", counted)
    found = evaluate(configurations)
    assert len(found) == 10_000 and calls == [(10_000, 65)] * 2
    place = 4_321
    assert found[place].energy_j == pytest.approx(evaluate([configurations[place]])[0].energy_j, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(MODELS["llama2-7b"], layers=0), "layers: 0"),
        (lambda: replace(MODELS["llama2-7b"], kv_heads=5), "kv_heads: 5"),
        (lambda: Workload("x", 1, 1, 10), "budget: 10"),
        (lambda: Workload("x", 0, 1, 20), "context: 0"),
        (lambda: Hardware("x", 0, True, 1, 1), "array_rows: 0"),
        (lambda: Hardware("x", 8, True, -1, 1), "kv_capacity_bytes: -1"),
        (lambda: Policy("x", recompute="often"), "recompute: 'often'"),
        (lambda: Policy("x", hst_share=1.5), "hst_share: 1.5"),
        (lambda: Policy("x", activation_interval_ns=0), "activation_interval_ns: 0"),
        (lambda: Policy("x", recompute_share=2), "recompute_share: 2"),
        (lambda: replace(PAPER, access_bytes=0), "access_bytes: 0"),
        (lambda: replace(PAPER, pe_cycle_j=-1), "pe_cycle_j: -1"),
        (lambda: KELLE_INTERVALS.scaled(0), "hst_msb_ns: 0"),
        (lambda: evaluate([]), "configurations: none"),
    ],
)
def test_what_cannot_be_is_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=named):
        make()


def test_a_prompt_longer_than_the_budget_lies_whole_in_one_layer() -> None:
    """Section 8.4.1: 31 layers of LLaMA2-7B reduced to 2048 tokens, the last one with all 16,384."""
    shape = MODELS["llama2-7b"]
    found = outcome(system="AEP+SRAM", context=16_384, decode=128)
    assert found.peak_bytes == shape.stored_weights + 16 * (31 * 2048 + 16_384) * shape.kv_layer_bytes
    whole = outcome(system="Original+SRAM", context=16_384, decode=128)
    assert whole.peak_bytes == shape.stored_weights + 16 * 32 * (16_384 + 128) * shape.kv_layer_bytes


def test_stored_inputs_need_memory_however_they_are_declared() -> None:
    """Of LLaMA2-7B an input has half the bytes of keys and values; with declared costs it moves none, but lies somewhere."""
    one = outcome(system=SYSTEMS["AERP+SRAM"].with_recompute("declared"))
    plain = outcome(system="AEP+SRAM")
    cache = 16 * 2048 * MODELS["llama2-7b"].kv_bytes
    assert plain.peak_bytes - one.peak_bytes == pytest.approx(cache * one.recompute_share / 2)
    assert one.latencies_s["dram_kv"] == pytest.approx(plain.latencies_s["dram_kv"] * (1 - one.recompute_share), rel=1e-3)
