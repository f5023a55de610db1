"""The prefill, modelled: products of all context tokens with all weights, causal attention, and their DRAM traffic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.edram.columns import Array, Columns
from llmcache.edram.constants import CHIP
from llmcache.edram.decode import PASSES_16_BY_16, linear_s, tiles_of


@dataclass(frozen=True)
class Prefill:
    """What the prefill takes, [n, 1] each: bytes over DRAM, MACs of the array, seconds (array and DRAM overlap)."""

    weight_bytes: Array
    activation_bytes: Array
    kv_bytes: Array
    linear_macs: Array
    attention_macs: Array
    array_s: Array
    dram_s: Array

    @property
    def latency_s(self) -> Array:
        """The longer of both."""
        return np.maximum(self.array_s, self.dram_s)

    @property
    def dram_bytes(self) -> Array:
        """All bytes over DRAM."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


def prefill_of(c: Columns) -> Prefill:
    """Returns the prefill of `c`. Only the last token of a sequence needs the head.

    The inputs of a matrix are read once for each piece of it that the weight memory holds, its outputs written once.
    """
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


def matrices(c: Columns) -> list[tuple[Array, Array, Array]]:
    """Returns the kinds of matrices of a layer: (inputs, outputs, how many), [n, 1] each."""
    query, key, one = c.heads * c.head_dim, c.kv_heads * c.head_dim, np.ones_like(c.layers)
    return [
        (c.channels, query, one),
        (c.channels, key, 2 * one),
        (query, c.channels, one),
        (c.channels, c.hidden, np.where(c.gated, 2.0, 1.0)),
        (c.hidden, c.channels, one),
    ]


def _values_per_row(c: Columns) -> Array:
    total = np.zeros_like(c.layers)
    for inputs, outputs, many in matrices(c):
        pieces = np.ceil(inputs * outputs * CHIP.weight_bytes / c.weight_capacity_bytes)
        total = total + many * (inputs * pieces + outputs)
    return total


def activation_accesses(c: Columns, rows: Array) -> Array:
    """Returns the bytes of activations that all layers read and write on the chip for `rows` rows, the head's not.

    Inputs are read once for each column of tiles.
    """
    total = np.zeros_like(c.layers)
    for inputs, outputs, many in matrices(c):
        total = total + many * (inputs * np.ceil(outputs / c.array_rows) + outputs)
    return c.layers * rows * CHIP.value_bytes * total
