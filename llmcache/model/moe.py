"""Bytes that a token reads of an MoE model that is partly in memory. *Modelled*, for an assumed popularity.

A token reads all dense bytes and a few experts of each layer, so dense bytes are cached first. The rest of the memory
contains the most recently used experts, each whole (LRU; the mount's policy is within a few percent of it).

Popularity: w_i = i^-zipf in each layer (Zipf's law). An expert is used again by the next token with probability `stay`, and
the others are drawn by their w without replacement, each with probability q_i = 1 - exp(-w_i t), with t such that a token
uses the given number of experts (Rosén 1972, successive sampling). So an expert is used with probability p_i = q_i / (1 -
stay + stay q_i), and was unused by all of the last A tokens with probability (1 - p_i)(1 - q_i)^(A - 1). All others are in
memory; A, the *characteristic time* of LRU in tokens, is the same for all (Che, Tung and Wang 2002, "Hierarchical Web
Caching Systems: Modeling, Design and Experimental Results", IEEE JSAC 20(7)).

The page cache is LRU over dense bytes and experts alike, so it keeps nothing useful unless one token's reads fit.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

_AGE_STEP = 1.1  # between neighboring points of the curve
_WHOLE = 1e-4  # share of the used experts: at a lower miss ratio, the curve ends


ZIPF, STAY = 1.0, 0.15
"""Exponent of the popularities, and probability that the next token uses an expert again without a draw.

Assumed; with these values a token shares 31 to 34 % of its experts with the token before (published: 18 to 38 %).
"""

EXPERTS_USED = ("num_experts_per_tok", "experts_per_token")
"""Keys in a Hugging Face config.json for the number of experts of a layer that a token uses, without shared ones."""


@dataclass(frozen=True)
class ExpertCurve:
    """Miss curve of a layer: with the share `rooms[i]` of its experts in memory, `misses[i]` of the used ones miss.

    Linear between the points, an upper bound. Below rooms[0], the share that a token uses, all miss.
    """

    rooms: tuple[float, ...]
    misses: tuple[float, ...]

    def missed(self, room: float) -> float:
        if room < self.rooms[0]:
            return 1.0
        return _between(self.rooms, self.misses, room, bisect_right(self.rooms, room))

    def room(self, missed: float) -> float:
        if missed >= 1:
            return 0.0
        if missed >= self.misses[0]:
            return self.rooms[0]
        falling = tuple(-miss for miss in self.misses)
        return _between(falling, self.rooms, -missed, bisect_left(falling, -missed))


def _between(xs: tuple[float, ...], ys: tuple[float, ...], x: float, behind: int) -> float:
    if behind >= len(xs):
        return ys[-1]
    share = (x - xs[behind - 1]) / (xs[behind] - xs[behind - 1])
    return ys[behind - 1] + share * (ys[behind] - ys[behind - 1])


@functools.cache
def expert_curve(experts: int, used: int) -> ExpertCurve:
    """Return the miss curve of LRU over whole experts, for a layer of `experts` of which a token uses `used`."""
    chances = _chances(experts, used)
    rooms: list[float] = []
    misses: list[float] = []
    age = 1.0
    while not misses or misses[-1] > _WHOLE:
        unused = [(1 - use) * (1 - drawn) ** (age - 1) for drawn, use in chances]
        rooms.append(1 - math.fsum(unused) / experts)
        misses.append(math.fsum(rest * drawn for rest, (drawn, _) in zip(unused, chances, strict=True)) / used)
        age *= _AGE_STEP
    some = sum(room < 1 for room in rooms)  # none if a token uses all
    return ExpertCurve((*rooms[:some], 1.0), (*misses[:some], 0.0))


def _chances(experts: int, used: int) -> list[tuple[float, float]]:
    weights = [rank**-ZIPF for rank in range(1, experts + 1)]

    def at(time: float) -> list[tuple[float, float]]:
        drawn = [-math.expm1(-weight * time) for weight in weights]
        return [(q, q / (1 - STAY + STAY * q)) for q in drawn]

    def uses(time: float) -> float:
        return math.fsum(use for _, use in at(time))

    low, high = 0.0, 1.0
    while uses(high) < used:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if uses(middle) < used else (low, middle)
    return at(high)


@dataclass(frozen=True)
class MoeBytes:
    """Size of an MoE model: dense bytes, and the bytes of all experts, of which a token uses `used` per layer."""

    dense_bytes: int
    expert_bytes: int
    experts: int
    used: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes

    @property
    def used_bytes(self) -> int:
        return -(-self.expert_bytes * self.used // self.experts)

    @property
    def token_bytes(self) -> int:
        return self.dense_bytes + self.used_bytes

    def missed_expert_bytes(self, room_bytes: int) -> int:
        if room_bytes >= self.expert_bytes:
            return 0
        return math.ceil(self.used_bytes * expert_curve(self.experts, self.used).missed(room_bytes / self.expert_bytes))

    def missing_bytes(self, kept_bytes: int) -> int:
        """Return the expected bytes that a token misses with `kept_bytes` in memory, dense bytes first."""
        room_bytes = kept_bytes - self.dense_bytes
        return max(0, -room_bytes) + self.missed_expert_bytes(max(0, room_bytes))

    def expert_hit_ratio(self, kept_bytes: int) -> float:
        """Return the expected share of the bytes of used experts in memory."""
        return 1 - self.missed_expert_bytes(max(0, kept_bytes - self.dense_bytes)) / self.used_bytes

    def even_hit_ratio(self, kept_bytes: int) -> float:
        if self.dense_bytes + self.used_bytes > kept_bytes:
            return 0.0
        return min(1.0, (kept_bytes - self.dense_bytes) / self.expert_bytes)

    def even_missing_bytes(self, kept_bytes: int) -> int:
        return max(0, self.dense_bytes - kept_bytes) + math.ceil(self.used_bytes * (1 - self.even_hit_ratio(kept_bytes)))

    def kept_bytes(self, missing_bytes: int) -> int:
        if missing_bytes >= self.used_bytes:
            return max(0, self.token_bytes - missing_bytes)
        share = expert_curve(self.experts, self.used).room(missing_bytes / self.used_bytes)
        room_bytes = math.floor(share * self.expert_bytes)
        while self.missed_expert_bytes(room_bytes) > missing_bytes:  # floating-point rounding
            room_bytes += 1 + room_bytes // 2**40
        return self.dense_bytes + room_bytes

    def page_cache_kept_bytes(self, memory_bytes: int) -> int:
        """Return the useful part of `memory_bytes` of page cache: all, or 0 if one token's bytes do not fit."""
        return min(memory_bytes, self.total_bytes) if memory_bytes >= self.token_bytes else 0


Weights = int | MoeBytes
"""Bytes of a loop, or those of an MoE model."""


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of a model's files, in bytes, by how a decoder reads them.

    `loop_bytes` once per token (`sparse_bytes` of them belong to experts), `hot_bytes` often (headers, tokenizer and
    configuration), `row_bytes` by single rows (the token embedding). llama.cpp copies `repacked_bytes` of the loop by
    default.
    """

    path: str
    kind: str
    files: int
    loop_bytes: int
    hot_bytes: int
    row_bytes: int
    sparse_bytes: int
    experts: int | None = None
    used: int | None = None
    repacked_bytes: int = 0

    @property
    def loop(self) -> Weights:
        """Return all bytes that tokens read, an upper bound, if the number of used experts of an MoE model is unknown."""
        if self.experts is None or self.used is None:
            return self.loop_bytes
        return MoeBytes(self.loop_bytes - self.sparse_bytes, self.sparse_bytes, self.experts, self.used)
