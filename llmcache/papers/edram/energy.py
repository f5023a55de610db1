"""The modelled energy of a configuration by component (J)."""

from __future__ import annotations

import numpy as np

from llmcache.arrays import Doubles
from llmcache.papers.edram.chip import at_the_same_time, one_after_the_other
from llmcache.papers.edram.constants import CHIP, GROUPS
from llmcache.papers.edram.latency import (
    PASSES_16_BY_8,
    PASSES_16_BY_16,
    ConfigurationColumns,
    Prefill,
    Step,
    Steps,
    activation_accesses,
)

REFRESH = (*(f"refresh_{group}" for group in GROUPS), "refresh_activations")
KINDS: dict[str, tuple[str, ...]] = {
    "DRAM, weights": ("dram_weights",),
    "DRAM, KV": ("dram_kv",),
    "DRAM, other": ("dram_activations", "dram_static"),
    "weight memory": ("weight_memory",),
    "KV memory": ("kv_memory",),
    "activation memory": ("activation_memory",),
    "leakage": ("sram_leakage", "edram_leakage"),
    "refresh": REFRESH,
    "array": ("array_linear", "array_attention", "array_recompute"),
    "SFU": ("sfu",),
    "evictor": ("evictor",),
}
"""Groups of components for pictures and tables; every component is in exactly one of them."""
COMPONENTS = tuple(name for names in KINDS.values() for name in names)
"""All components; the energy of a configuration is their sum."""


def energy_of(c: ConfigurationColumns, steps: Steps, step: Step, step_s: Doubles, prefill: Prefill) -> dict[str, Doubles]:
    """Return the energy (J, [n]) of each of `COMPONENTS` for prefill and all decode steps."""
    latency_s = prefill.latency_s[:, 0] + (steps.count * step_s).sum(axis=1)
    found = dict.fromkeys(COMPONENTS, np.zeros(len(latency_s)))
    found |= _timely(c, latency_s[:, None])
    for part in (_of_prefill(c, prefill), _of_decode(c, steps, step)):
        for name, joules in part.items():
            found[name] = found[name] + joules
    return found


def _timely(c: ConfigurationColumns, latency_s: Doubles) -> dict[str, Doubles]:
    on_chip = c.kv_capacity_bytes + c.activation_bytes
    sram = c.weight_capacity_bytes + np.where(c.edram, 0, on_chip)
    edram = np.where(c.edram, on_chip, 0)
    refresh_w = np.where(c.edram, c.refresh_j_per_byte * c.kv_capacity_bytes, 0) * c.refresh_hz  # [n, 4]
    watts = {
        "dram_static": c.dram_static_w,
        "sram_leakage": c.sram_leak_w * sram / c.array_bytes,
        "edram_leakage": c.edram_leak_w * edram / c.array_bytes,
        "sfu": c.sfu_w,
        "evictor": np.where(np.logical_and(c.evict, c.systolic_evictor), c.evictor_w, 0),
    }
    watts |= {f"refresh_{group}": refresh_w[:, [place]] for place, group in enumerate(GROUPS)}
    return {name: (power * latency_s)[:, 0] for name, power in watts.items()}


def _of_prefill(c: ConfigurationColumns, prefill: Prefill) -> dict[str, Doubles]:
    memory = np.where(c.edram, c.edram_j_per_byte, c.sram_j_per_byte)
    accessed = 2 * prefill.activation_bytes + activation_accesses(c, c.batch * c.context)
    live = np.where(c.edram, c.refresh_j_per_byte * c.activation_bytes, 0) * 1e9 / c.activation_interval_ns
    cycle = c.pe_cycle_j / c.macs_per_pe
    spent = {
        "dram_weights": prefill.weight_bytes * c.dram_j_per_byte,
        "dram_kv": prefill.kv_bytes * c.dram_j_per_byte,
        "dram_activations": prefill.activation_bytes * c.dram_j_per_byte,
        "weight_memory": 2 * prefill.weight_bytes * c.sram_j_per_byte,
        "kv_memory": 2 * prefill.kv_bytes * memory,
        "activation_memory": accessed * memory,
        "refresh_activations": live * prefill.latency_s,
        "array_linear": prefill.linear_macs * PASSES_16_BY_8 * cycle,
        "array_attention": prefill.attention_macs * PASSES_16_BY_16 * cycle,
    }
    return {name: joules[:, 0] for name, joules in spent.items()}


def _of_decode(c: ConfigurationColumns, steps: Steps, step: Step) -> dict[str, Doubles]:
    memory = np.where(c.edram, c.edram_j_per_byte, c.sram_j_per_byte)
    weights, kv_token_bytes = c.read_weights * CHIP.weight_bytes, c.layers * c.kv_layer_bytes
    resident = step.stored_bytes - step.off_chip_bytes
    accessed = 2 * step.off_chip_bytes + resident + step.new_bytes + 2 * step.recomputed * kv_token_bytes
    recompute_macs = step.recomputed * c.layers * 2 * c.channels * c.kv_heads * c.head_dim
    attention_macs = c.batch * steps.cached * c.layers * 2 * c.heads * c.head_dim
    cycle = c.pe_cycle_j / c.macs_per_pe
    spent = {
        "dram_weights": weights * c.dram_j_per_byte,
        "dram_kv": (step.off_chip_bytes + step.new_bytes) * c.dram_j_per_byte,
        "weight_memory": 2 * weights * c.sram_j_per_byte,
        "kv_memory": accessed * memory,
        "activation_memory": activation_accesses(c, c.batch) * memory,
        "refresh_activations": np.where(c.edram, _activation_refresh_j(c, steps), 0),
        "array_linear": c.batch * c.read_weights * PASSES_16_BY_8 * cycle,
        "array_attention": attention_macs * PASSES_16_BY_16 * cycle,
        "array_recompute": recompute_macs * PASSES_16_BY_8 * cycle,
    }
    return {name: (steps.count * joules).sum(axis=1) for name, joules in spent.items()}


def _activation_refresh_j(c: ConfigurationColumns, steps: Steps) -> Doubles:
    """Return the energy (J, [n, groups]) of refreshing X, Q, K and V of all layers in a step.

    Differs from the paper: equations 7 and 8 weight all four equally; here each counts by its bytes, and only for whole
    intervals.
    """
    width = c.heads * c.head_dim
    t_sram_s = c.channels * width * CHIP.weight_bytes / np.minimum(c.sram_bytes_per_s, c.dram_bytes_per_s)
    t_edram_s = c.batch * steps.cached * c.kv_layer_bytes / 2 / c.kv_bytes_per_s
    plain, kelle = one_after_the_other(t_sram_s, t_edram_s), at_the_same_time(t_sram_s, t_edram_s)
    widths = (c.channels, width, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)

    def refreshed(lifetimes_s: tuple[Doubles, ...]) -> Doubles:
        ticks = (np.floor(1e9 * life_s / c.activation_interval_ns) for life_s in lifetimes_s)
        return np.asarray(sum(w * CHIP.value_bytes * many for w, many in zip(widths, ticks, strict=True)))

    per_layer = np.where(c.overlap, refreshed(kelle), refreshed(plain))
    return np.asarray(c.layers * c.batch * c.refresh_j_per_byte * per_layer)
