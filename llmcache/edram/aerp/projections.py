"""Keys and values from x, the normed input of an attention layer, with the rotation of their original positions (RoPE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Recompute = Callable[[Floats, Ints], tuple[Floats, Floats]]
"""From x [n, channels] and positions [n] to keys and values [n, kv_heads, head_dim], float32."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions as Llama and Qwen have them: number i of a head turns with number i + dim/2. `theta`: their base."""

    theta: float = 10_000.0

    def turn(self, rows: Floats, positions: Ints) -> Floats:
        """Returns `rows` [n, heads, dim] turned by their `positions` [n]."""
        half = rows.shape[2] // 2
        speeds = self.theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = positions[:, None] * speeds
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        first, second = rows[..., :half], rows[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


@dataclass(frozen=True)
class Projections:
    """W_K and W_V [channels, kv_heads * head_dim] of a layer, their biases, and its rotation. Callable as `Recompute`."""

    key_weight: Floats
    value_weight: Floats
    kv_heads: int
    rope: Rope | None = None
    key_bias: Floats | None = None
    value_bias: Floats | None = None

    def __call__(self, x: Floats, positions: Ints) -> tuple[Floats, Floats]:
        """Returns keys and values [n, kv_heads, head_dim] of the tokens `x` [n, channels] at `positions` [n]."""
        keys = _projected(x, self.key_weight, self.key_bias).reshape(len(x), self.kv_heads, -1)
        values = _projected(x, self.value_weight, self.value_bias).reshape(len(x), self.kv_heads, -1)
        return (keys if self.rope is None else self.rope.turn(keys, positions)), values


def _projected(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    return x @ weight if bias is None else x @ weight + bias
