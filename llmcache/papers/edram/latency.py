"""Modelled prefill and decode steps: bytes moved, and the time that each resource is busy.

The array is weight-stationary with hidden loading: a tile of weights stays for the cycles of the rows that pass through it,
or of loading the next tile, whichever is longer. Groups of decode steps have exact means, unless the slowest resource or the
number of refresh intervals changes within a group (energies are within 1e-4).

As many cached tokens are recomputed as the array can hide behind DRAM traffic (`first-principles`). Differs from the paper
(`declared`), in which recomputing a KV vector takes 3.2 us and loading one 1.1 us (section 8.3.2). Its array takes 32.8 us
for K and V of a token in a layer of LLaMA2-7B, and its DRAM 0.26 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcache.arrays import Doubles
from llmcache.papers.edram.chip import CHAIN_CYCLES
from llmcache.papers.edram.constants import CHIP
from llmcache.papers.edram.systems import Configuration


class ConfigurationColumns:
    """Attributes of many configurations as columns [n, 1], float64 or bool; ValueError if there are none.

    `refresh_hz` is [n, 4], in the order of `constants.GROUPS`; `matrices` is [n, 3 * kinds].
    """

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        if not configurations:
            raise ValueError("configurations: must not be empty")
        parts = ("model", "workload", "hardware", "policy", "profile")
        self._parts = [[getattr(one, part) for one in configurations] for part in parts]

    def __getattr__(self, name: str) -> Doubles:
        values = next((of_part for of_part in self._parts if hasattr(of_part[0], name)), None)
        if values is None:
            raise AttributeError(name)
        known: dict[int, Any] = {id(value): value for value in values}  # a sweep has few distinct parts
        read = {key: getattr(value, name) for key, value in known.items()}
        found = np.array([read[id(value)] for value in values])
        column: Doubles = (found if found.dtype == bool else found.astype(np.float64)).reshape(len(values), -1)
        setattr(self, name, column)
        return column


STEP_GROUPS = 64
"""Number of groups for the steps in which the cache grows; a test compares them with single steps."""


@dataclass(frozen=True)
class Steps:
    """Groups of decode steps, float64 [n, groups + 1] each; the last group has the steps at the budget.

    `cached`: mean number of tokens that a step attends to. `row_tiles`: mean number of tiles of `array_rows` tokens that
    they fill. `count`: steps of the group.
    """

    cached: Doubles
    row_tiles: Doubles
    count: Doubles


def steps_of(columns: ConfigurationColumns, groups: int | None = STEP_GROUPS) -> Steps:
    """Return `groups` groups and one more; None: one group per step."""
    end = columns.context + columns.decode
    kept = np.where(columns.evict, np.minimum(end, columns.budget), end)
    growing = np.clip(kept - columns.context, 0, columns.decode)
    groups = int(growing.max()) or 1 if groups is None else groups
    edges = np.floor(growing * (np.arange(groups + 1) / groups) + 0.5)
    first, last = columns.context + 1 + edges[:, :-1], columns.context + edges[:, 1:]
    count = np.diff(edges, axis=1)
    cached = np.where(count > 0, (first + last) / 2, first)
    filled = _tiles_up_to(last, columns.array_rows) - _tiles_up_to(first - 1, columns.array_rows)
    row_tiles = np.where(count > 0, filled / np.maximum(count, 1), np.ceil(cached / columns.array_rows))
    budget = np.maximum(columns.budget, 1)
    return Steps(
        np.hstack((cached, budget)),
        np.hstack((row_tiles, np.ceil(budget / columns.array_rows))),
        np.hstack((count, columns.decode - growing)),
    )


def _tiles_up_to(tokens: Doubles, rows: Doubles) -> Doubles:
    """Return the sum of ceil(i / rows) over i = 1 .. tokens."""
    whole, rest = np.divmod(tokens, rows)
    return np.asarray(rows * whole * (whole + 1) / 2 + rest * (whole + 1))


PASSES_16_BY_8 = 2
"""8-bit MACs per product of an activation and a weight (16 x 8 bit; section 5: a PE performs 8-bit MACs)."""
PASSES_16_BY_16 = 4
"""8-bit MACs per product of two activations, as in attention."""


@dataclass(frozen=True)
class Tiles:
    """Numbers of tiles of `array_rows` x `array_rows` weights, [n, 1]: of K and V, of other matrices, of the head."""

    kv: Doubles
    other: Doubles
    head: Doubles
    load_cycles: Doubles
    row_cycles: Doubles
    fill_cycles: Doubles


def tiles_of(c: ConfigurationColumns) -> Tiles:
    channels, hidden, query, key = (
        np.ceil(width / c.array_rows) for width in (c.channels, c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim)
    )
    feed_forward = np.where(c.gated, 3, 2) * channels * hidden
    return Tiles(
        kv=c.layers * 2 * channels * key,
        other=c.layers * (2 * channels * query + feed_forward),
        head=channels * np.ceil(c.vocabulary / c.array_rows),
        load_cycles=c.array_rows**2 * CHIP.weight_bytes * c.clock_hz / c.sram_bytes_per_s,
        row_cycles=PASSES_16_BY_8 / c.macs_per_pe,
        fill_cycles=np.where(c.exposed_fill, 3 * c.array_rows - 2, 0),  # as SCALE-Sim v3 counts them
    )


def linear_s(c: ConfigurationColumns, tiles: Tiles, rows: Doubles, head_rows: Doubles, extra_kv_rows: Doubles) -> Doubles:
    """Return the time of all products with weights; `extra_kv_rows` pass only through K and V."""

    def cycles(amount: Doubles) -> Doubles:
        return np.maximum(amount * tiles.row_cycles, tiles.load_cycles) + tiles.fill_cycles

    worked = tiles.other * cycles(rows) + tiles.kv * cycles(rows + extra_kv_rows) + tiles.head * cycles(head_rows)
    return np.asarray(worked / c.clock_hz)


def attention_s(c: ConfigurationColumns, steps: Steps) -> Doubles:
    """Return the time of the products with keys and values, [n, groups]."""
    per_head = 2 * np.ceil(c.head_dim / c.array_rows) * steps.row_tiles
    rows = c.heads / c.kv_heads * PASSES_16_BY_16 / c.macs_per_pe
    load = c.array_rows**2 * CHIP.value_bytes * c.clock_hz / c.kv_bytes_per_s
    return np.asarray(c.batch * c.layers * c.kv_heads * per_head * np.maximum(rows, load) / c.clock_hz)


@dataclass(frozen=True)
class Step:
    """One decode step: bytes, tokens, and seconds by resource; [n, groups], or [n, 1] if constant.

    `recomputed`: tokens per layer, over the batch. `off_chip_bytes` of the `stored_bytes` are read from DRAM.
    """

    recomputed: Doubles
    stored_bytes: Doubles
    off_chip_bytes: Doubles
    new_bytes: Doubles
    dram_weights_s: Doubles
    dram_kv_s: Doubles
    linear_s: Doubles
    attention_s: Doubles
    sram_s: Doubles
    kv_memory_s: Doubles
    eviction_s: Doubles


def step_of(c: ConfigurationColumns, steps: Steps, share: Doubles) -> Step:
    """Return a step with `share` of the cached tokens (0..1, [n, groups]) stored as inputs.

    With the declared costs of section 8.3.2, such tokens move no bytes and take no time.
    """
    tokens = c.batch * steps.cached
    kv_bytes = tokens * c.layers * c.kv_layer_bytes
    x_bytes = np.where(c.declared, 0, tokens * c.layers * c.x_layer_bytes)
    stored = (1 - share) * kv_bytes + share * x_bytes
    off_chip = np.maximum(stored - c.kv_capacity_bytes, 0)
    new = c.batch * c.layers * c.kv_layer_bytes
    recomputed = np.where(c.declared, 0, share * tokens)
    return Step(
        recomputed=recomputed,
        stored_bytes=stored,
        off_chip_bytes=off_chip,
        new_bytes=new,
        dram_weights_s=c.read_weights * CHIP.weight_bytes / c.dram_bytes_per_s,
        dram_kv_s=(off_chip + new) / c.dram_bytes_per_s,
        linear_s=linear_s(c, tiles_of(c), c.batch, c.batch, recomputed),
        attention_s=attention_s(c, steps),
        sram_s=c.read_weights * CHIP.weight_bytes / c.sram_bytes_per_s,
        kv_memory_s=kv_bytes / c.kv_bytes_per_s,
        eviction_s=_eviction_s(c, steps),
    )


def _eviction_s(c: ConfigurationColumns, steps: Steps) -> Doubles:
    cycles = np.where(c.systolic_evictor, CHAIN_CYCLES, steps.cached)
    searches = c.kv_heads * c.layers * c.batch
    return np.where(np.logical_and(c.evict, steps.cached >= c.budget), searches * cycles / c.clock_hz, 0)


RESOURCES = ("dram_weights", "dram_kv", "array", "sram", "kv_memory", "eviction")
"""Resources that a step can wait for."""


def waits(c: ConfigurationColumns, step: Step) -> dict[str, Doubles]:
    """Return the time (s) that a step waits for each of `RESOURCES`, [n, groups]; the step takes their sum.

    Without overlap (section 6), weights and KV are two phases, each as long as its slowest resource.
    """
    weights = _slowest(step.dram_weights_s, step.linear_s, step.sram_s)
    kv = _slowest(step.dram_kv_s, step.attention_s, step.kv_memory_s)
    dram, array = step.dram_weights_s + step.dram_kv_s, step.linear_s + step.attention_s
    both = _slowest(dram, array, step.sram_s, step.kv_memory_s)
    of_weights = step.dram_weights_s / dram
    apart = (weights[0], kv[0], weights[1] + kv[1], weights[2], kv[2], step.eviction_s)
    together = (both[0] * of_weights, both[0] * (1 - of_weights), both[1], both[2], both[3], step.eviction_s)
    return {name: np.where(c.overlap, one, two) for name, one, two in zip(RESOURCES, together, apart, strict=True)}


def _slowest(*times_s: Doubles) -> list[Doubles]:
    """Return each of `times_s` where it is the longest (the first of equals), 0 elsewhere."""
    shape = np.broadcast_shapes(*(time_s.shape for time_s in times_s))
    stacked = np.stack([np.broadcast_to(time_s, shape) for time_s in times_s])
    longest = stacked.argmax(axis=0)
    return [np.where(longest == place, time_s, 0) for place, time_s in enumerate(stacked)]


@dataclass(frozen=True)
class Prefill:
    """The cost of the prefill, [n, 1] each; array and DRAM overlap."""

    weight_bytes: Doubles
    activation_bytes: Doubles
    kv_bytes: Doubles
    linear_macs: Doubles
    attention_macs: Doubles
    array_s: Doubles
    dram_s: Doubles

    @property
    def latency_s(self) -> Doubles:
        return np.maximum(self.array_s, self.dram_s)

    @property
    def dram_bytes(self) -> Doubles:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


def prefill_of(c: ConfigurationColumns) -> Prefill:
    """Return the prefill; only the last token needs the head."""
    rows = c.batch * c.context
    weight_bytes = c.read_weights * CHIP.weight_bytes
    activation_bytes = c.layers * rows * CHIP.value_bytes * _values_per_row(c)
    kept = np.where(c.evict, np.minimum(c.context, c.budget), c.context)
    kv_bytes = c.batch * c.layers * c.kv_layer_bytes * kept
    attention_macs = c.batch * c.layers * c.heads * c.context**2 * c.head_dim  # causal: half of it, for QK and for AV
    linear = linear_s(c, tiles_of(c), rows, c.batch, np.zeros_like(rows))
    attention = attention_macs * PASSES_16_BY_16 / c.macs_per_pe / (c.array_rows**2 * c.clock_hz)
    return Prefill(
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        linear_macs=rows * c.layers * c.layer_weights + c.batch * c.channels * c.vocabulary,
        attention_macs=attention_macs,
        array_s=linear + attention,
        dram_s=(weight_bytes + activation_bytes + kv_bytes) / c.dram_bytes_per_s,
    )


def _values_per_row(c: ConfigurationColumns) -> Doubles:
    inputs, outputs, many = _matrices(c)
    pieces = np.ceil(inputs * outputs * CHIP.weight_bytes / c.weight_capacity_bytes)
    return np.asarray((many * (inputs * pieces + outputs)).sum(axis=1, keepdims=True))


def activation_accesses(c: ConfigurationColumns, rows: Doubles) -> Doubles:
    """Return the bytes of activations that all layers read and write on the chip."""
    inputs, outputs, many = _matrices(c)
    values = (many * (inputs * np.ceil(outputs / c.array_rows) + outputs)).sum(axis=1, keepdims=True)
    return np.asarray(c.layers * rows * CHIP.value_bytes * values)


def _matrices(c: ConfigurationColumns) -> Doubles:
    """Return inputs, outputs and number of each kind of matrix, [3, n, kinds]."""
    return np.moveaxis(c.matrices.reshape(len(c.layers), -1, 3), 2, 0)


DECLARED_SHARE = CHIP.load_vector_ns / (CHIP.load_vector_ns + CHIP.recompute_vector_ns)
"""The share of tokens with which recomputing these takes as long as loading the others: 25.6 %, the claimed saving of
25 %.
"""


def recompute_share(c: ConfigurationColumns, steps: Steps) -> Doubles:
    """Return the share of the cached tokens that is recomputed, [n, groups]."""
    modelled = np.where(c.declared, DECLARED_SHARE, _hidden_share(c, steps))
    share = np.where(c.recompute_share >= 0, c.recompute_share, modelled)
    return np.where(c.recomputes, share, 0) + np.zeros_like(steps.cached)


def _hidden_share(c: ConfigurationColumns, steps: Steps) -> Doubles:
    """Return the share with which a step is shortest. Sinks and window stay KV, because their scores are not known yet."""
    tokens = c.batch * steps.cached
    saved_bytes = c.layers * (c.kv_layer_bytes - c.x_layer_bytes)  # per token, all layers; at most 0 under GQA
    plain = step_of(c, steps, np.zeros_like(steps.cached))
    tiles, none = tiles_of(c), np.zeros_like(c.batch)
    per_row_s = tiles.kv * tiles.row_cycles / c.clock_hz
    # The time without K and V, which with a row of their own would take max(load, rows) per tile.
    fixed_s = (
        linear_s(c, tiles, c.batch, c.batch, none)
        - tiles.kv * np.maximum(c.batch * tiles.row_cycles, tiles.load_cycles) / c.clock_hz
    )
    saved_s = np.maximum(saved_bytes, 1) / c.dram_bytes_per_s
    dram_s, array_s = plain.dram_weights_s + plain.dram_kv_s, fixed_s + plain.attention_s
    slack = np.where(
        c.overlap,
        (dram_s - array_s - c.batch * per_row_s) / (per_row_s + saved_s),
        (np.maximum(plain.dram_weights_s, plain.sram_s) - fixed_s) / per_row_s - c.batch,
    )
    free = tiles.load_cycles / tiles.row_cycles - c.batch  # rows that pass while the next tile is loaded anyway
    useful_s = np.where(
        c.overlap,
        dram_s - np.maximum(plain.sram_s, plain.kv_memory_s),
        plain.dram_kv_s - np.maximum(plain.attention_s, plain.kv_memory_s),
    )
    eligible = c.batch * np.maximum(steps.cached - c.sinks - c.window, 0)
    most = np.minimum(np.minimum(useful_s / saved_s, plain.off_chip_bytes / np.maximum(saved_bytes, 1)), eligible)
    rows = np.clip(np.maximum(slack, free), 0, np.maximum(most, 0))
    return np.where(saved_bytes > 0, rows / tokens, 0)
