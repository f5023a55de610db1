"""Sweeps: every combination of models, workloads, systems and of the numbers that are varied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from llmcache.edram.columns import Configuration
from llmcache.edram.constants import PAPER, Profile
from llmcache.edram.models import LlmShape
from llmcache.edram.systems import System
from llmcache.edram.workloads import Workload
from llmcache.errors import UsageError

MOST = 1_000_000


@dataclass(frozen=True)
class Axes:
    """What a sweep varies. An empty axis leaves what models, workloads and systems say.

    `interval_factors` multiply all refresh intervals; the others are in tokens, sequences, bytes/s and bytes.
    """

    models: Sequence[LlmShape]
    workloads: Sequence[Workload]
    systems: Sequence[System]
    profiles: Sequence[Profile] = (PAPER,)
    contexts: Sequence[int] = ()
    decodes: Sequence[int] = ()
    batches: Sequence[int] = ()
    budgets: Sequence[int] = ()
    interval_factors: Sequence[float] = ()
    dram_rates: Sequence[float] = ()
    kv_capacities: Sequence[float] = ()

    def __len__(self) -> int:
        many = len(self.models) * len(self.workloads) * len(self.systems) * len(self.profiles)
        for axis in (self.contexts, self.decodes, self.batches, self.budgets):
            many *= len(axis) or 1
        for factors in (self.interval_factors, self.dram_rates, self.kv_capacities):
            many *= len(factors) or 1
        return many

    def configurations(self) -> list[Configuration]:
        """Returns every combination, the last axis changing fastest; UsageError if there are more than a million."""
        if len(self) > MOST:
            raise UsageError(f"{len(self):,} configurations are more than {MOST:,}", "vary less at a time")
        workloads, systems = list(self._workloads()), list(self._systems())
        return [
            Configuration(model, workload, system, profile)
            for model, workload, profile, system in product(self.models, workloads, self.profiles, systems)
        ]

    def _workloads(self) -> Iterator[Workload]:
        axes = {"context": self.contexts, "decode": self.decodes, "batch": self.batches, "budget": self.budgets}
        for workload in self.workloads:
            for changes in _changes(axes):
                # A budget below the workload's window would leave nothing to choose: the window gives way.
                window = min(workload.window, max(0, changes.get("budget", workload.budget) - workload.sinks))
                try:
                    yield replace(workload, **changes, window=window)
                except ValueError as error:
                    raise UsageError(f"--{error}") from error

    def _systems(self) -> Iterator[System]:
        axes = {"dram_bytes_per_s": self.dram_rates, "kv_capacity_bytes": self.kv_capacities}
        for system in self.systems:
            for changes, factor in product(_changes(axes), self.interval_factors or (1.0,)):
                intervals = system.policy.intervals.scaled(factor)
                policy = replace(system.policy, intervals=intervals)
                yield System(system.name, replace(system.hardware, **changes), policy)


def _changes(axes: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields every combination of the axes that are varied, as keyword arguments."""
    varied = {name: values for name, values in axes.items() if values}
    for combination in product(*varied.values()):
        yield dict(zip(varied, combination, strict=True))
