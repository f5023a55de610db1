"""The plan: share one budget between loop spaces, and select the extents of each to pin.

Loops with shorter periods are served first, because a byte pinned in a loop saves one read per period (Source: io_caching
section 4, cache allocation). A loop that is not pinned whole is streamed through a window. Pins are *spread* over the loop,
because storage would be idle during a pinned prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from llmcache.cache.space import Space, SpacePlan
from llmcache.units import BLOCK_BYTES

MIN_WINDOW_BYTES = 8 << 20
MAX_WINDOW_BYTES = 128 << 20
DELAY_S = 0.01  # from a touch to the read that it triggers, with all CPUs busy: storage needs work in the meantime
# Mode inplace: with a smaller window, readers reach extents before their read has begun, and the kernel reads a part of
# them in small pages.
LEAST_WINDOW_MIN_BYTES, LEAST_WINDOW_MAX_BYTES = 16 << 20, 96 << 20
CONVOY_FACTOR = 4  # several readers need a larger window behind the first one, or the others fall out of it
# What windows may use beyond the budget: part of the 64 MiB of a mount. In mode inplace no daemon has buffers.
WINDOW_ALLOWANCE_BYTES, INPLACE_ALLOWANCE_BYTES = 12 << 20, 32 << 20
# the same for experts in mode steer: a mount with them used 41 MiB of the 64 MiB (measured)
EXPERTS_ALLOWANCE_BYTES = 12 << 20
HOT_SHARE = 16  # hot pages may use 1/HOT_SHARE of the budget
ROWS_RESERVE_BYTES = 2 << 20  # single rows of tables, read at random
WINDOW_SHARE = 0.06  # of the streamed bytes; the window takes memory from the pins, which save reads


@dataclass(frozen=True)
class Loop:
    """A loop that competes for the budget; `period` is None if not observed yet.

    All periods have the same unit: time, or references. Each step of `convoy` multiplies the window by CONVOY_FACTOR.
    """

    key: Hashable
    size_bytes: int
    period: int | None
    active: bool
    convoy: int = 0
    user_pinned: bool = False
    least_window: int = MIN_WINDOW_BYTES


@dataclass(frozen=True)
class Share:
    """The bytes of a loop to pin, and the bytes of window to stream the rest through."""

    pinned_bytes: int
    window_bytes: int


@dataclass(frozen=True)
class Limits:
    """The memory that a plan may use: `room_bytes` in all, of it at most `pins_bytes` for pins.

    `hot_bytes` of hot pages were read; `has_rows` is true if any extents are read by pages. Both have a reserve.
    """

    room_bytes: int
    pins_bytes: int
    hot_bytes: int = 0
    has_rows: bool = False
    least_window_bytes: int = MIN_WINDOW_BYTES


@dataclass(frozen=True)
class Plan:
    """The plan of all looping spaces, by key. `experts_bytes` remain for the experts of MoE models; negative for none."""

    spaces: Mapping[str, SpacePlan]
    reserve_bytes: int
    experts_bytes: int


def window_for(size_bytes: int, budget_bytes: int, convoy: int, least_bytes: int) -> int:
    """Return the window (bytes) of a loop of `size_bytes` streamed through `budget_bytes`."""
    streamed = max(0, size_bytes - budget_bytes)
    wanted = min(MAX_WINDOW_BYTES, max(least_bytes, int(WINDOW_SHARE * streamed)))
    if convoy:
        wanted = max(wanted, min(wanted * CONVOY_FACTOR**convoy, budget_bytes // 8 * convoy))
    return min(wanted, max(1, budget_bytes // 2))


def least_window(bytes_per_s: float) -> int:
    """Return the window (bytes) in mode inplace at which storage of this speed is never idle."""
    return min(LEAST_WINDOW_MAX_BYTES, max(LEAST_WINDOW_MIN_BYTES, int(2 * DELAY_S * bytes_per_s)))


def share_budget(budget_bytes: int, loops: Iterable[Loop]) -> dict[Hashable, Share]:
    """Divide the budget: loops pinned by the user first, then active ones, shorter periods first."""
    endless = 1 << 62
    ranked = sorted(loops, key=lambda loop: (not loop.user_pinned, not loop.active, loop.period or endless, loop.size_bytes))
    shares: dict[Hashable, Share] = {}
    left, least = budget_bytes, min(MIN_WINDOW_BYTES, budget_bytes // 4)
    # Each later active loop that cannot be pinned whole still needs a window to stream through.
    reserved = sum(min(loop.size_bytes, least) for loop in ranked if loop.active)
    for loop in ranked:
        reserved -= min(loop.size_bytes, least) if loop.active else 0
        mine = max(0, left - min(reserved, left // 2))
        if loop.size_bytes <= mine:
            share = Share(loop.size_bytes, 0)
        else:
            window = window_for(loop.size_bytes, mine, loop.convoy, loop.least_window) if loop.active else 0
            share = Share(max(0, mine - window), window)
        shares[loop.key] = share
        left -= share.pinned_bytes + share.window_bytes
    return shares


def cap_pins(shares: dict[Hashable, Share], most_bytes: int) -> dict[Hashable, Share]:
    """Return `shares` (in order of priority) with pins, not windows, cut to `most_bytes` in all."""
    capped: dict[Hashable, Share] = {}
    left = most_bytes
    for key, share in shares.items():
        capped[key] = Share(min(share.pinned_bytes, left), share.window_bytes)
        left -= capped[key].pinned_bytes
    return capped


def reserve_bytes(limit_bytes: int, hot_bytes: int, has_rows: bool) -> int:
    """Return the bytes reserved from loops for hot pages and rows."""
    rows = ROWS_RESERVE_BYTES if has_rows else 0
    return min(hot_bytes, limit_bytes // HOT_SHARE) + min(rows, limit_bytes // 32)


def spread(places: Sequence[int], count: int) -> list[int]:
    """Return `count` of `places`, spaced evenly (Bresenham)."""
    total = len(places)
    if count >= total:
        return list(places)
    return [places[(index * total + total // 2) // count] for index in range(count)] if count > 0 else []


def plan(spaces: Iterable[Space], competing: Mapping[str, bool], limits: Limits) -> Plan:
    """Return the plan for looping `spaces`.

    Spaces in `competing` share the budget (true: readers use the space); others keep no pins. In arena, unused extents stay
    pinned while there is room.
    """
    spaces = list(spaces)
    loops = [
        Loop(
            space.key,
            space.loop_bytes,
            space.learner.period,
            competing[space.key],
            space.convoy,
            space.user_pinned,
            limits.least_window_bytes,
        )
        for space in spaces
        if space.key in competing
    ]
    reserved = reserve_bytes(limits.room_bytes, limits.hot_bytes, limits.has_rows)
    budget = max(0, limits.room_bytes - reserved)
    # Windows may exceed the budget by an allowance; pins may not, and the kernel may lock less.
    shares = cap_pins(share_budget(budget, loops), limits.pins_bytes)
    pinned_bytes = sum(share.pinned_bytes for share in shares.values())
    spare = max(0, limits.pins_bytes - pinned_bytes)
    plans: dict[str, SpacePlan] = {}
    for space in spaces:
        plans[space.key], spare = _plan_of(space, shares.get(space.key, Share(0, 0)), spare)
    experts = budget - pinned_bytes - sum(share.window_bytes for share in shares.values())
    return Plan(plans, reserved, experts)


def _plan_of(space: Space, share: Share, spare: int) -> tuple[SpacePlan, int]:
    wanted, unused = space.wanted, space.learner.use.unused
    stale = _both(wanted, unused)
    unpin: list[int] = []
    for extent in stale:
        size_bytes = space.blocks(extent) * BLOCK_BYTES
        if extent in space.held and size_bytes <= spare:
            spare -= size_bytes
        else:
            unpin.append(extent)
    extents = space.count - space.single.count(1) - unused.count(1)
    loop_bytes = space.loop_bytes
    is_whole = bool(loop_bytes) and share.pinned_bytes >= loop_bytes  # the last extent of a file may be short
    count = extents if is_whole else min(extents, share.pinned_bytes // space.extent_bytes)
    more = count - (wanted.count(1) - len(stale))
    pin: list[int] = []
    if more:
        order = space.learner.order.extent_at
        in_loop = [extent for extent in order if not (space.single[extent] or unused[extent])]
        if more > 0:
            pin = spread([extent for extent in in_loop if not wanted[extent]], more)
        else:
            unpin += spread([extent for extent in in_loop if wanted[extent]], -more)
    return SpacePlan(share.pinned_bytes, share.window_bytes, pin, unpin, extents, count), spare


def _both(first: bytes | bytearray, second: bytes | bytearray) -> list[int]:
    if 1 not in second:
        return []
    both = int.from_bytes(first, "little") & int.from_bytes(second, "little")
    return list(compress(range(len(first)), both.to_bytes(len(first), "little"))) if both else []
