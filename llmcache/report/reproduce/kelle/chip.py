"""Rows about memories and chip: table 1, areas and powers of section 8, what they imply together."""

from __future__ import annotations

from llmcache.edram.chip import area_of
from llmcache.edram.constants import (
    CHIP,
    EDRAM_4MB,
    KELLE_INTERVALS,
    MIB,
    PAPER,
    PROFILES,
    RETENTION_NS,
    SRAM_4MB,
)
from llmcache.edram.systems import EDRAM_HARDWARE, SYSTEMS
from llmcache.report.reproduce.kelle.rows import AT_LEAST, AT_MOST, PRINTED, Row, bounded, single, within

_CELL_UM2 = 0.525  # a 6T cell at 65 nm
_BITS = 8 * SRAM_4MB.capacity_bytes


def rows() -> list[Row]:
    """Returns the rows."""
    return [*_table1(), *_against_powers(), *_areas(), *_larger_sram(), *_of_evictor(), *_powers()]


def _table1() -> list[Row]:
    return [
        Row(
            "density",
            "1, 2.3, table 1",
            "resulting in more than twice the capacity",
            "×",
            2.0,
            single(SRAM_4MB.area_mm2 / EDRAM_4MB.area_mm2),
            AT_LEAST,
            "Table 1: 7.3 and 3.2 mm² for 4 MB.",
        ),
        Row(
            "leakage",
            "1, 2.3, table 1",
            "eDRAM also offers much lower leakage power than SRAM (around 3.5× according to prior work [17])",
            "×",
            3.5,
            single(SRAM_4MB.leakage_w / EDRAM_4MB.leakage_w),
            PRINTED,
            "Table 1: 415 and 154 mW. The model uses table 1.",
        ),
        Row(
            "access-energy",
            "3.2, table 1",
            "but also consumes lower access and leakage energy according to Table 1",
            "×",
            1.0,
            single(SRAM_4MB.access_j / EDRAM_4MB.access_j),
            AT_LEAST,
            "Table 1: 185.9 and 84.8 pJ/byte.",
        ),
        Row(
            "cell-area",
            "table 1",
            "7.3 mm2 [SRAM, 65 nm, 4 MB]",
            " mm²",
            SRAM_4MB.area_mm2,
            single(_CELL_UM2 * _BITS / 1e6),
            PRINTED,
            "Bare 6T cells of 0.525 µm² at 65 nm are larger than the whole memory: table 1 is of a smaller node or "
            "memory. Only its ratios are used.",
        ),
    ]


def _against_powers() -> list[Row]:
    """Returns the powers that table 1 means, beside those of section 8."""
    at_bandwidth = SRAM_4MB.access_j * CHIP.sram_bytes_per_s
    power = CHIP.power_shares[2] * CHIP.power_w
    return [
        Row(
            "access-power",
            "table 1, 8",
            "185.9 pJ/byte [and SRAM's 41 % of 6.52 W]",
            " W",
            power,
            single(at_bandwidth),
            AT_MOST,
            "SRAM read at its 128 GB/s takes more than the chip if table 1 is per byte; per 8-byte access it is "
            f"{at_bandwidth / 8:.2f} W. The profile public has 12.9 pJ/B (CACTI 7).",
        ),
        Row(
            "refresh-pass",
            "table 1, 8",
            "1.14 mJ [refresh energy; and eDRAM's 29 % of 6.52 W]",
            " W",
            CHIP.power_shares[1] * CHIP.power_w,
            {name: one.refresh_w(4 * MIB, KELLE_INTERVALS.mean_ns) for name, one in PROFILES.items()},
            AT_MOST,
            "Read as J per pass over 4 MB, as Destiny means it. At 45 µs that is "
            f"{PAPER.refresh_w(4 * MIB, RETENTION_NS):.1f} W, more than chip and DRAM together; "
            "silicon [17] takes 0.003 W at the intervals of 2DRP.",
        ),
    ]


