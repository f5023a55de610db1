"""Configurations of the accelerator model, and many of them as columns of arrays to compute with at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.constants import PAPER, Profile
from llmcache.edram.models import LlmShape
from llmcache.edram.systems import Hardware, Policy, System
from llmcache.edram.workloads import Workload

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Configuration:
    """One thing to model: a language model with a workload on a system, with the energies of a profile."""

    model: LlmShape
    workload: Workload
    system: System
    profile: Profile = PAPER

    @property
    def hardware(self) -> Hardware:
        """The accelerator."""
        return self.system.hardware

    @property
    def policy(self) -> Policy:
        """What is done with the KV cache."""
        return self.system.policy

    def on(self, system: System) -> Configuration:
        """Returns the same on another system."""
        return replace(self, system=system)


@dataclass(frozen=True)
class Columns:
    """Numbers of many configurations, float64 or bool [n, 1]; their names and units are those of the parts they are from.

    `refresh_hz` is [n, 4], in the order of `constants.GROUPS`.
    """

    # the language model
    layers: Array
    channels: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    hidden: Array
    vocabulary: Array
    gated: Flags
    layer_weights: Array
    read_weights: Array
    stored_weights: Array
    kv_layer_bytes: Array
    x_layer_bytes: Array
    # the workload
    context: Array
    decode: Array
    batch: Array
    budget: Array
    window: Array
    sinks: Array
    # the hardware
    array_rows: Array
    edram: Flags
    kv_capacity_bytes: Array
    kv_bytes_per_s: Array
    overlap: Flags
    weight_capacity_bytes: Array
    activation_bytes: Array
    sram_bytes_per_s: Array
    dram_bytes_per_s: Array
    dram_capacity_bytes: Array
    clock_hz: Array
    macs_per_pe: Array
    systolic_evictor: Flags
    exposed_fill: Flags
    # the policy
    evict: Flags
    recomputes: Flags
    declared: Flags
    recompute_share: Array
    activation_interval_ns: Array
    refresh_hz: Array
    # the profile
    dram_j_per_byte: Array
    sram_j_per_byte: Array
    edram_j_per_byte: Array
    refresh_j_per_byte: Array
    pe_cycle_j: Array
    sram_leak_w: Array
    edram_leak_w: Array
    sfu_w: Array
    evictor_w: Array
    dram_static_w: Array
    array_bytes: Array


PARTS = ("model", "workload", "hardware", "policy", "profile")


def columns_of(configurations: Sequence[Configuration]) -> Columns:
    """Returns `configurations` as columns; ValueError if there are none."""
    if not configurations:
        raise ValueError("configurations: none are given")
    parts = {part: [getattr(one, part) for one in configurations] for part in PARTS}
    return Columns(**{field.name: _column(parts, field.name) for field in fields(Columns)})


def _column(parts: dict[str, list[Any]], name: str) -> NDArray[Any]:
    """Returns the column of the one part that has the attribute `name`: [n, 1], or [n, k] where it is a tuple."""
    (values,) = (values for values in parts.values() if hasattr(values[0], name))
    known: dict[int, Any] = {id(value): value for value in values}  # a sweep has few different parts
    read = {key: getattr(value, name) for key, value in known.items()}
    found = np.array([read[id(value)] for value in values])
    return (found if found.dtype == bool else found.astype(np.float64)).reshape(len(values), -1)
