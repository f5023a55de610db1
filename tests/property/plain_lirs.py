"""LIRS once more, with dictionaries and in the words of its paper: what the compiled one is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class PlainLirs:
    """LIRS with S bounded by twice the capacity.

    `as_libcachesim` adds what libCacheSim does besides: when a block is hit that is in Q but no longer in S, it also takes
    one block out of the LIR set, which has not become too large. With room for one HIR block only, that pushes the hit
    block itself out of Q, from where on it is counted nowhere; the next unknown block becomes LIR without proof.
    """

    def __init__(self, capacity: int, *, as_libcachesim: bool = False) -> None:
        self.capacity = capacity
        self.hir_limit = max(1, capacity // 100)
        self.lir_limit = capacity - self.hir_limit
        self.stack: OrderedDict[int, None] = OrderedDict()  # last: top
        self.queue: OrderedDict[int, None] = OrderedDict()
        self.gone: OrderedDict[int, None] = OrderedDict()
        self.lir: set[int] = set()
        self.as_libcachesim = as_libcachesim

    def hits(self, ids: Iterable[int]) -> int:
        """Returns how many of the references are hits."""
        return sum(self.get(block) for block in ids)

    def get(self, block: int) -> bool:
        """Returns whether `block` was resident."""
        known = block in self.stack
        hit = block in self.lir or block in self.queue or (known and block not in self.gone)
        if block in self.lir:
            self.stack.move_to_end(block)
        elif known:
            self._prove(block, hit)
        elif hit:
            self._hit_in_queue(block)
        else:
            self._meet(block)
        self._prune()
        while len(self.stack) > 2 * self.capacity and self.gone:
            del self.stack[self.gone.popitem(last=False)[0]]
        return hit

    def _prove(self, block: int, hit: bool) -> None:
        """Handles a block that is in S but not LIR: it becomes LIR."""
        self.stack.move_to_end(block)
        self.queue.pop(block, None)
        if not hit and len(self.lir) + len(self.queue) == self.capacity:
            self._evict()
        self.gone.pop(block, None)
        self.lir.add(block)
        if len(self.lir) > self.lir_limit:
            self._demote()

    def _hit_in_queue(self, block: int) -> None:
        self.queue.move_to_end(block)
        if self.as_libcachesim and len(self.lir) >= self.lir_limit:
            self._demote()
        self.stack[block] = None

    def _meet(self, block: int) -> None:
        if len(self.lir) < self.lir_limit:
            self.lir.add(block)
        else:
            if len(self.queue) >= self.hir_limit:
                self._evict()
            self.queue[block] = None
        self.stack[block] = None

    def _demote(self) -> None:
        bottom = next(iter(self.stack))
        del self.stack[bottom]
        self.lir.remove(bottom)
        if len(self.queue) >= self.hir_limit:
            self._evict()
        self.queue[bottom] = None
        self._prune()

    def _evict(self) -> None:
        block, _ = self.queue.popitem(last=False)
        if block in self.stack:
            self.gone[block] = None

    def _prune(self) -> None:
        while self.stack and next(iter(self.stack)) not in self.lir:
            self.gone.pop(self.stack.popitem(last=False)[0], None)
