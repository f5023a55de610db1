"""The accelerator model: latency and energy of configurations, by component. All results are modelled.

A roofline of bytes and cycles with constants from the paper; nothing is fitted to the paper's results. Assumptions that the
paper does not state: DRAM delivers its full bandwidth, loads overlap with computing, the part of the KV cache that fits
stays on the chip in all steps, and all of the KV eDRAM is refreshed all the time, in four groups of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from llmcache.arrays import Doubles
from llmcache.errors import UsageError
from llmcache.papers.edram.constants import PAPER, Profile
from llmcache.papers.edram.energy import KINDS, REFRESH, energy_of
from llmcache.papers.edram.latency import (
    DECLARED_SHARE,
    PASSES_16_BY_8,
    PASSES_16_BY_16,
    RESOURCES,
    STEP_GROUPS,
    ConfigurationColumns,
    Prefill,
    Steps,
    prefill_of,
    recompute_share,
    step_of,
    steps_of,
    waits,
)
from llmcache.papers.edram.systems import AcceleratorSystem, Configuration, GenerationWorkload, LlmShape

LATENCIES = ("prefill_array", "prefill_dram", *RESOURCES)
"""Components of the latency: the prefill, which waits for the slower of array and DRAM, then each resource of the decode."""


@dataclass(frozen=True)
class Outcome:
    """The modelled cost of one configuration."""

    latencies_s: dict[str, float]
    energies_j: dict[str, float]
    dram_bytes: float
    peak_bytes: float
    fits: bool
    recompute_share: float

    @property
    def latency_s(self) -> float:
        return sum(self.latencies_s.values())

    @property
    def energy_j(self) -> float:
        return sum(self.energies_j.values())

    @property
    def refresh_j(self) -> float:
        return sum(self.energies_j[name] for name in REFRESH)

    def by_kind(self) -> dict[str, float]:
        return {kind: sum(self.energies_j[name] for name in names) for kind, names in KINDS.items()}


def evaluate(configurations: Sequence[Configuration], groups: int | None = STEP_GROUPS) -> list[Outcome]:
    """Return the modelled cost of each configuration; ValueError if there are none.

    `groups` of decode steps; None: each step is computed by itself.
    """
    columns = ConfigurationColumns(configurations)
    steps, prefill = steps_of(columns, groups), prefill_of(columns)
    share = recompute_share(columns, steps)
    step = step_of(columns, steps, share)
    waited = waits(columns, step)
    peak = _peak_bytes(columns, steps, share)
    off_chip = prefill.dram_bytes[:, 0] + _total(steps, columns.read_weights + step.off_chip_bytes + step.new_bytes)
    found = (
        _rows(_latencies(prefill, steps, waited)),
        _rows(energy_of(columns, steps, step, np.sum(list(waited.values()), axis=0), prefill)),
        off_chip.tolist(),
        peak.tolist(),
        (peak <= columns.dram_capacity_bytes[:, 0]).tolist(),
        (_total(steps, share) / columns.decode[:, 0]).tolist(),
    )
    return [Outcome(*row) for row in zip(*found, strict=True)]


def _rows(parts: dict[str, Doubles]) -> list[dict[str, float]]:
    return [dict(zip(parts, row, strict=True)) for row in np.stack(list(parts.values()), axis=1).tolist()]


def _latencies(prefill: Prefill, steps: Steps, waited: dict[str, Doubles]) -> dict[str, Doubles]:
    bound = prefill.array_s >= prefill.dram_s
    found = {
        "prefill_array": np.where(bound, prefill.array_s, 0)[:, 0],
        "prefill_dram": np.where(bound, 0, prefill.dram_s)[:, 0],
    }
    return found | {name: _total(steps, times_s) for name, times_s in waited.items()}


def _total(steps: Steps, values: Doubles) -> Doubles:
    return np.asarray((steps.count * values).sum(axis=1))


def _peak_bytes(columns: ConfigurationColumns, steps: Steps, share: Doubles) -> Doubles:
    """Return the largest memory of weights and KV cache, [n].

    With eviction, only one layer holds the whole context (section 8.4.1).
    """
    end = columns.context + columns.decode
    first, last = (np.where(columns.evict, np.minimum(n, columns.budget), n) for n in (columns.context, end))
    latest = (steps.cached * (steps.count > 0)).argmax(axis=1)[:, None]
    final = np.take_along_axis(share, latest, axis=1)
    layer_bytes = (1 - final) * columns.kv_layer_bytes + final * columns.x_layer_bytes
    prompt = (columns.layers - 1) * first * layer_bytes + columns.context * columns.kv_layer_bytes
    most = np.maximum(prompt, columns.layers * last * layer_bytes)
    return np.asarray(columns.stored_weights + columns.batch * most)[:, 0]


@dataclass(frozen=True)
class Compared:
    """A configuration, its cost, and the ratios of the baseline to it."""

    configuration: Configuration
    outcome: Outcome
    speedup: float
    efficiency: float

    @property
    def refresh_share(self) -> float:
        return self.outcome.refresh_j / self.outcome.energy_j

    @property
    def power_w(self) -> float:
        return self.outcome.energy_j / self.outcome.latency_s


def compared(configurations: Sequence[Configuration], baseline: AcceleratorSystem) -> list[Compared]:
    """Compare each configuration with the same work on `baseline`; ValueError if there are none."""

    def shared(one: Configuration) -> tuple[object, ...]:
        workload = one.workload
        budget = workload.budget if baseline.policy.evict else None
        return one.model, one.profile, workload.context, workload.decode, workload.batch, budget

    baselines = {shared(one): one.on(baseline) for one in configurations}
    places = {key: len(configurations) + place for place, key in enumerate(baselines)}
    outcomes = evaluate([*configurations, *baselines.values()])
    found = []
    for one, outcome in zip(configurations, outcomes, strict=False):
        base = outcomes[places[shared(one)]]
        found.append(Compared(one, outcome, base.latency_s / outcome.latency_s, base.energy_j / outcome.energy_j))
    return found


MOST = 1_000_000


@dataclass(frozen=True)
class Axes:
    """The axes of a sweep. An empty axis keeps the values of the models, workloads and systems."""

    models: Sequence[LlmShape]
    workloads: Sequence[GenerationWorkload]
    systems: Sequence[AcceleratorSystem]
    profiles: Sequence[Profile] = (PAPER,)
    contexts: Sequence[int] = ()
    decodes: Sequence[int] = ()
    batches: Sequence[int] = ()
    budgets: Sequence[int] = ()
    interval_factors: Sequence[float] = ()
    dram_rates: Sequence[float] = ()
    kv_capacities: Sequence[float] = ()

    def __len__(self) -> int:
        return math.prod(len(axis) or 1 for axis in vars(self).values())

    def configurations(self) -> list[Configuration]:
        """Return the product of the axes; UsageError if it has more than a million."""
        if len(self) > MOST:
            raise UsageError(
                f"{len(self):,} configurations are more than the limit of {MOST:,}", "vary fewer options in one sweep"
            )
        workloads, systems = list(self._workloads()), list(self._systems())
        return [
            Configuration(model, workload, system, profile)
            for model, workload, profile, system in product(self.models, workloads, self.profiles, systems)
        ]

    def _workloads(self) -> Iterator[GenerationWorkload]:
        axes = {"context": self.contexts, "decode": self.decodes, "batch": self.batches, "budget": self.budgets}
        for workload in self.workloads:
            for changes in _changes(axes):
                # With a budget below the workload's window, the window shrinks, so that at least some tokens can be evicted.
                window = min(workload.window, max(0, changes.get("budget", workload.budget) - workload.sinks))
                try:
                    yield replace(workload, **changes, window=window)
                except ValueError as error:
                    raise UsageError(f"--{error}") from error

    def _systems(self) -> Iterator[AcceleratorSystem]:
        axes = {"dram_bytes_per_s": self.dram_rates, "kv_capacity_bytes": self.kv_capacities}
        for system in self.systems:
            for changes, factor in product(_changes(axes), self.interval_factors or (1.0,)):
                intervals = system.policy.intervals.scaled(factor)
                policy = replace(system.policy, intervals=intervals)
                yield AcceleratorSystem(system.name, replace(system.hardware, **changes), policy)


def _changes(axes: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    varied = {name: values for name, values in axes.items() if values}
    for combination in product(*varied.values()):
        yield dict(zip(varied, combination, strict=True))


@dataclass(frozen=True)
class RooflinePoint:
    """A decode step with a full cache: 8-bit operations without recomputation.

    `intensity`: operations per byte over DRAM. `bound`: one of `latency.RESOURCES`.
    """

    name: str
    share: float
    intensity: float
    ops_per_s: float
    bound: str


@dataclass(frozen=True)
class Roofline:
    """Points under a roof of `peak_ops_per_s` and `dram_bytes_per_s`."""

    peak_ops_per_s: float
    dram_bytes_per_s: float
    points: tuple[RooflinePoint, ...]

    @property
    def ridge(self) -> float:
        return self.peak_ops_per_s / self.dram_bytes_per_s


def roofline_of(configuration: Configuration) -> Roofline:
    """Return points without recomputation, with the best share, and with the declared one."""
    policy = replace(configuration.policy, recompute="first-principles", recompute_share=-1.0)
    columns = ConfigurationColumns([configuration.on(replace(configuration.system, policy=policy))])
    hardware, cached = configuration.hardware, configuration.last_cached
    last = Steps(np.array([[float(cached)]]), np.array([[float(-(-cached // hardware.array_rows))]]), np.ones((1, 1)))
    best = float(recompute_share(columns, last).sum())
    named = {"no recomputation": 0.0, "recomputation": best, "over-recomputation": max(DECLARED_SHARE, 4 * best)}
    points = tuple(_point(columns, last, name, min(share, 1.0)) for name, share in named.items())
    return Roofline(hardware.int8_ops_per_s, hardware.dram_bytes_per_s, points)


def _point(c: ConfigurationColumns, last: Steps, name: str, share: float) -> RooflinePoint:
    step = step_of(c, last, np.full_like(last.cached, share))
    waited = {name: float(time_s.sum()) for name, time_s in waits(c, step).items()}
    linear = c.batch * c.read_weights
    attention = c.batch * last.cached * c.layers * 2 * c.heads * c.head_dim
    operations = float((2 * (PASSES_16_BY_8 * linear + PASSES_16_BY_16 * attention)).sum())
    moved = float((c.read_weights + step.off_chip_bytes + step.new_bytes).sum())
    bound = max(RESOURCES, key=waited.__getitem__)
    return RooflinePoint(name, share, operations / moved, operations / sum(waited.values()), bound)
