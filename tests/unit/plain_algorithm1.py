"""Algorithm 1 once more, with dictionaries, every choice made by looking at all candidates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SEQ, LOOP, HOT = "SEQ", "LOOP", "HOT"


@dataclass(eq=False)
class Sequence:
    """A block sequence: its class, when it was made and when it got its class, the period of a LOOP."""

    kind: str
    made: int
    classified: int
    period: int = 0


class PlainAlgorithm1:
    """Access and Evict as printed, with the same answers to what is left open (G1-G7)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hot_limit = max(1, capacity // 10)  # G1
        self.sequence_of: dict[int, Sequence] = {}  # G3: never forgotten; G4: one sequence per block
        self.last: dict[int, int] = {}
        self.resident: set[int] = set()
        self.previous: int | None = None
        self.time = 0

    def hits(self, ids: Iterable[int]) -> int:
        """Returns how many of the references are hits."""
        return sum(self.get(block) for block in ids)

    def get(self, block: int) -> bool:
        """Returns whether `block` was resident."""
        self.time += 1
        self._classify(block)
        self.last[block] = self.time
        self.previous = block
        if block in self.resident:
            return True
        if len(self.resident) == self.capacity:
            self.resident.remove(self._victim())  # G7
        self.resident.add(block)
        return False

    def _classify(self, block: int) -> None:
        own = self.sequence_of.get(block)
        if self.previous is not None and self.previous == block - 1:
            joined = self.sequence_of[self.previous]
            self.sequence_of[block] = joined
            if joined.kind == HOT:
                joined.kind, joined.classified = SEQ, self.time
        elif own is None:
            self.sequence_of[block] = Sequence(HOT, self.time, self.time)
        elif own.kind != HOT:
            self.sequence_of[block] = Sequence(LOOP, self.time, self.time, self.time - self.last[block])  # G2

    def _victim(self) -> int:
        held: dict[str, list[int]] = {SEQ: [], LOOP: [], HOT: []}
        for block in self.resident:
            held[self.sequence_of[block].kind].append(block)
        if held[SEQ]:
            return self._highest(
                held[SEQ], min((self.sequence_of[block] for block in held[SEQ]), key=lambda s: s.classified)
            )
        if len(held[HOT]) >= self.hot_limit or not held[LOOP]:  # G5
            return min(held[HOT], key=lambda block: self.last[block])
        longest = max((self.sequence_of[block] for block in held[LOOP]), key=lambda s: (s.period, -s.made))  # G6
        return self._highest(held[LOOP], longest)

    def _highest(self, blocks: list[int], sequence: Sequence) -> int:
        return max(block for block in blocks if self.sequence_of[block] is sequence)
