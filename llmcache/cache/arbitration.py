"""Arbitration: who gets how much of one budget, and which places of a loop are pinned.

Loops are served shorter period first, then progressively longer ones (Source: io_caching section 4, cache allocation):
a byte pinned in a loop saves one read per period. A loop that is not pinned whole is streamed through a window.
Pins are *spread* over the loop, so that storage is busy all the time; pinning a prefix would leave it idle there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MIN_WINDOW_BYTES = 8 << 20
MAX_WINDOW_BYTES = 128 << 20
DELAY_S = 0.01  # from a touch to the read that it asks for, where all processors are busy: storage is to have work meanwhile
# In place: less has readers come to what nobody has begun to read, of which the kernel then brings a part in small pages.
LEAST_WINDOW_MIN_BYTES, LEAST_WINDOW_MAX_BYTES = 16 << 20, 96 << 20
CONVOY_FACTOR = 4  # several readers need more behind the first one, or the others fall out of its window
# What windows may hold beside the budget: part of the 64 MiB that a mount takes beyond it. In place no daemon has buffers.
WINDOW_ALLOWANCE_BYTES, INPLACE_ALLOWANCE_BYTES = 12 << 20, 32 << 20
EXPERTS_ALLOWANCE_BYTES = 12 << 20  # the same, of experts in steer: a mount with them took 41 MiB of the 64 (measured)
HOT_SHARE = 16  # hot pages may keep a sixteenth of the budget
ROWS_RESERVE_BYTES = 2 << 20  # single rows of tables, read at random
WINDOW_SHARE = 0.06  # of the streamed bytes: bytes per pass are N - pins, so the window is what S loses


@dataclass(frozen=True)
class Loop:
    """A loop that wants budget: `size_bytes`, `period` (None: not seen yet), and whether its readers are active.

    Periods of all loops are in one unit, whichever: time, or references. `convoy` tells how far several readers drift
    apart: 0 for one reader, then in steps of CONVOY_FACTOR in the window. `first`: the user wants it before all others.
    `least_window`: bytes through which it streams well, if there is room.
    """

    key: Hashable
    size_bytes: int
    period: int | None
    active: bool
    convoy: int = 0
    first: bool = False
    least_window: int = MIN_WINDOW_BYTES


@dataclass(frozen=True)
class Share:
    """What a loop gets: bytes to pin and bytes of window for the streamed rest (0 when it is pinned whole)."""

    pinned_bytes: int
    window_bytes: int


@dataclass(frozen=True)
class Settled:
    """A loop's plan in extents: `extents` that may be pinned, `pinned` of them wanted, `unpinned` no longer."""

    extents: int
    pinned: int
    unpinned: list[int]


def window_for(size_bytes: int, budget_bytes: int, convoy: int, least_bytes: int) -> int:
    """Returns the window (bytes, `least_bytes` or more) of a loop of `size_bytes` streamed through `budget_bytes`."""
    streamed = max(0, size_bytes - budget_bytes)
    wanted = min(MAX_WINDOW_BYTES, max(least_bytes, int(WINDOW_SHARE * streamed)))
    if convoy:
        wanted = max(wanted, min(wanted * CONVOY_FACTOR**convoy, budget_bytes // 8 * convoy))
    return min(wanted, max(1, budget_bytes // 2))


def least_window(bytes_per_s: float) -> int:
    """Returns the window (bytes) through which a mount in place streams, so that storage of that speed never waits."""
    return min(LEAST_WINDOW_MAX_BYTES, max(LEAST_WINDOW_MIN_BYTES, int(2 * DELAY_S * bytes_per_s)))


def share_budget(budget_bytes: int, loops: Iterable[Loop]) -> dict[Hashable, Share]:
    """Divides `budget_bytes`: active loops before idle ones, shorter period first, unseen periods after seen ones.

    Those that the user wants first come before all others.
    """
    endless = 1 << 62
    ranked = sorted(loops, key=lambda loop: (not loop.first, not loop.active, loop.period or endless, loop.size_bytes))
    shares: dict[Hashable, Share] = {}
    left, least = budget_bytes, min(MIN_WINDOW_BYTES, budget_bytes // 4)
    for index, loop in enumerate(ranked):
        # Everyone behind who is active and cannot be pinned whole still needs a window to stream through.
        behind = sum(min(other.size_bytes, least) for other in ranked[index + 1 :] if other.active)
        mine = max(0, left - min(behind, left // 2))
        if loop.size_bytes <= mine:
            share = Share(loop.size_bytes, 0)
        else:
            window = window_for(loop.size_bytes, mine, loop.convoy, loop.least_window) if loop.active else 0
            share = Share(max(0, mine - window), window)
        shares[loop.key] = share
        left -= share.pinned_bytes + share.window_bytes
    return shares


def cap_pins(shares: dict[Hashable, Share], most_bytes: int) -> dict[Hashable, Share]:
    """Returns `shares` (in the order of their claims) with pins, not windows, cut to `most_bytes` in all."""
    capped: dict[Hashable, Share] = {}
    left = most_bytes
    for key, share in shares.items():
        capped[key] = Share(min(share.pinned_bytes, left), share.window_bytes)
        left -= capped[key].pinned_bytes
    return capped


def reserve_bytes(limit_bytes: int, hot_bytes: int, has_rows: bool) -> int:
    """Returns what is kept from loops: for `hot_bytes` that were really read, and for rows where there are any."""
    rows = ROWS_RESERVE_BYTES if has_rows else 0
    return min(hot_bytes, limit_bytes // HOT_SHARE) + min(rows, limit_bytes // 32)


def spread(places: Sequence[int], count: int) -> list[int]:
    """Returns `count` of `places`, spaced as evenly as whole steps allow (Bresenham)."""
    total = len(places)
    if count >= total:
        return list(places)
    return [places[(index * total + total // 2) // count] for index in range(count)] if count > 0 else []


def settle(order: Sequence[int], wanted: bytearray, pinned_bytes: int, extent_bytes: int, whole: bool) -> Settled:
    """Changes the marks in `wanted` (by extent) so that as many extents of `order` are wanted as `pinned_bytes` hold.

    Only the difference changes, spread over the loop: pins that stay are not read again. `whole`: all of them, whatever
    they hold (the last extent of a file may be short).
    """
    count = len(order) if whole else min(len(order), pinned_bytes // extent_bytes)
    held = [extent for extent in order if wanted[extent]]
    for extent in spread([extent for extent in order if not wanted[extent]], count - len(held)):
        wanted[extent] = 1
    unpinned = spread(held, len(held) - count)
    for extent in unpinned:
        wanted[extent] = 0
    return Settled(len(order), count, unpinned)
