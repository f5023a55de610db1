"""The systolic evictor: a column of registers beside the array that finds the token to evict while scores are computed.

Source: kelle.txt, sections 5.1, 5.3 and 8.1.4, figure 11. Everything here is modelled. Row i of the array gives the product
of token i one cycle after row i - 1; in the same cycle register S_i adds it to the token's score, and in the next the
chain M compares the sum with the least so far. Where there are more tokens than rows, the chain goes on with the next tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.columns import Configuration
from llmcache.edram.constants import AERP, CHIP

Scores = NDArray[np.float64]
CHAIN_CYCLES = 1
"""Cycles from the last product of a search to its result: what the evictor adds to the array's own time."""


@dataclass(frozen=True)
class Search:
    """The slot of the least score of one head, the updated scores, and the cycle after the first product it is known in."""

    slot: int
    scores: Scores
    cycles: int


def search(scores: Scores, products: Scores, protected: NDArray[np.bool_], rows: int = CHIP.array_rows) -> Search:
    """Returns what the evictor finds for one head, played cycle by cycle: of equal scores the first slot.

    `scores` [slots] so far, `products` [slots] of the new token (QK^T, without softmax), `protected` [slots]: sinks and
    window, which the chain passes over. ValueError if all are protected.
    """
    if protected.all():
        raise ValueError("protected: all slots are, none can be evicted")
    updated = np.array(scores, np.float64)
    least, slot, cycle = np.inf, -1, 0
    for first in range(0, len(updated), rows):
        for row in range(first, min(first + rows, len(updated))):
            updated[row] += products[row]
            cycle += 1
            if not protected[row] and updated[row] < least:
                least, slot = updated[row], row
    return Search(slot, updated, cycle + CHAIN_CYCLES)


@dataclass(frozen=True)
class EvictorCost:
    """What evicting costs in a decode step, modelled: with the evictor, and with a search after the scores are there.

    `stall_ns` and `joules` are the evictor's own; `search_ns` is a scan of the scores by one comparator, a score a cycle,
    which also reads every score from its registers and writes it back (`search_bytes`).
    """

    register_bytes: float
    stall_ns: float
    search_ns: float
    search_bytes: float
    joules: float


def evictor_cost(
    budget: int,
    kv_heads: int,
    layers: int,
    *,
    batch: int = 1,
    step_ns: float = 0.0,
    clock_hz: float = CHIP.clock_hz,
) -> EvictorCost:
    """Returns the cost of evicting from `budget` tokens of each of `kv_heads` in `layers` of `batch` sequences per step.

    `step_ns`: how long the step takes, over which the evictor draws its power. Area and power are the paper's (0.06 mm²,
    28 mW: section 8.1.4); its "5%" of energy and "7%" of latency depend on what is compared with and are not used.
    """
    searches = kv_heads * layers * batch
    cycle_ns = 1e9 / clock_hz
    held = budget * AERP.score_bits / 8
    return EvictorCost(
        register_bytes=held * searches,
        stall_ns=CHAIN_CYCLES * cycle_ns * searches,
        search_ns=budget * cycle_ns * searches,
        search_bytes=2 * ceil(held) * searches,
        joules=CHIP.evictor_w * step_ns / 1e9,
    )


def evictor_cost_of(configuration: Configuration, step_ns: float) -> EvictorCost:
    """Returns the cost of evicting in a decode step of `configuration` that takes `step_ns` and whose cache is full."""
    shape, workload = configuration.model, configuration.workload
    clock_hz = configuration.hardware.clock_hz
    return evictor_cost(
        workload.budget, shape.kv_heads, shape.layers, batch=workload.batch, step_ns=step_ns, clock_hz=clock_hz
    )
