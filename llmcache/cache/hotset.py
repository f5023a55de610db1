"""Cache replacement for keys with different popularities: the experts of an MoE model.

Each use counts 1 and decays with its age; the key with the lowest sum is evicted first. Source: LRFU (Lee et al., IEEE
Transactions on Computers 50(12), 2001), its `C(x)` with `F(x) = (1/2)^(lambda x)`. The clock counts uses, and lambda follows
the capacity, so that one setting fits caches of all sizes.

Keys used in the last *window* of uses are evicted last, because many experts of a token are used by the next one too (Jiang
et al. 2024, "Mixtral of Experts", section 5). Source: the window of W-TinyLFU (Einziger et al., ACM Transactions on Storage
13(4), 2017), in multiples of the uses of a token.

Each of RULES runs on a sample of the keys, and the one with clearly the fewest recent misses takes over. The first rule is
as good as LRU. Source: set dueling (Qureshi et al., ISCA 2007), with a sample of keys instead of sets.

When a token misses many more keys than usual, past uses lose most of their value. Without this, the first tokens after a
change of topic miss up to 30 % more than with LRU. A key that has not been used for several times its usual interval counts
as used once, for example an expert that the engine has moved to a GPU.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

RULES = ((0.1, 0.0), (10.0, 0.0), (10.0, 1.25), (10.0, 2.0))
"""Half-life, in multiples of the cached keys, and window, in multiples of the uses of a token."""
_LEAST_HALF_LIFE = 8.0  # in uses, if few keys are cached
_FORGOTTEN = 64.0  # half-lives after which a use is negligible
_FIRST = 2  # index into RULES of the initial rule
_BETTER = 0.9  # a rule takes over with fewer misses than this share of those of the current rule: the rest may be chance
_SAMPLE = 4  # one key in _SAMPLE
_RISE = 1.3  # a token with more misses than _RISE times the usual number, and than chance explains, begins a new topic
_USUAL_TOKENS = 16  # over which the usual number is averaged
_TOPIC_TOKENS = 4  # at least, from one change of topic to the next
_AGED = 5.0  # half-lives by which past uses age at a change of topic
_ROUND = 8  # uses per sampled key in the cache; earlier rounds count half as much each
_UNUSED = 6.0  # a key is retired after this multiple of its mean interval; by chance, one interval in exp(6) is as long


class Lrfu:
    """A set of cached keys, ranked by popularity and recency of all uses, also of keys that are not cached.

    Values are logarithms relative to the clock, so that two unused keys keep their order.
    """

    def __init__(self, half_lives: float, window: int = 0) -> None:
        """`half_lives`: in multiples of the cached keys; `window`: in uses."""
        self.half_lives = half_lives
        self._clock = 0.0  # in half-lives
        self._value: dict[int, float] = {}
        self._kept: set[int] = set()
        self._queue: list[tuple[float, int]] = []  # a heap of values; each key has one that is not above the current value
        self._queued: set[int] = set()  # all cached keys, and some evicted ones
        self._window = window
        self._recent: deque[int] = deque()  # the last uses, as many as the window has
        self._counts: dict[int, int] = {}  # of each key among them

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    @property
    def window(self) -> int:
        return self._window

    @window.setter
    def window(self, uses: int) -> None:
        self._window = uses
        self._trim()

    def use(self, key: int) -> None:
        self.skip(1)
        age = min(_FORGOTTEN, self._clock - self.value(key))  # in half-lives; negative for a key that was used often
        self._value[key] = self._clock - age + math.log2(1 + 2**age)  # log2(2**value + 2**clock)
        if self._window:
            self._recent.append(key)
            self._counts[key] = self._counts.get(key, 0) + 1
            self._trim()

    def skip(self, uses: float) -> None:
        """Advance the clock by `uses` that were not observed."""
        self.age(uses / max(_LEAST_HALF_LIFE, self.half_lives * len(self._kept)))

    def age(self, half_lives: float) -> None:
        self._clock += half_lives

    def _trim(self) -> None:
        while len(self._recent) > self._window:
            key = self._recent.popleft()
            if self._counts[key] == 1:
                del self._counts[key]
            else:
                self._counts[key] -= 1

    def value(self, key: int) -> float:
        return self._value.get(key, -math.inf)

    def keep(self, key: int) -> None:
        """Add `key` to the cache; until its first use it is evicted before all others."""
        self._kept.add(key)
        if key not in self._queued:
            self._push(key)

    def drop(self, key: int) -> None:
        self._kept.discard(key)

    def least(self, spared: Callable[[int], bool] = lambda _: False) -> int | None:
        """Return the key to evict first, preferably one that is not `spared`; None if the cache is empty."""
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
        return heapq.nsmallest(count, self._kept, key=lambda key: (key in self._counts, self.value(key), key))

    def _take(self) -> Iterator[int]:
        """Yield keys from the queue, lowest value first; the caller has to push them again."""
        while self._queue:
            value, key = heapq.heappop(self._queue)
            if self._queue and self._queue[0] == (value, key):
                continue  # a key that was retired and then used again has two equal entries
            if key not in self._kept:
                self._queued.discard(key)
            elif value < self.value(key):
                self._push(key)
            elif value == self.value(key):
                yield key

    def forget(self, keys: range) -> None:
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
    """An `Lrfu` that follows the rule with the fewest misses, and ages at a change of topic."""

    def __init__(self) -> None:
        super().__init__(RULES[_FIRST][0])
        self._rivals = [Lrfu(half_lives) for half_lives, _ in RULES]
        self._misses = [0.0] * len(RULES)
        self._first = _FIRST
        self._uses = 0
        self._token_uses = 0
        self._seen, self._missed = 0.0, 0  # uses and misses of the current token
        self._usual: float | None = None  # mean miss ratio of the last tokens
        self._topic_tokens = 0  # since the last change of topic
        self._aged = 0.0  # what changes of topic have added to the clock
        # Of each key: the clock at its last use without `_aged`, and the decayed number of its earlier uses at that time.
        self._last: dict[int, tuple[float, float]] = {}

    @property
    def token_uses(self) -> int:
        """Number of uses of a token, of all keys; 0 (no window) if it is unknown."""
        return self._token_uses

    @token_uses.setter
    def token_uses(self, uses: int) -> None:
        self._token_uses = uses
        self._follow(self._first)
        for rival, (_, tokens) in zip(self._rivals, RULES, strict=True):
            rival.window = int(tokens * uses / _SAMPLE)

    def _follow(self, number: int) -> None:
        self._first = number
        self.half_lives, tokens = RULES[number]
        self.window = int(tokens * self._token_uses)

    def use(self, key: int) -> None:
        self._watch(1, key not in self)
        super().use(key)
        self._last[key] = self._clock - self._aged, 2 ** (self.value(key) - self._clock) - 1
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
        """Advance the clock by `uses` that were not observed: hits, because every miss is observed."""
        self._watch(uses, False)
        super().skip(uses)
        for rival in self._rivals:
            rival.skip(uses / _SAMPLE)

    def _watch(self, uses: float, missed: bool) -> None:
        self._seen += uses
        self._missed += missed
        if not self._token_uses or self._seen < self._token_uses:
            return
        ratio = self._missed / self._seen
        self._seen, self._missed = 0.0, 0
        usual = ratio if self._usual is None else self._usual
        self._topic_tokens += 1
        if self._topic_tokens > _TOPIC_TOKENS and ratio > _RISE * usual + 3 * math.sqrt(max(usual, 0.02) / self._token_uses):
            for each in (self, *self._rivals):
                each.age(_AGED)
            self._aged += _AGED
            self._topic_tokens, usual = 0, ratio
        self._usual = usual + (ratio - usual) / _USUAL_TOKENS

    def retire(self, keys: range) -> None:
        """Retire the cached ones of `keys` that are no longer used. Their uses must have been observed."""
        now = self._clock - self._aged
        for key in self._kept.intersection(keys):
            last, earlier = self._last.get(key, (now, 0.0))
            # A key that is used n times per half-life has a decayed number of uses of n / ln 2.
            if earlier * math.log(2) * (now - last) > _UNUSED:
                self._value[key] -= math.log2(1 + earlier)
                self._last[key] = last, 0.0
                self._push(key)

    def unobserved(self, keys: range) -> None:
        """Do not retire `keys` before their next uses, because uses since their last ones were not observed."""
        for key in keys:
            self._last.pop(key, None)

    def forget(self, keys: range) -> None:
        super().forget(keys)
        self.unobserved(keys)
        for rival in self._rivals:
            rival.forget(keys)
