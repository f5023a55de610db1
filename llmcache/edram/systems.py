"""The five systems that Kelle compares: hardware, and what is done with the KV cache on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcache.edram.constants import CHIP, KELLE_INTERVALS, MIB, ORG_INTERVALS, RETENTION_NS, Intervals

RECOMPUTE_MODES = ("none", "first-principles", "declared")
"""`declared`: with the times that section 8.3.2 states, which its own array and bandwidth do not give."""


@dataclass(frozen=True)
class Hardware:
    """An accelerator: array, memories and what connects them. ValueError, naming the field, for impossible values.

    `edram`: KV cache and activations lie in eDRAM, else all of the chip is SRAM. `overlap`: weights and KV are
    loaded at the same time (the Kelle scheduler, section 6). Without `systolic_evictor` (section 5.3) the token to evict is
    searched for after the scores are known.
    """

    name: str
    array_rows: int
    edram: bool
    kv_capacity_bytes: float
    kv_bytes_per_s: float
    overlap: bool = False
    weight_capacity_bytes: float = CHIP.weight_sram_bytes
    activation_bytes: float = CHIP.activation_edram_bytes
    sram_bytes_per_s: float = CHIP.sram_bytes_per_s
    dram_bytes_per_s: float = CHIP.dram_bytes_per_s
    dram_capacity_bytes: float = CHIP.dram_bytes
    clock_hz: float = CHIP.clock_hz
    # A PE does two 8-bit MACs a cycle: only so 32 x 32 of them at 1 GHz come near the printed 4.13 TOPS (4.10).
    macs_per_pe: float = 2
    systolic_evictor: bool = True
    # Whether a tile of weights is filled and drained before the next is loaded, as SCALE-Sim has it, or meanwhile.
    exposed_fill: bool = False

    def __post_init__(self) -> None:
        positive = ("array_rows", "kv_bytes_per_s", "weight_capacity_bytes", "sram_bytes_per_s", "dram_bytes_per_s")
        for field in (*positive, "dram_capacity_bytes", "clock_hz", "macs_per_pe"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: {getattr(self, field)}, more than 0 is needed")
        for field in ("kv_capacity_bytes", "activation_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}: {getattr(self, field)}, at least 0 is needed")

    @property
    def int8_ops_per_s(self) -> float:
        """Peak operations of 8 bits per second; a MAC is two."""
        return 2 * self.array_rows**2 * self.clock_hz * self.macs_per_pe


@dataclass(frozen=True)
class Policy:
    """What is done with the KV cache. `recompute_share`: of the cached tokens, in place of what the mode gives.

    `intervals`: of the KV eDRAM; `activation_interval_ns`: of the activation eDRAM; `hst_share`: of the cached tokens that
    are high-score ones (0..1; the median divides them in halves).
    """

    name: str
    evict: bool = False
    recompute: str = "none"
    recompute_share: float = -1.0  # below 0: by the mode
    intervals: Intervals = ORG_INTERVALS
    activation_interval_ns: float = RETENTION_NS
    hst_share: float = 0.5

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE_MODES:
            raise ValueError(f"recompute: '{self.recompute}', one of {', '.join(RECOMPUTE_MODES)} is needed")
        if self.recompute_share > 1:
            raise ValueError(f"recompute_share: {self.recompute_share}, at most 1 is needed")
        if not self.activation_interval_ns > 0:
            raise ValueError(f"activation_interval_ns: {self.activation_interval_ns}, more than 0 is needed")
        if not 0 <= self.hst_share <= 1:
            raise ValueError(f"hst_share: {self.hst_share}, 0 to 1 is needed")

    @property
    def recomputes(self) -> bool:
        """Whether some tokens are stored as inputs."""
        return self.recompute != "none"

    @property
    def declared(self) -> bool:
        """Whether recomputation costs what section 8.3.2 states."""
        return self.recompute == "declared"

    @property
    def refresh_hz(self) -> tuple[float, float, float, float]:
        """Refreshes per second of each group times its share of the memory, in the order of `constants.GROUPS`."""
        shares = (self.hst_share / 2, self.hst_share / 2, (1 - self.hst_share) / 2, (1 - self.hst_share) / 2)
        hst_msb, hst_lsb, lst_msb, lst_lsb = (
            1e9 * share / interval_ns for share, interval_ns in zip(shares, self.intervals.in_order(), strict=True)
        )
        return hst_msb, hst_lsb, lst_msb, lst_lsb


@dataclass(frozen=True)
class System:
    """A policy on an accelerator."""

    name: str
    hardware: Hardware
    policy: Policy

    def with_recompute(self, mode: str) -> System:
        """Returns the system with another mode of recomputation, if it recomputes at all."""
        if self.policy.recompute == "none":
            return self
        return replace(self, policy=replace(self.policy, recompute=mode))


# 8.1.1: 24 x 24 PEs and 4 MB of SRAM; how they are divided is not said: half for weights, as in Kelle, half for KV.
SRAM_HARDWARE = Hardware(
    name="SRAM",
    array_rows=CHIP.baseline_rows,
    edram=False,
    kv_capacity_bytes=CHIP.baseline_sram_bytes - 2 * MIB,
    kv_bytes_per_s=CHIP.sram_bytes_per_s,
    activation_bytes=0,  # part of the 4 MB
)
EDRAM_HARDWARE = Hardware("eDRAM", CHIP.array_rows, True, CHIP.kv_edram_bytes, CHIP.edram_bytes_per_s)  # 5.1, 8
KELLE_HARDWARE = replace(EDRAM_HARDWARE, name="Kelle", overlap=True)  # 6

ORIGINAL = Policy("Original")
AEP = Policy("AEP", evict=True)
AERP_POLICY = Policy("AERP", evict=True, recompute="first-principles")
KELLE = replace(  # the activation eDRAM is refreshed like the most significant bits of high-score tokens
    AERP_POLICY, name="Kelle", intervals=KELLE_INTERVALS, activation_interval_ns=KELLE_INTERVALS.hst_msb_ns
)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("Original+SRAM", SRAM_HARDWARE, ORIGINAL),
        System("Original+eDRAM", EDRAM_HARDWARE, ORIGINAL),
        System("AEP+SRAM", SRAM_HARDWARE, AEP),
        System("AERP+SRAM", SRAM_HARDWARE, AERP_POLICY),
        System("Kelle+eDRAM", KELLE_HARDWARE, KELLE),
    )
}
"""The systems of section 8.1.1; Original+SRAM is what the others are compared with."""
BASELINE = "Original+SRAM"
