"""Cursors: where each reader is in a visiting order of `count` ranks.

Readers that stay within `reach` ranks of each other (the threads of one model run, readers in convoy) share a cursor.
A touch within reach ahead moves the cursor, one within reach behind leaves it, anything else starts a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CURSORS = 64


@dataclass
class Cursor:
    """One sequential position: furthest rank touched, number of forward moves, time of the last touch (ns)."""

    head: int
    moves: int
    last_ns: int
    started_ns: int


class CursorTable:
    """The live cursors of one file, newest touch last."""

    def __init__(self, count: int, reach: int, loops: bool) -> None:
        self.count = count
        self.reach = max(1, min(reach, max(1, count // 3)))
        self.loops = loops
        self.live: list[Cursor] = []

    def distance(self, start: int, end: int) -> int:
        """Ranks forward from `start` to `end`; on a file that does not loop a backward distance is `count`."""
        if self.loops:
            return (end - start) % self.count
        return end - start if end >= start else self.count

    def note(self, rank: int, now_ns: int) -> Cursor:
        """Returns the cursor that the touch of `rank` belongs to, moved there."""
        best: Cursor | None = None
        best_step = self.reach + 1
        for cursor in self.live:
            ahead = self.distance(cursor.head, rank)
            step = ahead if ahead <= self.reach else self.distance(rank, cursor.head)
            if step < best_step:
                best, best_step = cursor, step
        if best is None:
            best = Cursor(rank, 0, now_ns, now_ns)
            self.live.append(best)
            if len(self.live) > MAX_CURSORS:
                self.live.remove(min(self.live, key=lambda cursor: cursor.last_ns))
        elif 0 < self.distance(best.head, rank) <= self.reach:
            best.head = rank
            best.moves += 1
        best.last_ns = now_ns
        return best

    def expire(self, before_ns: int) -> None:
        """Forgets cursors that were last touched before `before_ns`."""
        self.live = [cursor for cursor in self.live if cursor.last_ns >= before_ns]
