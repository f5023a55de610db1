"""A binary heap of (major, minor, item) rows, least first, whose items can be taken out from anywhere.

`rows[position]` is such a row; `at[item]` is the item's position, or NONE when it is not in the heap. The keys stand in
the heap itself and not beside the items: a comparison then reads memory it is about to move. The caller keeps the size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import subroutine

Rows = NDArray[np.int64]
Places = NDArray[np.int64]

MAJOR, MINOR, ITEM = 0, 1, 2
NONE = -1


def new_heap(capacity: int, items: int) -> tuple[Rows, Places]:
    """Returns rows[capacity, 3] and at[items] of an empty heap, for at most `capacity` of the items 0 .. `items` - 1."""
    return np.zeros((capacity, 3), np.int64), np.full(items, NONE, np.int64)


@subroutine
def push(rows: Rows, at: Places, size: int, major: int, minor: int, item: int) -> int:
    """Adds an item that is not in the heap; returns the new size."""
    _rise(rows, at, size, major, minor, item)
    return size + 1


@subroutine
def take_out(rows: Rows, at: Places, size: int, item: int) -> int:
    """Removes an item that is in the heap; returns the new size."""
    place = at[item]
    at[item] = NONE
    last = size - 1
    if place != last:
        _settle(rows, at, last, place, rows[last, MAJOR], rows[last, MINOR], rows[last, ITEM])
    return last


@subroutine
def grow(rows: Rows, at: Places, size: int, item: int, major: int) -> None:
    """Raises the major key of an item that is in the heap."""
    place = at[item]
    _sink(rows, at, size, place, major, rows[place, MINOR], item)


@subroutine
def _settle(rows: Rows, at: Places, size: int, place: int, major: int, minor: int, item: int) -> None:
    """Puts a row into the hole at `place`, or up or down from there."""
    above = (place - 1) // 2
    if place > 0 and not _before(rows, above, major, minor):
        _rise(rows, at, place, major, minor, item)
    else:
        _sink(rows, at, size, place, major, minor, item)


@subroutine
def _before(rows: Any, place: int, major: int, minor: int) -> bool:
    """Returns whether the row at `place` comes before (major, minor)."""
    if rows[place, MAJOR] != major:
        return bool(rows[place, MAJOR] < major)
    return bool(rows[place, MINOR] < minor)


@subroutine
def _rise(rows: Rows, at: Places, place: int, major: int, minor: int, item: int) -> None:
    while place > 0:
        above = (place - 1) // 2
        if _before(rows, above, major, minor):
            break
        _copy(rows, at, above, place)
        place = above
    _write(rows, at, place, major, minor, item)


@subroutine
def _sink(rows: Rows, at: Places, size: int, place: int, major: int, minor: int, item: int) -> None:
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _before(rows, below + 1, rows[below, MAJOR], rows[below, MINOR]):
            below += 1
        if not _before(rows, below, major, minor):
            break
        _copy(rows, at, below, place)
        place = below
    _write(rows, at, place, major, minor, item)


@subroutine
def _copy(rows: Rows, at: Places, source: int, target: int) -> None:
    _write(rows, at, target, rows[source, MAJOR], rows[source, MINOR], rows[source, ITEM])


@subroutine
def _write(rows: Rows, at: Places, place: int, major: int, minor: int, item: int) -> None:
    rows[place, MAJOR] = major
    rows[place, MINOR] = minor
    rows[place, ITEM] = item
    at[item] = place