def _areas() -> list[Row]:
    kelle, baseline = area_of(SYSTEMS["Kelle+eDRAM"]), area_of(SYSTEMS["Original+SRAM"])
    return [
        Row(
            "area",
            "8",
            "the total on-chip area is 9.5mm2",
            " mm²",
            CHIP.area_mm2,
            single(kelle.chip_mm2),
            within(0.01, 0.05),
            "Table 1 by capacity, and the printed shares of array and SFU.",
        ),
        Row(
            "edram-area",
            "8",
            "the area breakdown of RSA, eDRAM, SRAM, SFU are 23%, 33%, 37%, 7% [eDRAM 33 % of 9.5 mm²]",
            " mm²",
            CHIP.area_shares[1] * CHIP.area_mm2,
            single(kelle.edram_mm2),
            PRINTED,
            "4.25 MB by table 1.",
        ),
        Row(
            "sram-area",
            "8",
            "the area breakdown of RSA, eDRAM, SRAM, SFU are 23%, 33%, 37%, 7% [SRAM 37 % of 9.5 mm²]",
            " mm²",
            CHIP.area_shares[2] * CHIP.area_mm2,
            single(kelle.sram_mm2),
            PRINTED,
            "2 MB by table 1.",
        ),
        Row(
            "area-matched",
            "8.1.1",
            "The SRAM-based system is configured to match the total on-chip area of Kelle+eDRAM",
            " mm²",
            CHIP.area_mm2,
            single(baseline.chip_mm2),
            within(0.05, 0.25),
            "24 x 24 PEs and 4 MB of SRAM: the smaller array costs the baseline 44 % of its compute.",
        ),
    ]


def _larger_sram() -> list[Row]:
    """Returns what 8 MB in place of 4 MB take."""
    platform = CHIP.area_shares[0] * CHIP.area_mm2 + CHIP.area_shares[3] * CHIP.area_mm2 + SRAM_4MB.area_mm2
    return [
        Row(
            "8mb-area",
            "3.2",
            "the evaluation system with 8MB eDRAM takes less area than the system with 8MB SRAM",
            "×",
            1.0,
            single((platform - SRAM_4MB.area_mm2 + 2 * EDRAM_4MB.area_mm2) / (platform + SRAM_4MB.area_mm2)),
            AT_MOST,
            "Areas of the memories by table 1, array and SFU of section 8.",
        ),
        Row(
            "sram-8mb-area",
            "3.1",
            "expanding the SRAM capacity from 4MB to 8MB in the evaluation platform increases the power consumption and "
            "chip area by 29% and 26%",
            "",
            0.26,
            single(SRAM_4MB.area_mm2 / platform),
            PRINTED,
            f"4 MB more are 7.3 mm² by table 1, on a chip of {platform:.1f} mm². Only with DRAM's 16 mm² counted is it "
            f"{SRAM_4MB.area_mm2 / (platform + CHIP.dram_area_mm2):.0%}.",
        ),
    ]


def _of_evictor() -> list[Row]:
    return [
        Row(
            "evictor-area",
            "8.1.4",
            "It takes an area of 0.06mm2 (0.6% of the on-chip area)",
            "",
            0.006,
            single(CHIP.evictor_mm2 / CHIP.area_mm2),
            within(0.06, 0.25),
            "",
        ),
        Row(
            "evictor-power",
            "8.1.4",
            "consumes power of 0.028W (0.4% of the on-chip power)",
            "",
            0.004,
            single(CHIP.evictor_w / CHIP.power_w),
            within(0.125, 0.25),
            "0.43 %, printed with one digit.",
        ),
    ]


def _powers() -> list[Row]:
    peak = EDRAM_HARDWARE.int8_ops_per_s / 1e12
    one_mac = peak / EDRAM_HARDWARE.macs_per_pe
    return [
        Row(
            "int8-tops",
            "8",
            "Kelle accelerator achieves 4.13 INT8 TOPs",
            " TOPS",
            CHIP.int8_tops,
            single(peak),
            PRINTED,
            f"32 x 32 PEs at 1 GHz with two 8-bit MACs each a cycle; with one, as section 5 says, it is {one_mac:.2f}.",
        ),
        Row(
            "dram-power",
            "8",
            "The DRAM power is 11.74W",
            " pJ/B",
            1e12 * CHIP.dram_w / CHIP.dram_bytes_per_s,
            {"public (LPDDR4, 8 pJ/bit)": 1e12 * PROFILES["public"].dram_j_per_byte},
            bounded("the energy of a byte of LPDDR4"),
            "11.74 W at 64 GB/s are 183 pJ/B, about three times what public models of LPDDR4 give.",
        ),
    ]
