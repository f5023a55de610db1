"""Doubly linked lists over dense ids, without any allocation while a trace is replayed.

All lists of a policy share one array `links[blocks + lists, 2]`: row `b` holds the two neighbours of block b, and the
rows from `blocks` on are the lists' heads. Each list is a ring through its head, so that no operation has a special case
at the ends. A block that is in no list has `links[b, NEXT] == NONE`: for LRU that is the whole state, 8 bytes per block.
Both links of a block lie side by side because whoever reads one writes the other; ascending ids are neighbours in memory,
so a sequential run costs one cache line per eight blocks.

A block is in at most one list of an array: remove it before pushing it elsewhere. Nothing is checked, for speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import subroutine

Links = NDArray[Any]
"""int32[n, 2], or int64[n, 2] where ids do not fit: columns PREV and NEXT."""

PREV = 0
"""Column of the neighbour nearer to the front."""
NEXT = 1
"""Column of the neighbour nearer to the back."""
NONE = -1
"""The link of a block that is in no list."""


def new_links(blocks: int, lists: int) -> Links:
    """Returns links of `blocks` blocks in no list and of `lists` empty lists, whose heads are blocks, blocks + 1, …"""
    rows = blocks + lists
    links = np.full((rows, 2), NONE, np.int32 if rows <= np.iinfo(np.int32).max else np.int64)
    links[blocks:] = np.arange(blocks, rows)[:, None]
    return links


@subroutine
def is_linked(links: Links, block: int) -> bool:
    """Returns whether `block` is in any list of `links`."""
    return bool(links[block, NEXT] != NONE)


@subroutine
def is_empty(links: Links, head: int) -> bool:
    """Returns whether the list of `head` is empty."""
    return bool(links[head, NEXT] == head)


@subroutine
def front(links: Links, head: int) -> int:
    """Returns the first block of a list, or `head` itself when the list is empty."""
    return int(links[head, NEXT])


@subroutine
def back(links: Links, head: int) -> int:
    """Returns the last block of a list, or `head` itself when the list is empty."""
    return int(links[head, PREV])


@subroutine
def insert_after(links: Links, place: int, block: int) -> None:
    """Puts `block`, which is in no list, behind `place`: a block in a list, or a head for the front."""
    follower = links[place, NEXT]
    links[block, PREV] = place
    links[block, NEXT] = follower
    links[follower, PREV] = block
    links[place, NEXT] = block


@subroutine
def push_front(links: Links, head: int, block: int) -> None:
    """Puts `block`, which is in no list, at the front."""
    insert_after(links, head, block)


@subroutine
def push_back(links: Links, head: int, block: int) -> None:
    """Puts `block`, which is in no list, at the back."""
    insert_after(links, int(links[head, PREV]), block)


@subroutine
def unhook(links: Links, block: int) -> None:
    """Takes `block` out of its list but leaves its own row stale: only for a push that follows at once."""
    before = links[block, PREV]
    behind = links[block, NEXT]
    links[before, NEXT] = behind
    links[behind, PREV] = before


@subroutine
def remove(links: Links, block: int) -> None:
    """Takes `block` out of its list."""
    unhook(links, block)
    links[block, NEXT] = NONE


@subroutine
def move_to_front(links: Links, head: int, block: int) -> None:
    """Moves `block` from wherever it is linked to the front of the list of `head`."""
    unhook(links, block)
    insert_after(links, head, block)


@subroutine
def pop_back(links: Links, head: int) -> int:
    """Takes the last block out of a list that is not empty, and returns it."""
    block = int(links[head, PREV])
    remove(links, block)
    return block


@subroutine
def pop_front(links: Links, head: int) -> int:
    """Takes the first block out of a list that is not empty, and returns it."""
    block = int(links[head, NEXT])
    remove(links, block)
    return block


def members(links: Links, head: int) -> NDArray[np.int64]:
    """Returns the ids in the list of `head`, front to back; for tests and small lists."""
    found = []
    block = int(links[head, NEXT])
    while block != head:
        found.append(block)
        block = int(links[block, NEXT])
    return np.array(found, np.int64)


def linked(links: Links, blocks: int) -> NDArray[np.int64]:
    """Returns the ids below `blocks` that are in any list of `links`, ascending."""
    return np.flatnonzero(links[:blocks, NEXT] != NONE).astype(np.int64, copy=False)
