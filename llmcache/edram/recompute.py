"""How many cached tokens are best stored as inputs and recomputed: as many as the array can hide under DRAM traffic.

Differs from the paper: it states that recomputing a KV vector takes 3.2 us and loading one 1.1 us (section 8.3.2), from
which every fourth would be recomputed. Its own array takes 32.8 us for K and V of a token in a layer of LLaMA2-7B, and
its DRAM 0.26 us for the 16 KiB that they have. Both are offered: `first-principles` and `declared`.
"""

from __future__ import annotations

import numpy as np

from llmcache.edram.columns import Array, Columns
from llmcache.edram.constants import CHIP
from llmcache.edram.decode import linear_s, step_of, tiles_of
from llmcache.edram.steps import Steps

DECLARED_SHARE = CHIP.load_vector_ns / (CHIP.load_vector_ns + CHIP.recompute_vector_ns)
"""Of the tokens (0..1): loading the others then takes as long as recomputing these; 25.6 %, the claimed saving of 25 %."""


def recompute_share(c: Columns, steps: Steps) -> Array:
    """Returns which share of the cached tokens is recomputed, 0..1, [n, groups]."""
    modelled = np.where(c.declared, DECLARED_SHARE, _hidden_share(c, steps))
    share = np.where(c.recompute_share >= 0, c.recompute_share, modelled)
    return np.where(c.recomputes, share, 0) + np.zeros_like(steps.cached)


def _hidden_share(c: Columns, steps: Steps) -> Array:
    """Returns the share with which a step is shortest, from the costs of array and DRAM.

    Tokens are recomputed until the array is as busy as DRAM, or DRAM no longer the slowest, or there are none left: sinks
    and window are stored as KV (their scores are not known yet), and what lies on the chip needs no DRAM.
    """
    tokens = c.batch * steps.cached
    saved_bytes = c.layers * (c.kv_layer_bytes - c.x_layer_bytes)  # per token, all layers; at most 0 under GQA
    plain = step_of(c, steps, np.zeros_like(steps.cached))
    tiles, none = tiles_of(c), np.zeros_like(c.batch)
    per_row_s = tiles.kv * tiles.row_cycles / c.clock_hz
    # The time of everything but K and V, which with a row of their own would take max(load, rows) a tile.
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
    free = tiles.load_cycles / tiles.row_cycles - c.batch  # rows that pass while the next tile loads anyway
    useful_s = np.where(
        c.overlap,
        dram_s - np.maximum(plain.sram_s, plain.kv_memory_s),
        plain.dram_kv_s - np.maximum(plain.attention_s, plain.kv_memory_s),
    )
    eligible = c.batch * np.maximum(steps.cached - c.sinks - c.window, 0)
    most = np.minimum(np.minimum(useful_s / saved_s, plain.off_chip_bytes / np.maximum(saved_bytes, 1)), eligible)
    rows = np.clip(np.maximum(slack, free), 0, np.maximum(most, 0))
    return np.where(saved_bytes > 0, rows / tokens, 0)
