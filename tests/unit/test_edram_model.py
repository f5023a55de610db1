"""The accelerator model: grouped against single steps, recomputation against a search, a step computed by hand.

`llmcache reproduce kelle` checks the numbers of the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmcache.arrays import Doubles
from llmcache.papers.edram.accelerator import evaluate
from llmcache.papers.edram.constants import PAPER
from llmcache.papers.edram.latency import (
    RESOURCES,
    ConfigurationColumns,
    linear_s,
    recompute_share,
    step_of,
    steps_of,
    tiles_of,
    waits,
)
from llmcache.papers.edram.systems import (
    MODELS,
    RECOMPUTE_MODES,
    SYSTEMS,
    WORKLOADS,
    Configuration,
    GenerationWorkload,
    LlmShape,
)
from tests.unit.edram_parts import configuration, outcome, with_hardware

LLAMA = MODELS["llama2-7b"]


SMALL = [(5, 40, 20), (30, 40, 20), (5, 7, 20), (1, 1, 11), (19, 1, 20)]  # below, above and across the budget


def test_grouped_steps_agree_with_single_steps() -> None:
    workloads = [*WORKLOADS.values(), *(GenerationWorkload("small", *sizes) for sizes in SMALL)]
    systems = [system.with_recompute(mode) for system in SYSTEMS.values() for mode in RECOMPUTE_MODES]
    some = [Configuration(LLAMA, workload, system) for workload in workloads for system in systems]
    grouped, exact = evaluate(some), evaluate(some, groups=None)
    for one, other in zip(grouped, exact, strict=True):
        assert one.latency_s == pytest.approx(other.latency_s, rel=1e-6) and one.fits == other.fits
        assert one.energy_j == pytest.approx(other.energy_j, rel=1e-4)  # refreshes of activations are whole numbers


def test_one_step_matches_a_computation_by_hand() -> None:
    """LLaMA2-7B, batch 1, 100 tokens that fit in SRAM, with every term of the model written out."""
    system = with_hardware(SYSTEMS["Original+SRAM"], kv_capacity_bytes=1 << 30)
    one = configuration(system=system, batch=1, context=99, decode=1)
    found = evaluate([one])[0]
    weights = 6_607_077_376
    tiles = 32 * (4 * 171**2 + 3 * 171 * 459) + 171 * 1334
    assert found.dram_bytes == pytest.approx(2 * weights + _prefill_bytes() + 32 * 16_384)
    linear_s = max(tiles * 576 / 128 / 1e9, weights / 64e9, weights / 128e9)
    attention_s = 32 * 32 * 2 * 6 * 5 * (576 * 2 / 128) / 1e9  # 6 tiles of 24 for 128 channels, 5 for 100 tokens
    kv_s = max(attention_s, 32 * 16_384 / 64e9, 100 * 32 * 16_384 / 128e9)
    assert sum(found.latencies_s[name] for name in RESOURCES) == pytest.approx(linear_s + kv_s)
    macs = 100 * 32 * 2 * 4096 * 4 / 2
    prefill_macs = 32 * 32 * 99**2 * 128 * 4 / 2
    assert found.energies_j["array_attention"] == pytest.approx((macs + prefill_macs) * PAPER.pe_cycle_j)


def _prefill_bytes() -> int:
    """Return the bytes of activations and KV for 99 tokens.

    Inputs are read once per 2 MiB of a matrix (8 pieces of 4096 x 4096), outputs are written once.
    """
    per_layer = 4 * (8 * 4096 + 4096) + 2 * (22 * 4096 + 11008) + (22 * 11008 + 4096)
    return 32 * 99 * 2 * per_layer + 99 * 32 * 16_384


@pytest.mark.parametrize(("system", "batch", "task"), [("AERP+SRAM", 1, "TQ"), ("Kelle+eDRAM", 16, "PG19")])
def test_the_recompute_share_minimizes_the_step(system: str, batch: int, task: str) -> None:
    columns = ConfigurationColumns([configuration("llama2-7b", task, system, batch=batch)])
    steps = steps_of(columns, 4)
    best = recompute_share(columns, steps)

    def step_s(share: Doubles) -> Doubles:
        return np.asarray(sum(waits(columns, step_of(columns, steps, share)).values()))

    eligible = np.maximum(steps.cached - columns.sinks - columns.window, 0) / steps.cached
    for share in np.geomspace(1e-5, 1, 100):
        other = np.minimum(share, eligible)
        assert (step_s(best) <= step_s(other) * (1 + 1e-12))[steps.count > 0].all()


def test_a_prompt_longer_than_the_budget_is_stored_whole_in_one_layer() -> None:
    """Section 8.4.1: 31 layers of LLaMA2-7B reduced to 2048 tokens, the last one with all 16,384."""
    found = outcome(system="AEP+SRAM", context=16_384, decode=128)
    assert found.peak_bytes == LLAMA.stored_weights + 16 * (31 * 2048 + 16_384) * LLAMA.kv_layer_bytes
    whole = outcome(system="Original+SRAM", context=16_384, decode=128)
    assert whole.peak_bytes == LLAMA.stored_weights + 16 * 32 * (16_384 + 128) * LLAMA.kv_layer_bytes


def test_weights_match_the_public_parameter_counts() -> None:
    """The embedding is not counted where it is separate from the head."""
    billions = {name: shape.stored_weights / 1e9 for name, shape in MODELS.items()}
    printed = {"llama2-7b": 6.74, "llama2-13b": 13.0, "llama3-8b": 8.03, "llama3.2-3b": 3.21, "mistral-7b": 7.24}
    assert {name: billions[name] for name in printed} == {name: pytest.approx(n, rel=0.005) for name, n in printed.items()}
    assert billions["qwen2-7b"] == pytest.approx(7.62, rel=0.005) and billions["opt-6.7b"] == pytest.approx(6.66, rel=0.01)


@pytest.mark.parametrize(("rows", "cycles"), [(16, 7039), (17, 7103), (256, 22399)])
def test_tiles_take_the_cycles_that_scale_sim_reports(rows: int, cycles: int) -> None:
    """64 consecutive tiles of 32 x 32, weight-stationary, in SCALE-Sim 3.0.0."""
    square = LlmShape("square", 1, 256, 1, 1, 256, 32, 1)
    hardware = with_hardware(SYSTEMS["Original+eDRAM"], exposed_fill=True, sram_bytes_per_s=1e15)
    c = ConfigurationColumns([replace(configuration(system=hardware), model=square)])
    tiles = replace(tiles_of(c), other=np.full((1, 1), 64.0), kv=np.zeros((1, 1)), head=np.zeros((1, 1)))
    many = np.full((1, 1), float(rows))
    assert linear_s(c, tiles, many, many, 0 * many).item() * 1e9 == pytest.approx(cycles, abs=1.01)
