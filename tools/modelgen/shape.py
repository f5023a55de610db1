"""The dimensions of a generated Llama model, dense or a mixture, chosen so that the file gets about the size asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

HEAD_SIZE = 64
_ROW = 32  # values in a block of Q8_0, of which a row is made

# (smallest number of parameters, width, feed-forward width, vocabulary); the middle ones are TinyLlama and Llama 8B.
_PRESETS = (
    (0, 256, 704, 2000),
    (30_000_000, 1024, 2816, 8000),
    (280_000_000, 2048, 5632, 32000),
    (5_500_000_000, 4096, 14336, 32000),
)


@dataclass(frozen=True)
class Weight:
    """One tensor to generate: `role` is its name without a format's spelling, `rows` None for a vector of ones.

    `experts`: as many matrices behind one another; `expert`: it is the matrix of that one.
    """

    role: str
    layer: int | None
    columns: int
    rows: int | None
    experts: int | None = None
    expert: int | None = None

    @property
    def values(self) -> int:
        """Number of values in the tensor."""
        return self.columns * (self.rows or 1) * (self.experts or 1)


@dataclass(frozen=True)
class Shape:
    """A Llama decoder with grouped-query attention: 8 query heads share one key and value head.

    With `experts` its feed-forward part is a mixture (Mixtral's) of so many networks of `feed_forward` units each, of which
    a router has a token use `used`.
    """

    width: int
    feed_forward: int
    vocabulary: int
    layers: int
    tied: bool
    experts: int = 0
    used: int = 0

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.width // HEAD_SIZE

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return max(1, self.heads // 8)

    def weights(self) -> Iterator[Weight]:
        """All tensors in the order of the file."""
        yield Weight("embedding", None, self.width, self.vocabulary)
        for layer in range(self.layers):
            yield from self.layer_weights(layer)
        yield Weight("output_norm", None, self.width, None)
        if not self.tied:
            yield Weight("output", None, self.width, self.vocabulary)

    def layer_weights(self, layer: int) -> Iterator[Weight]:
        """The tensors of one layer."""
        kv_width = self.kv_heads * HEAD_SIZE
        yield Weight("attention_norm", layer, self.width, None)
        yield Weight("query", layer, self.width, self.width)
        yield Weight("key", layer, self.width, kv_width)
        yield Weight("value", layer, self.width, kv_width)
        yield Weight("attention_output", layer, self.width, self.width)
        yield Weight("feed_forward_norm", layer, self.width, None)
        if self.experts:
            yield Weight("router", layer, self.width, self.experts)
        yield Weight("gate", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("up", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("down", layer, self.feed_forward, self.width, self.experts or None)


@dataclass(frozen=True)
class MixtureShape:
    """A mixture to be: `slice_bytes` has one expert in one tensor, about."""

    experts: int
    used: int
    slice_bytes: int


def choose_shape(
    size_bytes: int, bytes_per_value: float, layers: int | None, tied: bool, mixture: MixtureShape | None = None
) -> Shape:
    """The shape whose file comes nearest to `size_bytes`; a given number of `layers` is kept instead of the size."""
    values = size_bytes / bytes_per_value
    if mixture is None:
        _, width, feed_forward, vocabulary = max(preset for preset in _PRESETS if preset[0] <= values)
        shape = Shape(width, feed_forward, vocabulary, 1, tied)
    else:
        _, width, _, vocabulary = _PRESETS[1 if mixture.slice_bytes < 2 << 20 else 2]
        units = max(1, round(mixture.slice_bytes / bytes_per_value / width / _ROW)) * _ROW
        shape = Shape(width, units, vocabulary, 1, tied, mixture.experts, mixture.used)
    fixed = shape.width * shape.vocabulary * (1 if tied else 2)
    per_layer = sum(weight.values for weight in shape.layer_weights(0))
    return replace(shape, layers=layers or max(1, math.floor((values - fixed) / per_layer + 0.5)))


def split_by_size(sizes: list[int], parts: int) -> list[list[int]]:
    """The indices of `sizes` in `parts` consecutive groups of about the same sum, none empty."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):
        group = min(parts - 1, (before + size // 2) * parts // total)
        # Never skip a group, and leave an item for each group that is still to come.
        first_free = next((g for g, members in enumerate(groups) if not members), parts - 1)
        remaining = len(sizes) - index
        group = max(min(group, first_free), parts - remaining)
        groups[group].append(index)
        before += size
    return groups
