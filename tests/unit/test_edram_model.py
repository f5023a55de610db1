"""The accelerator model: grouped against single steps, recomputation against a search, a step computed by hand.

`llmcache reproduce kelle` checks the numbers of the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmcache.arrays import Doubles
from llmcache.papers.edram.accelerator import evaluate
from llmcache.papers.edram.latency import (
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
from tests.unit.edram_parts import configuration, with_hardware

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
