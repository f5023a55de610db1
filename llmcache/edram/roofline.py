"""The roofline of a decode step, modelled: operations against bytes over DRAM, with more and more tokens recomputed.

Source: Kelle, section 8.3.2 and figure 16a, whose numbers are in the image only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmcache.edram.columns import Configuration, columns_of
from llmcache.edram.decode import PASSES_16_BY_8, PASSES_16_BY_16, RESOURCES, step_of, waits
from llmcache.edram.recompute import DECLARED_SHARE, recompute_share
from llmcache.edram.steps import Steps


@dataclass(frozen=True)
class Point:
    """One decode step with its cache full: 8-bit operations of the model (not those of recomputing) and what bounds it.

    `intensity`: operations per byte over DRAM; `bound`: the resource of `decode.RESOURCES` that it waits for longest.
    """

    name: str
    share: float
    intensity: float
    ops_per_s: float
    bound: str


@dataclass(frozen=True)
class Roofline:
    """Points under the roof of `peak_ops_per_s` and `dram_bytes_per_s`."""

    peak_ops_per_s: float
    dram_bytes_per_s: float
    points: tuple[Point, ...]

    @property
    def ridge(self) -> float:
        """Operations per byte from which on the array is the roof."""
        return self.peak_ops_per_s / self.dram_bytes_per_s

    def roof(self, intensity: float) -> float:
        """Returns the most operations per second at `intensity`."""
        return min(self.peak_ops_per_s, intensity * self.dram_bytes_per_s)


def roofline_of(configuration: Configuration) -> Roofline:
    """Returns the roofline of `configuration`: nothing recomputed, the best share, and too much (the declared share)."""
    policy = replace(configuration.policy, recompute="first-principles", recompute_share=-1.0)
    (best,) = _shares([configuration.on(replace(configuration.system, policy=policy))])
    named = {"no recomputation": 0.0, "recomputation": best, "over-recomputation": max(DECLARED_SHARE, 4 * best)}
    hardware = configuration.hardware
    points = tuple(point_at(configuration, name, min(share, 1.0)) for name, share in named.items())
    return Roofline(hardware.int8_ops_per_s, hardware.dram_bytes_per_s, points)


def point_at(configuration: Configuration, name: str, share: float) -> Point:
    """Returns the point, called `name`, at which `share` of the cached tokens (0..1) is recomputed at its real cost."""
    c = columns_of([configuration])
    steps = _last(configuration)
    step = step_of(replace(c, declared=np.zeros_like(c.declared)), steps, np.full_like(steps.cached, share))
    waited = {name: float(time_s.sum()) for name, time_s in waits(c, step).items()}
    linear = c.batch * c.read_weights
    attention = c.batch * steps.cached * c.layers * 2 * c.heads * c.head_dim
    operations = float((2 * (PASSES_16_BY_8 * linear + PASSES_16_BY_16 * attention)).sum())
    moved = float((c.read_weights + step.off_chip_bytes + step.new_bytes).sum())
    return Point(name, share, operations / moved, operations / sum(waited.values()), max(RESOURCES, key=waited.__getitem__))


def _shares(configurations: Sequence[Configuration]) -> list[float]:
    """Returns the best share at the last step of each of `configurations`."""
    return [float(recompute_share(columns_of([one]), _last(one)).sum()) for one in configurations]


def _last(configuration: Configuration) -> Steps:
    """Returns the last decode step alone."""
    cached = configuration.workload.context + configuration.workload.decode
    if configuration.policy.evict:
        cached = min(cached, configuration.workload.budget)
    tiles = -(-cached // configuration.hardware.array_rows)
    return Steps(np.array([[float(cached)]]), np.array([[float(tiles)]]), np.ones((1, 1)))
