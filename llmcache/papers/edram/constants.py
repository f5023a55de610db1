"""The numbers of the Kelle paper (MICRO 2025, doi:10.1145/3725843.3756071) with their sections, and profiles of energies."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 10**9

GROUPS = ("hst_msb", "hst_lsb", "lst_msb", "lst_lsb")
"""The four refresh groups of 2DRP, in the order used everywhere: high-score tokens first, bits 15-8 before 7-0."""


@dataclass(frozen=True)
class RefreshIntervals:
    """Refresh intervals of the four groups (ns). Source: Kelle, sections 4.2 and 7.1."""

    hst_msb_ns: float
    hst_lsb_ns: float
    lst_msb_ns: float
    lst_lsb_ns: float

    def __post_init__(self) -> None:
        for group, interval_ns in zip(GROUPS, self.in_order(), strict=True):
            if not interval_ns > 0:
                raise ValueError(f"{group}_ns: must be more than 0, not {interval_ns}")

    @classmethod
    def uniform(cls, interval_ns: float) -> RefreshIntervals:
        return cls(interval_ns, interval_ns, interval_ns, interval_ns)

    def in_order(self) -> tuple[float, float, float, float]:
        return self.hst_msb_ns, self.hst_lsb_ns, self.lst_msb_ns, self.lst_lsb_ns

    @property
    def mean_ns(self) -> float:
        """Return the harmonic mean, as the paper does in table 4 and for "1.05 ms" (section 7.1)."""
        return len(GROUPS) / sum(1 / interval_ns for interval_ns in self.in_order())

    def scaled(self, factor: float) -> RefreshIntervals:
        return RefreshIntervals(*(factor * interval_ns for interval_ns in self.in_order()))


RETENTION_NS = 45_000
"""Retention time of a 3T cell at 105 °C: cells refreshed at this interval keep their data (table 1; section 3.2)."""
KELLE_INTERVALS = RefreshIntervals(360_000, 5_400_000, 1_440_000, 7_200_000)  # 7.1
TABLE4_INTERVALS: dict[int, RefreshIntervals] = {  # table 4: the printed uniform interval (ns) to its 2DRP intervals
    540_000: RefreshIntervals(180_000, 3_600_000, 720_000, 5_400_000),
    1_050_000: KELLE_INTERVALS,
    2_062_000: RefreshIntervals(720_000, 9_000_000, 2_880_000, 10_800_000),
}
ORG_INTERVALS = RefreshIntervals.uniform(RETENTION_NS)  # 8.3.3: "Org"
UNI_INTERVALS = RefreshIntervals.uniform(360_000)  # 8.3.3: "Uni", said to be as accurate as 2DRP
FAILURE_RATE = 2e-3
"""The "averaged retention failure rate" of the intervals of section 7.1, read as the mean over the four groups."""


@dataclass(frozen=True)
class Macro:
    """A 4 MB memory of table 1 (65 nm, 105 °C, from Destiny). The areas are too small for 65 nm: use only their ratios.

    `refresh_j` has no denominator in the paper; it is read as the energy of one pass over the array, as in Destiny.
    """

    capacity_bytes: int
    area_mm2: float
    access_j: float  # "pJ/byte"
    leakage_w: float
    refresh_j: float = 0.0


SRAM_4MB = Macro(4 * MIB, 7.3, 185.9e-12, 0.415)
EDRAM_4MB = Macro(4 * MIB, 3.2, 84.8e-12, 0.154, 1.14e-3)


@dataclass(frozen=True)
class Chip:
    """The Kelle accelerator (section 8)."""

    array_rows: int = 32  # RSA of 32 x 32 processing elements
    baseline_rows: int = 24  # 8.1.1: of the SRAM system with the same area
    clock_hz: float = 1e9
    area_mm2: float = 9.5
    power_w: float = 6.52
    area_shares: tuple[float, float, float, float] = (0.23, 0.33, 0.37, 0.07)  # RSA, eDRAM, SRAM, SFU
    power_shares: tuple[float, float, float, float] = (0.17, 0.29, 0.41, 0.13)
    dram_area_mm2: float = 16.0
    dram_w: float = 11.74
    dram_bytes: int = 16 * GIB
    dram_bytes_per_s: float = 64 * GB
    sram_bytes_per_s: float = 128 * GB
    edram_bytes_per_s: float = 256 * GB
    weight_sram_bytes: int = 2 * MIB  # 5.1
    kv_edram_bytes: int = 4 * MIB  # 5.1
    activation_edram_bytes: int = 256 * KIB  # 5.1
    baseline_sram_bytes: int = 4 * MIB  # 8.1.1
    evictor_mm2: float = 0.06  # 8.1.4
    evictor_w: float = 0.028  # 8.1.4
    load_vector_ns: float = 1_100.0  # 8.3.2: one KV vector of LLaMA2-7B from DRAM
    recompute_vector_ns: float = 3_200.0  # 8.3.2: the same, recomputed
    weight_bytes: int = 1  # 5: 8 bit
    value_bytes: int = 2  # 5: activations and KV vectors, 16 bit


CHIP = Chip()


@dataclass(frozen=True)
class Aerp:
    """Defaults of the eviction and recomputation policy."""

    sinks: int = 10  # 7.1
    score_bits: int = 4  # 5.1: of the score registers
    batch: int = 16  # 8


AERP = Aerp()


@dataclass(frozen=True)
class Profile:
    """Energies of the model. `access_j` of both memories is for `access_bytes` bytes: never mix two granularities.

    Leakage and refresh are for `array_bytes`.
    """

    name: str
    title: str
    dram_j_per_byte: float
    sram_access_j: float
    edram_access_j: float
    access_bytes: float
    refresh_pass_j: float
    pe_cycle_j: float
    sram_leak_w: float = SRAM_4MB.leakage_w
    edram_leak_w: float = EDRAM_4MB.leakage_w
    sfu_w: float = CHIP.power_shares[3] * CHIP.power_w
    evictor_w: float = CHIP.evictor_w
    dram_static_w: float = 0.0
    array_bytes: float = 4 * MIB

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{field.name}: must be at least 0, not {value}")
        for name in ("access_bytes", "array_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be more than 0, not {getattr(self, name)}")

    @property
    def sram_j_per_byte(self) -> float:
        return self.sram_access_j / self.access_bytes

    @property
    def edram_j_per_byte(self) -> float:
        return self.edram_access_j / self.access_bytes

    @property
    def refresh_j_per_byte(self) -> float:
        return self.refresh_pass_j / self.array_bytes

    def refresh_w(self, capacity_bytes: float, interval_ns: float) -> float:
        return self.refresh_j_per_byte * capacity_bytes / (interval_ns * 1e-9)


# 8: the RSA's share of the chip's power, divided by elements and clock: 1.08 pJ per PE and cycle.
_PE_CYCLE_J = CHIP.power_shares[0] * CHIP.power_w / (CHIP.array_rows**2 * CHIP.clock_hz)

PAPER = Profile(
    name="paper",
    title="table 1 and the powers of section 8, as printed",
    dram_j_per_byte=CHIP.dram_w / CHIP.dram_bytes_per_s,  # 183 pJ/B
    sram_access_j=SRAM_4MB.access_j,
    edram_access_j=EDRAM_4MB.access_j,
    access_bytes=1,  # table 1 says "pJ/byte"; read as pJ per 8 bytes, SRAM would fit its share of the chip's power
    refresh_pass_j=EDRAM_4MB.refresh_j,
    pe_cycle_j=_PE_CYCLE_J,
)
# LPDDR4: 8 pJ/bit (Accelergy's CACTI plug-in). SRAM: CACTI 7, 4 MB at 65 nm (itrs-lop), 0.826 nJ a read of 64 bytes;
# eDRAM by the ratio of table 1. Refresh as printed.
PUBLIC = Profile(
    name="public",
    title="access energies from public tools, refresh as printed",
    dram_j_per_byte=64e-12,
    sram_access_j=0.826e-9,
    edram_access_j=0.826e-9 * EDRAM_4MB.access_j / SRAM_4MB.access_j,
    access_bytes=64,
    refresh_pass_j=EDRAM_4MB.refresh_j,
    pe_cycle_j=_PE_CYCLE_J,
)
# The paper's reference [17] (Chun et al., IEEE JSSC 46(6), 2011): a 65 nm 3T array refreshed every 1.25 ms takes 91.3 µW/Mb
# in all. Counted entirely as refresh, this is 3.65 µJ per pass over 4 MB, 1/312 of the value of table 1.
SILICON = replace(
    PUBLIC,
    name="silicon",
    title="access energies from public tools, refresh as measured on silicon (Chun 2011)",
    refresh_pass_j=91.3e-6 * 32 * 1.25e-3,
)
PROFILES: dict[str, Profile] = {profile.name: profile for profile in (PAPER, PUBLIC, SILICON)}
"""The named profiles; `paper` is the default."""
