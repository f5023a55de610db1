"""Which extents leave the page cache when room is needed. Pure decisions on the state, taken with its lock held.

In this order: single pages beyond their reserve, what was read once and does not loop, what a loop's readers have left
behind (oldest touch first), what was fetched ahead of a reader that never came, and last the reserves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmcache.cache.arbitration import HOT_SHARE, ROWS_RESERVE_BYTES
from llmcache.fs.group import LOADING, PINNED, Group

if TYPE_CHECKING:
    from llmcache.fs.state import CacheState

LAG_NS = 3_000_000  # a reader's neighbours may still be in an extent touched less than this ago
ABANDONED_NS = 1_000_000_000  # a ready extent that nobody has touched for this long may go
BATCH_BYTES = 32 << 20

HEADROOM_EXTENTS = 3

Victim = tuple[Group, int, int, int, int]


def choose_victims(state: CacheState, now_ns: int) -> list[Victim]:
    """Returns (group, node id, offset, length, extent) to drop now; empty when there is room enough."""
    excess = excess_bytes(state)
    victims: list[Victim] = []
    chosen: set[tuple[str, int]] = set()
    for group, extent in _in_order(state, now_ns):
        if excess <= 0 or len(victims) * group.extent_bytes > BATCH_BYTES:
            break
        if (group.key, extent) in chosen or group.state(extent) in (LOADING, PINNED):
            continue
        member = group.member_of(extent)
        if member.node is None:
            continue
        chosen.add((group.key, extent))
        excess -= group.charge[extent]
        victims.append((group, member.node, group.offset_of(member, extent), group.length_of(member, extent), extent))
    return victims


def excess_bytes(state: CacheState) -> int:
    """Bytes that have to go: what is over the limit, plus some headroom when loaders or a warm-up have work waiting."""
    loops = [group.extent_bytes for group in state.groups.values() if group.cursors.live]
    extent = max(loops, default=0)
    headroom = max(HEADROOM_EXTENTS * extent, state.asked_bytes)
    return state.used_bytes + min(headroom, max(state.limit_bytes // 8, extent, state.asked_bytes)) - state.room_bytes


def _in_order(state: CacheState, now_ns: int) -> Iterator[tuple[Group, int]]:
    groups = sorted(state.groups.values(), key=lambda group: (state.opens_of(group) > 0, group.last_ns))
    yield from _rows(groups, ROWS_RESERVE_BYTES)
    for group in groups:
        if not group.looping:
            yield from _touched(group, now_ns)
    yield from _rows([group for group in groups if group.written], 0)
    for group in groups:
        if group.looping:
            yield from _touched(group, now_ns)
    for group in groups:
        yield from ((group, extent) for extent, since in group.ready.items() if now_ns - since > ABANDONED_NS)
    yield from _hot(groups, state.limit_bytes // HOT_SHARE)
    yield from _rows(groups, 0)


def _touched(group: Group, now_ns: int) -> Iterator[tuple[Group, int]]:
    for extent, since in group.touched.items():
        if now_ns - since >= LAG_NS:
            yield group, extent


def _rows(groups: list[Group], reserve_bytes: int) -> Iterator[tuple[Group, int]]:
    """Single-page extents that are not hot, least recently read first, down to `reserve_bytes` a group.

    Those of written files count as read once, not as rows: they have no reserve and come after other groups' rows.
    """
    for group in groups:
        if group.written and reserve_bytes:
            continue
        rows = [extent for extent in group.strays if extent not in group.hot]
        over = sum(group.charge[extent] for extent in rows) - reserve_bytes
        for extent in rows:
            if over <= 0:
                break
            over -= group.charge[extent]
            yield group, extent


def _hot(groups: list[Group], reserve_bytes: int) -> Iterator[tuple[Group, int]]:
    """Hot extents beyond their share of the budget, least recently read first; idle files' before all others."""
    kept = sum(group.charge[extent] for group in groups for extent in group.hot)
    for group in groups:
        for extent in [extent for extent in group.strays if extent in group.hot]:
            if kept <= reserve_bytes:
                return
            kept -= group.charge[extent]
            yield group, extent
