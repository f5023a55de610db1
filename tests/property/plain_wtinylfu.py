"""W-TinyLFU once more, with dictionaries: what the compiled one is compared with. Both ask the same sketch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from llmcache.cache.policies.structures import estimate, new_sketch, note


class PlainWTinyLFU:
    """A window of 1 %, then probation and protected (80 % of the rest); last in each: used most recently."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.window_limit = max(1, capacity // 100)
        self.protected_limit = (capacity - self.window_limit) * 4 // 5
        self.sketch = new_sketch(capacity)
        self.window: OrderedDict[int, None] = OrderedDict()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()

    def hits(self, ids: Iterable[int]) -> int:
        """Returns how many of the references are hits."""
        return sum(self.get(block) for block in ids)

    def get(self, block: int) -> bool:
        """Returns whether `block` was resident."""
        note(self.sketch, block)
        for used in (self.window, self.protected):
            if block in used:
                used.move_to_end(block)
                return True
        if block in self.probation:
            del self.probation[block]
            self.protected[block] = None
            if len(self.protected) > self.protected_limit:
                self.probation[self.protected.popitem(last=False)[0]] = None
            return True
        self.window[block] = None
        if len(self.window) > self.window_limit:
            self._admit(self.window.popitem(last=False)[0])
        return False

    def _admit(self, candidate: int) -> None:
        rest = self.capacity - self.window_limit
        if len(self.probation) + len(self.protected) == rest:
            if not self.probation:
                return
            victim = next(iter(self.probation))
            if self._count(candidate) <= self._count(victim):
                return
            del self.probation[victim]
        self.probation[candidate] = None

    def _count(self, block: int) -> int:
        return estimate(self.sketch, block)
