"""What is kept of things that are used again and again, some more often than others: the experts of a mixture.

Each use counts 1 and fades with its age. Who has the least left leaves first: with an endless half-life that is the least
frequently used, with a short one the least recently. Source: LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001),
its `C(x)` with `F(x) = (1/2)^(lambda x)`; the clock counts uses, and lambda follows the room, so that one setting serves
rooms of a tenth and of half of the things.

Who was used last stays for a *window* of uses whatever its count: many of a token's experts are the next token's (Jiang et
al. 2024, "Mixtral of Experts", section 5), which a long half-life does not see. Source: the window of W-TinyLFU (Einziger et
al., ACM Transactions on Storage 13(4), 2017), in uses of a token, as they come again with the next one.

Which rule misses least depends on how fast popularities change, so it is found by a duel: of a sample of the keys each of
RULES keeps what it would, and the one that has missed clearly least of late decides. The first is as good as LRU, so that
the whole is hardly ever worse. Source: set dueling (Qureshi et al., ISCA 2007), by a sample of keys for one of sets.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

RULES = ((0.1, 0.0), (10.0, 0.0), (10.0, 1.25), (10.0, 2.0))
"""Half-life, in keys that are kept, and window, in uses of a token."""
_LEAST_HALF_LIFE = 8.0  # in uses, where few keys are kept
_FORGOTTEN = 64.0  # half-lives: what is left after so many is nothing
_FIRST = 2  # of RULES, until another has won
_BETTER = 0.9  # of the misses of the one that decides has another to have, to take its place: chance has a part in them
_SAMPLE = 4  # one key of so many
_ROUND = 8  # uses for each sampled key that is kept; the rounds before count half as much each


class Lrfu:
    """Keys that are kept, by the popularity and recency of all that were ever used.

    Values are kept as logarithms, shifted with the clock, so that they change with a use only: of two keys without one, the
    same leaves first, always. They only grow, so that the queue may have old ones, looked up when their turn comes.
    """

    def __init__(self, half_lives: float, window: int = 0) -> None:
        """`half_lives`: in keys that are kept; `window`: in uses."""
        self.half_lives = half_lives
        self._clock = 0.0  # in half-lives
        self._value: dict[int, float] = {}
        self._kept: set[int] = set()
        self._queue: list[tuple[float, int]] = []  # a heap of values that are no larger than they are by now
        self._queued: set[int] = set()  # all that are kept, and some that have left
        self._window = window
        self._recent: deque[int] = deque()  # the last uses, as many as the window has
        self._counts: dict[int, int] = {}  # of each key among them

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    @property
    def window(self) -> int:
        """Uses for which a key stays: who was used in the last so many leaves after all others."""
        return self._window

    @window.setter
    def window(self, uses: int) -> None:
        self._window = uses
        self._age()

    def use(self, key: int) -> None:
        """Counts one use, of a key that is kept or not."""
        self.skip(1)
        age = min(_FORGOTTEN, self._clock - self.value(key))  # in half-lives; negative of one that was used often
        self._value[key] = self._clock - age + math.log2(1 + 2**age)  # log2(2**value + 2**clock)
        if self._window:
            self._recent.append(key)
            self._counts[key] = self._counts.get(key, 0) + 1
            self._age()

    def skip(self, uses: float) -> None:
        """So many uses were not seen: what was seen is older by them."""
        self._clock += uses / max(_LEAST_HALF_LIFE, self.half_lives * len(self._kept))  # in half-lives

    def _age(self) -> None:
        while len(self._recent) > self._window:
            key = self._recent.popleft()
            if self._counts[key] == 1:
                del self._counts[key]
            else:
                self._counts[key] -= 1

    def value(self, key: int) -> float:
        """What is left of the uses of `key`, as a logarithm; minus infinity without any."""
        return self._value.get(key, -math.inf)

    def keep(self, key: int) -> None:
        """`key` is kept from now on; without a use of it it leaves before all others."""
        self._kept.add(key)
        if key not in self._queued:
            self._push(key)

    def drop(self, key: int) -> None:
        """`key` is not kept any more."""
        self._kept.discard(key)

    def least(self, spared: Callable[[int], bool] = lambda _: False) -> int | None:
        """The key that should leave first, of those that are not `spared` if there are any; None if nothing is kept."""
        taken: list[int] = []
        best: tuple[bool, bool] | None = None
        found: int | None = None
        for key in self._take():
            taken.append(key)
            rank = spared(key), key in self._counts
            if best is None or rank < best:
                best, found = rank, key
            if best == (False, False):
                break
        for key in taken:
            self._push(key)
        return found

    def coldest(self, count: int) -> list[int]:
        """The `count` keys that should leave first, in that order."""
        return heapq.nsmallest(count, self._kept, key=lambda key: (key in self._counts, self.value(key), key))

    def _take(self) -> Iterator[int]:
        """Takes keys out of the queue, the least value first; they have to be pushed again."""
        while self._queue:
            value, key = heapq.heappop(self._queue)
            if key not in self._kept:
                self._queued.discard(key)
            elif value < self.value(key):
                self._push(key)
            else:
                yield key

    def forget(self, keys: range) -> None:
        """Forgets keys altogether: they stand for nothing any more."""
        self._recent = deque(key for key in self._recent if key not in keys)
        self._queue = [entry for entry in self._queue if entry[1] not in keys]
        heapq.heapify(self._queue)
        self._queued.difference_update(keys)
        for key in keys:
            self._kept.discard(key)
            self._value.pop(key, None)
            self._counts.pop(key, None)

    def _push(self, key: int) -> None:
        heapq.heappush(self._queue, (self.value(key), key))
        self._queued.add(key)


class HotSet(Lrfu):
    """The same by the rule that misses least."""

    def __init__(self) -> None:
        super().__init__(RULES[_FIRST][0])
        self._rivals = [Lrfu(half_lives) for half_lives, _ in RULES]
        self._misses = [0.0] * len(RULES)
        self._first = _FIRST
        self._uses = 0
        self._token_uses = 0

    @property
    def token_uses(self) -> int:
        """How many uses a token makes, of all keys; 0 (no window) where that is not known."""
        return self._token_uses

    @token_uses.setter
    def token_uses(self, uses: int) -> None:
        self._token_uses = uses
        self._follow(self._first)
        for rival, (_, tokens) in zip(self._rivals, RULES, strict=True):
            rival.window = int(tokens * uses / _SAMPLE)

    def _follow(self, number: int) -> None:
        """One of RULES decides from now on."""
        self._first = number
        self.half_lives, tokens = RULES[number]
        self.window = int(tokens * self._token_uses)

    def use(self, key: int) -> None:
        """Counts one use, of a key that is kept or not."""
        super().use(key)
        if key * 0x9E3779B1 % 2**32 // 2**16 % _SAMPLE:
            return
        room = max(1, len(self._kept) // _SAMPLE)
        for number, rival in enumerate(self._rivals):
            self._misses[number] += key not in rival
            rival.use(key)
            rival.keep(key)
            while len(rival) > room and (victim := rival.least()) is not None:
                rival.drop(victim)
        self._uses += 1
        if self._uses >= _ROUND * room:
            best = min(range(len(RULES)), key=self._misses.__getitem__)
            if self._misses[best] < _BETTER * self._misses[self._first]:
                self._follow(best)
            self._misses = [misses / 2 for misses in self._misses]
            self._uses = 0

    def skip(self, uses: float) -> None:
        """So many uses were not seen."""
        super().skip(uses)
        for rival in self._rivals:
            rival.skip(uses / _SAMPLE)

    def forget(self, keys: range) -> None:
        """Forgets keys altogether: they stand for nothing any more."""
        super().forget(keys)
        for rival in self._rivals:
            rival.forget(keys)
