"""Area of a system, modelled: table 1 by capacity, and the shares of section 8 for what is not memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmcache.edram.constants import CHIP, EDRAM_4MB, SRAM_4MB
from llmcache.edram.systems import System


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


def area_of(system: System) -> Area:
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
