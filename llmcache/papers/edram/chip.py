"""Models of parts of the chip: areas, the systolic evictor, lifetimes of activations in eDRAM.

The evictor is a column of registers next to the array (kelle.txt, sections 5.1, 5.3 and 8.1.4, figure 11). Row i of the
array delivers the product of token i one cycle after row i - 1. In the same cycle register S_i adds it to the token's score,
and in the next one the chain M compares the sum with the smallest one before it.

Lifetimes: section 6, equations 4 to 8, figure 12. The equations are for MHA and add times regardless of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import TypeVar

from llmcache.arrays import Doubles
from llmcache.papers.edram.constants import AERP, CHIP, EDRAM_4MB, SRAM_4MB
from llmcache.papers.edram.systems import AcceleratorSystem, Configuration


@dataclass(frozen=True)
class Area:
    """Areas on the chip by part."""

    array_mm2: float
    sram_mm2: float
    edram_mm2: float
    sfu_mm2: float
    evictor_mm2: float

    @property
    def chip_mm2(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def area_of(system: AcceleratorSystem) -> Area:
    """Return the area. The values of table 1 are below that of bare cells at 65 nm, so use results only to compare."""
    hardware = system.hardware
    on_chip = hardware.kv_capacity_bytes + hardware.activation_bytes
    sram = hardware.weight_capacity_bytes + (0 if hardware.edram else on_chip)
    edram = on_chip if hardware.edram else 0
    return Area(
        array_mm2=CHIP.area_shares[0] * CHIP.area_mm2 * (hardware.array_rows / CHIP.array_rows) ** 2,
        sram_mm2=SRAM_4MB.area_mm2 * sram / SRAM_4MB.capacity_bytes,
        edram_mm2=EDRAM_4MB.area_mm2 * edram / EDRAM_4MB.capacity_bytes,
        sfu_mm2=CHIP.area_shares[3] * CHIP.area_mm2,
        evictor_mm2=CHIP.evictor_mm2 if system.policy.evict and hardware.systolic_evictor else 0.0,
    )


CHAIN_CYCLES = 1
"""Cycles from the last product of a search to its result: the time that the evictor adds to that of the array."""


@dataclass(frozen=True)
class EvictorCost:
    """The modelled cost of evicting in a decode step.

    `search_ns`: instead, one comparator scans the complete scores and reads and writes back every score (`search_bytes`).
    """

    register_bytes: float
    stall_ns: float
    search_ns: float
    search_bytes: float
    joules: float


def evictor_cost(configuration: Configuration, step_ns: float) -> EvictorCost:
    """Return the cost of evicting in a decode step with a full cache that takes `step_ns`.

    Area and power are the paper's (section 8.1.4); its "5%" of energy and "7%" of latency depend on an unstated baseline.
    """
    shape, workload = configuration.model, configuration.workload
    searches = shape.kv_heads * shape.layers * workload.batch
    cycle_ns = 1e9 / configuration.hardware.clock_hz
    registers = workload.budget * AERP.score_bits / 8
    return EvictorCost(
        register_bytes=registers * searches,
        stall_ns=CHAIN_CYCLES * cycle_ns * searches,
        search_ns=workload.budget * cycle_ns * searches,
        search_bytes=2 * ceil(registers) * searches,
        joules=CHIP.evictor_w * step_ns / 1e9,
    )


Time = TypeVar("Time", float, Doubles)


@dataclass(frozen=True)
class Lifetimes:
    """The time (ns) from computing X, Q, K and V to using them."""

    x_ns: float
    q_ns: float
    k_ns: float
    v_ns: float

    @property
    def total_ns(self) -> float:
        return self.x_ns + self.q_ns + self.k_ns + self.v_ns


def access_ns(configuration: Configuration) -> tuple[float, float]:
    """Return T_SRAM and T_eDRAM of an attention block in the last decode step: reading W_Q, and the keys of the batch.

    Source: equations 5 and 6. Differs from the paper: a matrix larger than the SRAM streams through it, no faster than DRAM
    delivers it.
    """
    shape, workload, hardware = configuration.model, configuration.workload, configuration.hardware
    weight_bytes = shape.channels * shape.heads * shape.head_dim * CHIP.weight_bytes
    kv_bytes = workload.batch * configuration.last_cached * shape.kv_layer_bytes / 2
    rate = min(hardware.sram_bytes_per_s, hardware.dram_bytes_per_s)
    return 1e9 * weight_bytes / rate, 1e9 * kv_bytes / hardware.kv_bytes_per_s


def lifetimes_of(configuration: Configuration) -> Lifetimes:
    """Return the lifetimes in the last decode step."""
    order = at_the_same_time if configuration.hardware.overlap else one_after_the_other
    return Lifetimes(*order(*access_ns(configuration)))


def one_after_the_other(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Return the lifetimes of X, Q, K and V in the baseline (equation 7)."""
    return 3 * sram, 2 * sram + edram, sram + edram, 2 * edram


def at_the_same_time(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Return the same if weights and cached keys are read at the same time, and new keys and values are used at once
    (equation 8).
    """
    return 3 * sram, sram + edram, 0 * edram, 0 * edram
