"""Parts of the chip by themselves, modelled: areas, and lifetimes of activations in eDRAM.

Lifetimes: kelle.txt, section 6, equations 4 to 8, figure 12, in the baseline's order of work and the Kelle scheduler's. The
equations are for MHA and add times up, whatever the sizes; what refreshing costs is by bytes (`energy`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

from llmcache.arrays import Doubles
from llmcache.edram.constants import CHIP, EDRAM_4MB, SRAM_4MB
from llmcache.edram.systems import AcceleratorSystem, Configuration


@dataclass(frozen=True)
class Area:
    """Square millimetres on the chip by part; DRAM lies beside it."""

    array_mm2: float
    sram_mm2: float
    edram_mm2: float
    sfu_mm2: float
    evictor_mm2: float

    @property
    def chip_mm2(self) -> float:
        """All that is on the chip."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def area_of(system: AcceleratorSystem) -> Area:
    """Returns the area of `system`.

    Table 1 is taken at its word, though its areas are below those of bare cells at 65 nm: compare, do not build.
    """
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


Time = TypeVar("Time", float, Doubles)


@dataclass(frozen=True)
class Lifetimes:
    """How long X, Q, K and V lie in eDRAM between being computed and being used, ns, modelled."""

    x_ns: float
    q_ns: float
    k_ns: float
    v_ns: float

    @property
    def total_ns(self) -> float:
        """The sum, L of equations 7 and 8."""
        return self.x_ns + self.q_ns + self.k_ns + self.v_ns


def access_ns(configuration: Configuration) -> tuple[float, float]:
    """Returns T_SRAM and T_eDRAM (ns) of an attention block of the last decode step: reading W_Q, and the keys of the batch.

    Source: equations 5 and 6. Differs from the paper: a matrix larger than the SRAM streams through it, no faster than DRAM
    delivers; equation 6 has the bandwidth of SRAM for 16.8 MB in 2 MB.
    """
    shape, workload, hardware = configuration.model, configuration.workload, configuration.hardware
    weight_bytes = shape.channels * shape.heads * shape.head_dim * CHIP.weight_bytes
    kv_bytes = workload.batch * configuration.last_cached * shape.kv_layer_bytes / 2
    rate = min(hardware.sram_bytes_per_s, hardware.dram_bytes_per_s)
    return 1e9 * weight_bytes / rate, 1e9 * kv_bytes / hardware.kv_bytes_per_s


def lifetimes_of(configuration: Configuration) -> Lifetimes:
    """Returns the lifetimes in the last decode step of `configuration`, in the order of work of its system."""
    order = at_the_same_time if configuration.hardware.overlap else one_after_the_other
    return Lifetimes(*order(*access_ns(configuration)))


def one_after_the_other(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Returns the lifetimes of X, Q, K and V in the baseline, in the unit of T_SRAM and T_eDRAM. Source: equation 7."""
    return 3 * sram, 2 * sram + edram, sram + edram, 2 * edram


def at_the_same_time(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Returns the same if weights and cached keys are read at the same time (the Kelle scheduler). Source: equation 8.

    Keys and values are used as they are computed: the paper takes their lifetimes to be nothing.
    """
    return 3 * sram, sram + edram, 0 * edram, 0 * edram
