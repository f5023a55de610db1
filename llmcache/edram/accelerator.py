"""The accelerator model: latency and energy of configurations, by component. Everything it returns is modelled.

A roofline of bytes and cycles with constants from the paper (`constants`, `systems`) and no factor fitted to its results.
Assumed, as the paper does not say: DRAM gives its whole bandwidth, loads overlap with computing, as much of the KV cache
as fits stays on the chip for all steps, and all of the KV eDRAM is refreshed all the time, in groups of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.columns import Array, Columns, Configuration, columns_of
from llmcache.edram.decode import RESOURCES, step_of, waits
from llmcache.edram.energy import KINDS, REFRESH, energy_of
from llmcache.edram.prefill import Prefill, prefill_of
from llmcache.edram.recompute import recompute_share
from llmcache.edram.steps import GROUPS, Steps, steps_of

LATENCIES = ("prefill_array", "prefill_dram", *RESOURCES)
"""What time is spent waiting for: the prefill for the slower of array and DRAM, then each resource of the decode."""


@dataclass(frozen=True)
class Outcome:
    """The modelled cost of one configuration: seconds and joules by component, and what it needs of memory."""

    latencies_s: dict[str, float]
    energies_j: dict[str, float]
    dram_bytes: float
    peak_bytes: float
    fits: bool
    recompute_share: float

    @property
    def latency_s(self) -> float:
        """Time of prefill and decode (s)."""
        return sum(self.latencies_s.values())

    @property
    def energy_j(self) -> float:
        """Energy of prefill and decode (J)."""
        return sum(self.energies_j.values())

    @property
    def refresh_j(self) -> float:
        """Energy of all refreshes (J)."""
        return sum(self.energies_j[name] for name in REFRESH)

    def by_kind(self) -> dict[str, float]:
        """Returns the energy (J) by `energy.KINDS`."""
        return {kind: sum(self.energies_j[name] for name in names) for kind, names in KINDS.items()}


@dataclass(frozen=True)
class Outcomes:
    """The modelled costs of many configurations: float64 [n] arrays, in their order; see `Outcome`."""

    latencies_s: dict[str, Array]
    energies_j: dict[str, Array]
    dram_bytes: Array
    peak_bytes: Array
    fits: NDArray[np.bool_]
    recompute_share: Array

    @property
    def latency_s(self) -> Array:
        """Time of prefill and decode (s, [n])."""
        return _sum(self.latencies_s.values())

    @property
    def energy_j(self) -> Array:
        """Energy of prefill and decode (J, [n])."""
        return _sum(self.energies_j.values())

    @property
    def refresh_j(self) -> Array:
        """Energy of all refreshes (J, [n])."""
        return _sum(self.energies_j[name] for name in REFRESH)

    def __len__(self) -> int:
        return len(self.dram_bytes)

    def __iter__(self) -> Iterator[Outcome]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int) -> Outcome:
        return Outcome(
            {name: float(values[place]) for name, values in self.latencies_s.items()},
            {name: float(values[place]) for name, values in self.energies_j.items()},
            float(self.dram_bytes[place]),
            float(self.peak_bytes[place]),
            bool(self.fits[place]),
            float(self.recompute_share[place]),
        )


def evaluate(configurations: Sequence[Configuration], groups: int | None = GROUPS) -> Outcomes:
    """Returns the modelled cost of all `configurations`, computed at once; ValueError if there are none.

    `groups`: into how many groups decode steps are gathered; None: each by itself.
    """
    columns = columns_of(configurations)
    steps, prefill = steps_of(columns, groups), prefill_of(columns)
    share = recompute_share(columns, steps)
    step = step_of(columns, steps, share)
    waited = waits(columns, step)
    step_s = _sum(waited.values())
    peak = _peak_bytes(columns, steps, share)
    return Outcomes(
        _latencies(prefill, steps, waited),
        energy_of(columns, steps, step, step_s, prefill),
        prefill.dram_bytes[:, 0] + _total(steps, columns.read_weights + step.off_chip_bytes + step.new_bytes),
        peak,
        peak <= columns.dram_capacity_bytes[:, 0],
        _total(steps, share) / columns.decode[:, 0],
    )


def _sum(parts: Iterable[Array]) -> Array:
    return np.asarray(np.sum(list(parts), axis=0))


def _latencies(prefill: Prefill, steps: Steps, waited: dict[str, Array]) -> dict[str, Array]:
    bound = prefill.array_s >= prefill.dram_s
    found = {
        "prefill_array": np.where(bound, prefill.array_s, 0)[:, 0],
        "prefill_dram": np.where(bound, 0, prefill.dram_s)[:, 0],
    }
    return found | {name: _total(steps, times_s) for name, times_s in waited.items()}


def _total(steps: Steps, values: Array) -> Array:
    """Returns the sum of `values` ([n, groups] or [n, 1] per step) over all decode steps, [n]."""
    return np.asarray((steps.count * values).sum(axis=1))


def _peak_bytes(columns: Columns, steps: Steps, share: Array) -> Array:
    """Returns the most that weights and KV cache need ([n]), inputs in place of `share` of the cached tokens.

    That is after the last step, or at the end of the prefill: with eviction a layer's cache is reduced before the next layer
    is computed (section 8.4.1), so that the whole context is there in one layer only.
    """
    end = columns.context + columns.decode
    first, last = (np.where(columns.evict, np.minimum(n, columns.budget), n) for n in (columns.context, end))
    latest = (steps.cached * (steps.count > 0)).argmax(axis=1)[:, None]
    final = np.take_along_axis(share, latest, axis=1)
    layer_bytes = (1 - final) * columns.kv_layer_bytes + final * columns.x_layer_bytes
    prompt = (columns.layers - 1) * first * layer_bytes + columns.context * columns.kv_layer_bytes
    most = np.maximum(prompt, columns.layers * last * layer_bytes)
    return np.asarray(columns.stored_weights + columns.batch * most)[:, 0]
