"""Systems beside each other: how much faster and how much more frugal each is than Original+SRAM. All modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcache.edram.accelerator import Outcome, evaluate
from llmcache.edram.columns import Configuration
from llmcache.edram.systems import System


@dataclass(frozen=True)
class Compared:
    """A configuration with its modelled cost, and the latency and energy of the baseline as multiples of its own."""

    configuration: Configuration
    outcome: Outcome
    speedup: float
    efficiency: float

    @property
    def refresh_share(self) -> float:
        """Which share of the energy is refresh, 0..1."""
        return self.outcome.refresh_j / self.outcome.energy_j

    @property
    def power_w(self) -> float:
        """The mean power (W), DRAM included."""
        return self.outcome.energy_j / self.outcome.latency_s


def compared(configurations: Sequence[Configuration], baseline: System) -> list[Compared]:
    """Returns each of `configurations` beside the same model and workload, with the same energies, on `baseline`.

    All are evaluated at once, and a baseline that several share only once. ValueError if there are none.
    """
    same: dict[tuple[object, ...], int] = {}
    places: list[int] = []
    baselines: list[Configuration] = []
    for one in configurations:
        workload = one.workload
        budget = workload.budget if baseline.policy.evict else None
        key = (one.model, one.profile, workload.context, workload.decode, workload.batch, budget)
        if key not in same:
            same[key] = len(baselines)
            baselines.append(one.on(baseline))
        places.append(same[key])
    outcomes = evaluate([*configurations, *baselines])
    latency_s, energy_j, many = outcomes.latency_s, outcomes.energy_j, len(configurations)
    return [
        Compared(
            one,
            outcomes[row],
            float(latency_s[many + place] / latency_s[row]),
            float(energy_j[many + place] / energy_j[row]),
        )
        for row, (one, place) in enumerate(zip(configurations, places, strict=True))
    ]
