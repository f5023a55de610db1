"""What the accelerator model says of the paper's experiments: ratios of latency and energy, each evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llmcache.edram.accelerator import Outcome, evaluate
from llmcache.edram.constants import PAPER, Profile
from llmcache.edram.systems import BASELINE, MODELS, SYSTEMS, WORKLOADS, Configuration, System, Workload
from llmcache.report.reproduce.kelle.paper import AVERAGED, TASKS

Change = Callable[[System], System]
CHAIN = ("Original+eDRAM", "AEP+SRAM", "AERP+SRAM", "Kelle+eDRAM")


@dataclass(frozen=True)
class Cost:
    """Latency (s) and energy (J) of something, or ratios of them."""

    latency: float
    energy: float

    def over(self, other: Cost) -> Cost:
        """Returns how many times less `other` needs."""
        return Cost(self.latency / other.latency, self.energy / other.energy)


def same(system: System) -> System:
    """Returns `system` as it is."""
    return system


@dataclass
class Evidence:
    """Runs the model for the paper's experiments and remembers what it ran; deterministic, nothing is fitted."""

    known: dict[Configuration, Outcome] = field(default_factory=dict)

    def outcomes(self, configurations: Sequence[Configuration]) -> list[Outcome]:
        """Returns the modelled costs of `configurations`, evaluating those that are new at once."""
        new = list(dict.fromkeys(one for one in configurations if one not in self.known))
        if new:
            self.known.update(zip(new, evaluate(new), strict=True))
        return [self.known[one] for one in configurations]

    def costs(
        self,
        model: str,
        workload: Workload,
        profile: Profile = PAPER,
        recompute: str = "first-principles",
        change: Change = same,
    ) -> dict[str, Cost]:
        """Returns the cost of each of the five systems; `change` is made to all but the baseline."""
        systems = {name: system.with_recompute(recompute) for name, system in SYSTEMS.items()}
        systems = {name: system if name == BASELINE else change(system) for name, system in systems.items()}
        asked = [Configuration(MODELS[model], workload, system, profile) for system in systems.values()]
        found = self.outcomes(asked)
        return {name: Cost(one.latency_s, one.energy_j) for name, one in zip(systems, found, strict=True)}

    def gains(self, model: str, workload: Workload, **how: object) -> dict[str, Cost]:
        """Returns speed-up and efficiency of each system against Original+SRAM; `how`: as for `costs`."""
        found = self.costs(model, workload, **how)  # type: ignore[arg-type]
        return {name: found[BASELINE].over(cost) for name, cost in found.items()}

    def averages(self, profile: Profile, recompute: str = "first-principles", change: Change = same) -> Mapping[str, Cost]:
        """Returns the mean gains over `AVERAGED` and `TASKS`, and those of AERP over AEP and of Kelle over AERP."""
        gathered: dict[str, list[Cost]] = {}
        for model in AVERAGED:
            for task in TASKS:
                found = self.costs(model, WORKLOADS[task], profile, recompute, change)
                for name in CHAIN:
                    gathered.setdefault(name, []).append(found[BASELINE].over(found[name]))
                gathered.setdefault("AERP/AEP", []).append(found["AEP+SRAM"].over(found["AERP+SRAM"]))
                gathered.setdefault("Kelle/AERP", []).append(found["AERP+SRAM"].over(found["Kelle+eDRAM"]))
        return {name: _mean(costs) for name, costs in gathered.items()}


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(float(np.mean([cost.latency for cost in costs])), float(np.mean([cost.energy for cost in costs])))


def with_budget(task: str, budget: int) -> Workload:
    """Returns the task of the paper with another budget N'."""
    return replace(WORKLOADS[task], budget=budget)
