"""The systems that Kelle is compared with: language models, workloads, and five systems.

Source: kelle.txt, sections 7.1 (models, budgets, windows), 8 (contexts, decoded lengths) and 8.1.1 (systems).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcache.papers.edram.constants import (
    AERP,
    CHIP,
    KELLE_INTERVALS,
    MIB,
    ORG_INTERVALS,
    PAPER,
    RETENTION_NS,
    Profile,
    RefreshIntervals,
)


@dataclass(frozen=True)
class LlmShape:
    """The sizes of a decoder-only transformer, with the field names of `--constants` files. Weights have one byte each.

    `gated`: the feed-forward network has a gate. `tied`: the head is the embedding table.
    """

    name: str
    layers: int
    channels: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "channels", "heads", "kv_heads", "head_dim", "hidden", "vocabulary"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: must be at least 1, not {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: must divide the {self.heads} heads, not {self.kv_heads}")

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Return (inputs, outputs, number) of the matrices of a layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (self.channels, query, 1), (self.channels, key, 2), (query, self.channels, 1)
        return (*attention, (self.channels, self.hidden, 2 if self.gated else 1), (self.hidden, self.channels, 1))

    @property
    def layer_weights(self) -> int:
        return sum(inputs * outputs * many for inputs, outputs, many in self.matrices)

    @property
    def read_weights(self) -> int:
        return self.layers * self.layer_weights + self.channels * self.vocabulary

    @property
    def stored_weights(self) -> int:
        return self.read_weights + (0 if self.tied else self.channels * self.vocabulary)

    @property
    def kv_layer_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * CHIP.value_bytes

    @property
    def kv_bytes(self) -> int:
        return self.layers * self.kv_layer_bytes

    @property
    def x_layer_bytes(self) -> int:
        return self.channels * CHIP.value_bytes


MODELS: dict[str, LlmShape] = {
    shape.name: shape
    for shape in (
        LlmShape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        LlmShape("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        LlmShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        LlmShape("llama3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
        LlmShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
        LlmShape("qwen2-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        LlmShape("opt-6.7b", 32, 4096, 32, 32, 128, 16384, 50272, gated=False, tied=True),
    )
}
"""The models of section 7.1, from their configurations on the Hugging Face hub."""


@dataclass(frozen=True)
class GenerationWorkload:
    """`batch` sequences of `context` tokens that each decode `decode` more; `budget`: N' of the policies that evict."""

    name: str
    context: int
    decode: int
    budget: int
    window: int = 0
    batch: int = AERP.batch
    sinks: int = AERP.sinks

    def __post_init__(self) -> None:
        for field, least in (("context", 1), ("decode", 1), ("batch", 1), ("window", 0), ("sinks", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}: must be at least {least}, not {getattr(self, field)}")
        if self.budget <= self.sinks:
            raise ValueError(f"budget: must be more than the {self.sinks} sinks, not {self.budget}")

    @property
    def eviction_bound(self) -> float:
        """Return the largest factor by which eviction reduces a cost: mean(n) / mean(min(n, N'))."""
        first, last = self.context + 1, self.context + self.decode
        whole = (first + last) * self.decode / 2
        growing = max(0, min(last, self.budget) - first + 1)  # steps before the budget is reached
        kept = growing * (first + first + growing - 1) / 2 + (self.decode - growing) * self.budget
        return whole / kept


# Contexts and decoded lengths: section 8. Budgets and windows: section 7.1. The paper calls Qasper QP and QA.
WORKLOADS: dict[str, GenerationWorkload] = {
    workload.name: workload
    for workload in (
        GenerationWorkload("LA", 128, 512, 128, 64),
        GenerationWorkload("TQ", 512, 2048, 1024, 512),
        GenerationWorkload("QP", 1024, 5120, 1024, 512),
        GenerationWorkload("PG19", 512, 8192, 2048, 1024),
    )
}
"""Lambada, TriviaQA, Qasper and PG19 as in the paper."""


RECOMPUTE_MODES = ("none", "first-principles", "declared")
"""`declared` uses the times stated in section 8.3.2, which do not follow from the paper's own array and bandwidth."""


@dataclass(frozen=True)
class AcceleratorHardware:
    """An accelerator. `edram`: KV cache and activations are in eDRAM, otherwise in SRAM. `overlap`: weights and KV are
    loaded at the same time (section 6). Without `systolic_evictor` (5.3), the search for the token to evict begins after the
    scores are complete.
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
    # A PE does two 8-bit MACs per cycle: only then do 32 x 32 of them at 1 GHz (4.10 TOPS) agree with the printed 4.13 TOPS.
    macs_per_pe: float = 2
    systolic_evictor: bool = True
    # Whether a tile of weights is filled and drained before the next is loaded, as in SCALE-Sim, or at the same time.
    exposed_fill: bool = False

    def __post_init__(self) -> None:
        positive = ("array_rows", "kv_bytes_per_s", "weight_capacity_bytes", "sram_bytes_per_s", "dram_bytes_per_s")
        for field in (*positive, "dram_capacity_bytes", "clock_hz", "macs_per_pe"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: must be more than 0, not {getattr(self, field)}")
        for field in ("kv_capacity_bytes", "activation_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}: must be at least 0, not {getattr(self, field)}")

    @property
    def int8_ops_per_s(self) -> float:
        return 2 * self.array_rows**2 * self.clock_hz * self.macs_per_pe


@dataclass(frozen=True)
class RetentionPolicy:
    """The treatment of the KV cache. `recompute_share` replaces the value of the mode. `hst_share`: share of high-score
    tokens.
    """

    name: str
    evict: bool = False
    recompute: str = "none"
    recompute_share: float = -1.0  # below 0: by the mode
    intervals: RefreshIntervals = ORG_INTERVALS
    activation_interval_ns: float = RETENTION_NS
    hst_share: float = 0.5

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE_MODES:
            raise ValueError(f"recompute: must be one of {', '.join(RECOMPUTE_MODES)}, not '{self.recompute}'")
        if self.recompute_share > 1:
            raise ValueError(f"recompute_share: must be at most 1, not {self.recompute_share}")
        if not self.activation_interval_ns > 0:
            raise ValueError(f"activation_interval_ns: must be more than 0, not {self.activation_interval_ns}")
        if not 0 <= self.hst_share <= 1:
            raise ValueError(f"hst_share: must be from 0 to 1, not {self.hst_share}")

    @property
    def recomputes(self) -> bool:
        return self.recompute != "none"

    @property
    def declared(self) -> bool:
        return self.recompute == "declared"

    @property
    def refresh_hz(self) -> tuple[float, float, float, float]:
        shares = (self.hst_share / 2, self.hst_share / 2, (1 - self.hst_share) / 2, (1 - self.hst_share) / 2)
        hst_msb, hst_lsb, lst_msb, lst_lsb = (
            1e9 * share / interval_ns for share, interval_ns in zip(shares, self.intervals.in_order(), strict=True)
        )
        return hst_msb, hst_lsb, lst_msb, lst_lsb


@dataclass(frozen=True)
class AcceleratorSystem:
    """A policy on an accelerator."""

    name: str
    hardware: AcceleratorHardware
    policy: RetentionPolicy

    def with_recompute(self, mode: str) -> AcceleratorSystem:
        if self.policy.recompute == "none":
            return self
        return replace(self, policy=replace(self.policy, recompute=mode))


# 8.1.1: 24 x 24 PEs and 4 MB of SRAM. Their division is not stated; assumed are 2 MB for weights, as in Kelle, and 2 MB for
# KV.
SRAM_HARDWARE = AcceleratorHardware(
    name="SRAM",
    array_rows=CHIP.baseline_rows,
    edram=False,
    kv_capacity_bytes=CHIP.baseline_sram_bytes - 2 * MIB,
    kv_bytes_per_s=CHIP.sram_bytes_per_s,
    activation_bytes=0,  # part of the 4 MB
)
EDRAM_HARDWARE = AcceleratorHardware("eDRAM", CHIP.array_rows, True, CHIP.kv_edram_bytes, CHIP.edram_bytes_per_s)  # 5.1, 8
KELLE_HARDWARE = replace(EDRAM_HARDWARE, name="Kelle", overlap=True)  # 6

ORIGINAL = RetentionPolicy("Original")
AEP = RetentionPolicy("AEP", evict=True)
AERP_POLICY = RetentionPolicy("AERP", evict=True, recompute="first-principles")
KELLE = replace(  # the activation eDRAM is refreshed like the most significant bits of high-score tokens
    AERP_POLICY, name="Kelle", intervals=KELLE_INTERVALS, activation_interval_ns=KELLE_INTERVALS.hst_msb_ns
)

SYSTEMS: dict[str, AcceleratorSystem] = {
    system.name: system
    for system in (
        AcceleratorSystem("Original+SRAM", SRAM_HARDWARE, ORIGINAL),
        AcceleratorSystem("Original+eDRAM", EDRAM_HARDWARE, ORIGINAL),
        AcceleratorSystem("AEP+SRAM", SRAM_HARDWARE, AEP),
        AcceleratorSystem("AERP+SRAM", SRAM_HARDWARE, AERP_POLICY),
        AcceleratorSystem("Kelle+eDRAM", KELLE_HARDWARE, KELLE),
    )
}
"""The systems of section 8.1.1; the others are compared with Original+SRAM."""
BASELINE = "Original+SRAM"


@dataclass(frozen=True)
class Configuration:
    """A model with a workload on a system, with a profile."""

    model: LlmShape
    workload: GenerationWorkload
    system: AcceleratorSystem
    profile: Profile = PAPER

    @property
    def hardware(self) -> AcceleratorHardware:
        return self.system.hardware

    @property
    def policy(self) -> RetentionPolicy:
        return self.system.policy

    @property
    def last_cached(self) -> int:
        end = self.workload.context + self.workload.decode
        return min(end, self.workload.budget) if self.policy.evict else end

    def on(self, system: AcceleratorSystem) -> Configuration:
        return replace(self, system=system)
