"""A guard that compares steering with plain LRU, shared by mounts and the simulator: no I/O, no threads, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

STEADY = 6  # this many successive windows with an excess are enough, however small it is
TOLERANCE = 0.05  # of the bytes that LRU reads: less is no excess
RECENT = 4  # windows that the reported means cover, approximately
MOST_BACK_OFF = 6  # doublings of the evidence required to steer again


class Shadow:
    """An LRU cache without data: the keys that it would contain, and the bytes that it would read.

    A key is a unit of eviction: an extent, an expert, a page. Operations are O(1); each key takes about 100 bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_bytes = 0  # read by touches that missed, since the start
        self.resident_bytes = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()  # key -> bytes, least recently touched first

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def touch(self, key: Hashable, size_bytes: int) -> bool:
        """Return whether LRU contained `key`, whose touched part has `size_bytes`. If it grows, the difference counts as
        read.
        """
        old_size = self._sizes.pop(key, 0)
        size = max(old_size, size_bytes)
        self._sizes[key] = size
        if size > old_size:
            self.read_bytes += size - old_size
            self.resident_bytes += size - old_size
            self._trim()
        return old_size > 0

    def resize(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._trim()

    def forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.resident_bytes -= self._sizes.pop(key, 0)

    def _trim(self) -> None:
        while self.resident_bytes > self.capacity_bytes and self._sizes:
            _, size = self._sizes.popitem(last=False)
            self.resident_bytes -= size


class Guard:
    """Decides whether to steer, from the bytes that steering and LRU read in each window.

    The other mode takes over when the summed excess of the mode in force, never below zero, reaches `bound_bytes` (a CUSUM
    test: E. S. Page, Continuous inspection schemes, Biometrika 41, 1954). So steering never reads more than about
    `bound_bytes` beyond LRU; half of the capacity works well. Each time that steering is disabled again, its return needs
    twice as much evidence, until steering has saved as many bytes. A small excess over STEADY successive windows is enough
    as well, if it exceeds TOLERANCE and `noise_bytes`.
    """

    def __init__(self, bound_bytes: int, noise_bytes: int = 1 << 62, *, steering: bool = True) -> None:
        self.bound_bytes, self.noise_bytes = bound_bytes, noise_bytes
        self.steering = steering
        self.changes = 0
        self.steered_bytes = 0.0  # bytes that steering reads or would read per window: mean of the recent windows
        self.lru_bytes = 0.0  # the same for LRU
        self._windows = 0
        self._excess = 0
        self._steady = 0  # windows in a row with an excess of steering
        self._saved = 0
        self._back_off = 0

    def judge(self, steered_bytes: int, lru_bytes: int) -> bool:
        """Return whether to steer in the next window, from the bytes read in the last one, actually or hypothetically."""
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
        return self._windows > 0

    def leave(self) -> None:
        """Stop steering at once, because the learned state no longer applies."""
        if self.steering:
            self.steering = False
            self.changes += 1
            self._excess = self._saved = self._steady = 0

    def _repay(self, saved_bytes: int) -> None:
        if not self._back_off:
            return
        self._saved = max(0, self._saved + saved_bytes)
        if self._saved >= self.bound_bytes << self._back_off:
            self._saved = 0
            self._back_off -= 1
