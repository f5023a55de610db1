"""Cursors: where each reader is in a visiting order of `count` ranks.

Readers that stay within `reach` ranks of each other (the threads of one model run, readers in convoy) share a cursor.
A touch within reach ahead moves the cursor, one within reach behind leaves it, anything else starts a new one.

A reader that falls out of what is kept behind a cursor shows by its misses. One late touch is no reader (threads finish
in any order), so a miss behind a cursor only makes a *suspect*; one that goes on step by step becomes a cursor of its
own. Cursors that come within `near` ranks of the one ahead (what is kept behind a reader) are one convoy again.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CURSORS = 64
CURSOR_LIFE_NS = 5_000_000_000  # a reader that has not been seen for this long has gone
MAX_SUSPECTS = 16
PROOF_MOVES = 4  # steps that make a suspect a reader


@dataclass
class Cursor:
    """One sequential position: furthest rank touched, number of forward moves, time of the last touch (ns)."""

    head: int
    moves: int
    last_ns: int


class CursorTable:
    """The live cursors of one file, newest touch last."""

    def __init__(self, count: int, reach: int, loops: bool) -> None:
        self.count = count
        self.reach = max(1, min(reach, max(1, count // 3)))
        self.near = self.reach
        self.step = 4  # ranks that a reader advances at most from one miss to the next
        self.loops = loops
        self.live: list[Cursor] = []
        self.suspects: list[Cursor] = []
        self.strays = 0  # readers that fell out of a convoy, since `reset`

    def distance(self, start: int, end: int) -> int:
        """Ranks forward from `start` to `end`; on a file that does not loop a backward distance is `count`."""
        if self.loops:
            return (end - start) % self.count
        return end - start if end >= start else self.count

    def note(self, rank: int, now_ns: int, missed: bool = False) -> Cursor:
        """Returns the cursor that the touch of `rank` belongs to, moved there; `missed`: the extent was absent."""
        best = self._nearest(rank)
        if best is not None and missed and self.distance(best.head, rank) > self.reach:
            best = self._suspect(rank, now_ns) or best
        if best is None:
            best = Cursor(rank, 0, now_ns)
            self.live.append(best)
            if len(self.live) > MAX_CURSORS:
                self.live.remove(min(self.live, key=lambda cursor: cursor.last_ns))
        elif 0 < self.distance(best.head, rank) <= self.reach:
            best.head = rank
            best.moves += 1
            self._merge(best)
        best.last_ns = now_ns
        return best

    def _nearest(self, rank: int) -> Cursor | None:
        best: Cursor | None = None
        best_step = self.reach + 1
        for cursor in self.live:
            ahead = self.distance(cursor.head, rank)
            step = ahead if ahead <= self.reach else self.distance(rank, cursor.head)
            if step < best_step:
                best, best_step = cursor, step
        return best

    def _suspect(self, rank: int, now_ns: int) -> Cursor | None:
        """Notes a miss behind a cursor; returns the new cursor once it has proved to be a reader's."""
        for suspect in self.suspects:
            if 0 < self.distance(suspect.head, rank) <= self.step:
                suspect.head, suspect.last_ns = rank, now_ns
                suspect.moves += 1
                if suspect.moves < PROOF_MOVES:
                    return None
                self.suspects.remove(suspect)
                self.live.append(suspect)
                self.strays += 1
                return suspect
        self.suspects.append(Cursor(rank, 0, now_ns))
        del self.suspects[:-MAX_SUSPECTS]
        return None

    def reset(self) -> None:
        """Forgets everything: the ranks have a new meaning."""
        self.live.clear()
        self.suspects.clear()
        self.strays = 0

    def _merge(self, moved: Cursor) -> None:
        """Ends cursors close behind `moved`, and `moved` itself if it came close behind another."""
        for other in [cursor for cursor in self.live if cursor is not moved]:
            if self.distance(other.head, moved.head) <= self.near:
                self.live.remove(other)
            elif self.distance(moved.head, other.head) <= self.near:
                moved.head = other.head
                self.live.remove(other)

    def trailing_first(self) -> list[Cursor]:
        """The cursors from the last of the convoy to its leader, who has the longest way to the next one ahead.

        Serving them in this order brings readers of one loop together: a convoy reads the loop once for all.
        """
        ring = sorted(self.live, key=lambda cursor: cursor.head)
        if len(ring) < 2 or not self.loops:
            return ring
        gaps = [self.distance(cursor.head, ring[(index + 1) % len(ring)].head) for index, cursor in enumerate(ring)]
        leader = gaps.index(max(gaps))
        return ring[leader + 1 :] + ring[: leader + 1]

    def moving(self, since_ns: int) -> int:
        """Returns how many cursors were touched since then, short-lived ones left out."""
        return sum(cursor.moves > PROOF_MOVES and cursor.last_ns >= since_ns for cursor in self.live)

    def expire(self, before_ns: int) -> None:
        """Forgets cursors that were last touched before `before_ns`."""
        self.live = [cursor for cursor in self.live if cursor.last_ns >= before_ns]
