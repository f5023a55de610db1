"""What a token reads of a mixture of experts of which a part is in memory. *Modelled*, for an assumed popularity.

A token reads all that is dense and a few experts of each layer. A dense byte in memory saves a read per token, one of an
expert less, so the dense ones come first; behind them stay the experts that were used last, each whole (LRU: the mount's
own choice, by popularity and recency, is within some percent of it).

Popularity: w_i = i^-zipf in each layer (Zipf's law); an expert is used again by the next token with the chance `stay`, and
the others are drawn by their w without replacement, each with the chance q_i = 1 - exp(-w_i t), t such that a token uses as
many as it does (Rosén 1972, successive sampling). So an expert is used with p_i = q_i / (1 - stay + stay q_i), and was not
by any of the last A tokens with (1 - p_i)(1 - q_i)^(A - 1). The experts that were are those in memory, A the same for all:
the *characteristic time* of LRU (Che, Tung and Wang 2002, "Hierarchical Web Caching Systems: Modeling, Design and
Experimental Results", IEEE JSAC 20(7)), here in tokens and for uses that remember the one before.

The plain page cache is LRU as well, over dense bytes and experts alike: what is dense is used by each token, so it is kept
if A >= 1, that is if all that one token reads has room; else each byte leaves before its next use.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

_AGE_STEP = 1.1  # between neighbours of the curve
_WHOLE = 1e-4  # of the used experts: missed so seldom, all are as good as there


ZIPF, STAY = 1.0, 0.15
"""Exponent of the popularities, and the chance of an expert to be used by the next token without being drawn.

Assumed; with these values 31 to 34 % of the experts of a token are those of the one before (published: 18 to 38 %).
"""

EXPERTS_USED = ("num_experts_per_tok", "experts_per_token")
"""In a config.json of Hugging Face: how many of a layer's experts a token uses, shared ones not counted."""


@dataclass(frozen=True)
class ExpertCurve:
    """Of one layer: with the share `rooms[i]` of its experts in memory the share `misses[i]` of those used is missed.

    Chords between: the misses fall convexly, so that they lie above. Below rooms[0], what a token uses, all are missed.
    """

    rooms: tuple[float, ...]
    misses: tuple[float, ...]

    def missed(self, room: float) -> float:
        """The share that is missed with `room`."""
        if room < self.rooms[0]:
            return 1.0
        return _between(self.rooms, self.misses, room, bisect_right(self.rooms, room))

    def room(self, missed: float) -> float:
        """The least room with which no more than `missed` is."""
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
    """Returns what LRU of whole experts misses, of `experts` in a layer of which a token uses `used`."""
    chances = _chances(experts, used)
    rooms: list[float] = []
    misses: list[float] = []
    age = 1.0
    while not misses or misses[-1] > _WHOLE:
        unused = [(1 - use) * (1 - drawn) ** (age - 1) for drawn, use in chances]
        rooms.append(1 - math.fsum(unused) / experts)
        misses.append(math.fsum(rest * drawn for rest, (drawn, _) in zip(unused, chances, strict=True)) / used)
        age *= _AGE_STEP
    some = sum(room < 1 for room in rooms)  # none where a token uses all
    return ExpertCurve((*rooms[:some], 1.0), (*misses[:some], 0.0))


def _chances(experts: int, used: int) -> list[tuple[float, float]]:
    """(q, p) of each expert."""
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
class MixtureBytes:
    """A mixture's bytes: `dense_bytes` that each token reads, and `expert_bytes` of all experts.

    Of the `experts` of a layer a token uses `used`, 1 or more; the layers count as alike.
    """

    dense_bytes: int
    expert_bytes: int
    experts: int
    used: int

    @property
    def total_bytes(self) -> int:
        """All that some token reads."""
        return self.dense_bytes + self.expert_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the experts that a token uses."""
        return -(-self.expert_bytes * self.used // self.experts)

    @property
    def token_bytes(self) -> int:
        """All that one token reads."""
        return self.dense_bytes + self.used_bytes

    def missed_expert_bytes(self, room_bytes: int) -> int:
        """Bytes of used experts that a token finds missing, expected, where experts have `room_bytes`."""
        if room_bytes >= self.expert_bytes:
            return 0
        return math.ceil(self.used_bytes * expert_curve(self.experts, self.used).missed(room_bytes / self.expert_bytes))

    def missing_bytes(self, kept_bytes: int) -> int:
        """Bytes that a token finds missing, expected, with `kept_bytes` in memory, the dense ones first."""
        room_bytes = kept_bytes - self.dense_bytes
        return max(0, -room_bytes) + self.missed_expert_bytes(max(0, room_bytes))

    def expert_hit_ratio(self, kept_bytes: int) -> float:
        """Of the bytes of used experts, the share that a token finds there, expected, as for `missing_bytes`."""
        return 1 - self.missed_expert_bytes(max(0, kept_bytes - self.dense_bytes)) / self.used_bytes

    def even_hit_ratio(self, kept_bytes: int) -> float:
        """The hit ratio if each expert of a layer is used equally often: the share of experts in memory."""
        if self.dense_bytes + self.used_bytes > kept_bytes:
            return 0.0
        return min(1.0, (kept_bytes - self.dense_bytes) / self.expert_bytes)

    def even_missing_bytes(self, kept_bytes: int) -> int:
        """Bytes that a token finds missing, expected, if each expert of a layer is used equally often."""
        return max(0, self.dense_bytes - kept_bytes) + math.ceil(self.used_bytes * (1 - self.even_hit_ratio(kept_bytes)))

    def kept_bytes(self, missing_bytes: int) -> int:
        """The least bytes in memory with which a token finds no more than `missing_bytes` missing, expected."""
        if missing_bytes >= self.used_bytes:
            return max(0, self.token_bytes - missing_bytes)
        share = expert_curve(self.experts, self.used).room(missing_bytes / self.used_bytes)
        room_bytes = math.floor(share * self.expert_bytes)
        while self.missed_expert_bytes(room_bytes) > missing_bytes:  # the last bits of floats
            room_bytes += 1 + room_bytes // 2**40
        return self.dense_bytes + room_bytes

    def page_cache_kept_bytes(self, memory_bytes: int) -> int:
        """What of `memory_bytes` the page cache makes use of: all, or nothing where it has no room for one token's bytes."""
        return min(memory_bytes, self.total_bytes) if memory_bytes >= self.token_bytes else 0
