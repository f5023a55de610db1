"""What plain LRU would have read, and whether steering reads less: the guard that mounts and the simulator share.

A `Shadow` is a ghost list: it has the keys that an LRU cache of the same size would hold, and no data. It is given every
touch that is observed, of what is resident and of what is not, and counts the bytes that such a cache would have read.

A `Guard` compares these bytes with those that steering reads, window by window (a pass over a loop, or a fixed number of
touches), and decides whether to steer. Both are pure: no I/O, no threads, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

STEADY = 6  # windows in a row with an excess are enough, however small it is
TOLERANCE = 0.05  # of what LRU reads: less is no excess
RECENT = 4  # windows that the figures for reports are averaged over, roughly
MOST_BACK_OFF = 6  # doublings of the evidence that is needed to steer again


class Shadow:
    """The keys that an exact LRU cache of `capacity_bytes` would hold, and the bytes that it would have read.

    A key is whatever is kept and evicted as one: an extent of a file, an expert, a page. All operations are O(1), evictions
    amortised. Memory: about 100 bytes for each key that fits.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_bytes = 0  # read by touches that missed, since the start
        self.resident_bytes = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()  # key -> bytes, least recently touched first

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether LRU would hold `key` now."""
        return key in self._sizes

    def touch(self, key: Hashable, size_bytes: int) -> bool:
        """Return whether LRU would have held `key`, whose touched part has `size_bytes`; LRU holds it from now on.

        A key that is touched with more bytes than before grows, and the difference counts as read.
        """
        known = self._sizes.pop(key, 0)
        size = max(known, size_bytes)
        self._sizes[key] = size
        if size > known:
            self.read_bytes += size - known
            self.resident_bytes += size - known
            self._trim()
        return known > 0

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; what no longer fits is evicted, least recently touched first."""
        self.capacity_bytes = capacity_bytes
        self._trim()

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop `keys`: their file was changed, closed or evicted, so that LRU would not hold them either."""
        for key in keys:
            self.resident_bytes -= self._sizes.pop(key, 0)

    def _trim(self) -> None:
        while self.resident_bytes > self.capacity_bytes and self._sizes:
            _, size = self._sizes.popitem(last=False)
            self.resident_bytes -= size


class Guard:
    """Whether to steer, by what steering and LRU read in each window.

    The excess of the one in force over the other is summed up and never falls below zero (a CUSUM test: E. S. Page,
    Continuous inspection schemes, Biometrika 41, 1954). When it reaches `bound_bytes`, the other one takes over. So
    steering never reads more than about `bound_bytes` beyond LRU before it is left, however small the excess of a window,
    and noise around zero changes nothing. Each time that steering is left again, twice as much is needed for its return;
    the back-off is undone, step by step, by as many bytes saved.

    A small excess that goes on for STEADY windows is enough as well, once it is more than TOLERANCE and `noise_bytes`.

    `bound_bytes`: what a change costs, about what has to be read again; half of the capacity serves well.
    """

    def __init__(self, bound_bytes: int, noise_bytes: int = 1 << 62, *, steering: bool = True) -> None:
        self.bound_bytes, self.noise_bytes = bound_bytes, noise_bytes
        self.steering = steering
        self.changes = 0
        self.steered_bytes = 0.0  # that steering reads in a window, or would read: mean of the recent ones
        self.lru_bytes = 0.0  # the same of LRU
        self._windows = 0
        self._excess = 0
        self._steady = 0  # windows in a row with an excess of steering
        self._saved = 0
        self._back_off = 0

    def judge(self, steered_bytes: int, lru_bytes: int) -> bool:
        """Return whether to steer in the next window; in the last one steering and LRU have read, or would have, so much."""
        self._windows = min(RECENT, self._windows + 1)
        self.steered_bytes += (steered_bytes - self.steered_bytes) / self._windows
        self.lru_bytes += (lru_bytes - self.lru_bytes) / self._windows
        excess = steered_bytes - lru_bytes if self.steering else lru_bytes - steered_bytes
        self._excess = max(0, self._excess + excess)
        needed = self.bound_bytes
        if self.steering:
            self._repay(-excess)
            self._steady = self._steady + 1 if excess > TOLERANCE * lru_bytes + self.noise_bytes else 0
        else:
            needed <<= self._back_off
        if self._excess >= max(1, needed) or (self.steering and self._steady >= STEADY):
            if self.steering:
                self._back_off = min(MOST_BACK_OFF, self._back_off + 1)
            self.steering = not self.steering
            self.changes += 1
            self._excess = self._saved = self._steady = 0
        return self.steering

    @property
    def has_judged(self) -> bool:
        """Return True once `steered_bytes` and `lru_bytes` are known."""
        return self._windows > 0

    def leave(self) -> None:
        """Stop steering at once: the caller knows that what was learned no longer holds."""
        if self.steering:
            self.steering = False
            self.changes += 1
            self._excess = self._saved = self._steady = 0

    def _repay(self, saved_bytes: int) -> None:
        """Undo a step of the back-off once steering has saved what its return took."""
        if not self._back_off:
            return
        self._saved = max(0, self._saved + saved_bytes)
        if self._saved >= self.bound_bytes << self._back_off:
            self._saved = 0
            self._back_off -= 1
