"""llmcache's policy block by block with dictionaries: slow, short, and what the compiled one must agree with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from llmcache.cache.policies.llmcache import FADE_ROUNDS, SLACK, STREAM_BLOCKS
from llmcache.cache.policies.reuse import LEAST_EVIDENCE, LEAST_REMEMBERED, REMEMBERED, ROUND, STALENESS
from llmcache.cache.policies.streams import AHEAD, BEHIND, STREAMS

Queue = OrderedDict[int, None]
KINDS = ("regular", "irregular", "hot")


@dataclass(eq=False)
class Stream:
    length: int = 0
    interval: int = -1
    run: Queue = field(default_factory=OrderedDict)


class PlainLLMCache:
    """One reference at a time; `held` is what the cache holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stale = 1
        while self.stale * 2 <= min(ROUND, capacity // STALENESS):
            self.stale *= 2
        self.remembered = max(REMEMBERED * capacity, LEAST_REMEMBERED)
        self.bound = max(1, capacity // 2)
        self.step, self.previous, self.evictions, self.once = 0, -1, 0, 0
        self.lead, self.led_by_lru = -self.bound, False
        self.patience, self.worth = -1, 0
        self.reuses = [0] * 64
        self.last: dict[int, int] = {}
        self.interval: dict[int, int] = {}
        self.where: dict[int, Queue] = {}  # the queue of a planned block
        self.groups: dict[tuple[str, int], Queue] = {}
        self.runs: list[Queue] = []
        self.left: Queue = OrderedDict()
        self.gone: Queue = OrderedDict()
        self.held: Queue = OrderedDict()  # in the order of the last reference
        self.lru: Queue = OrderedDict()
        self.streams: OrderedDict[int, Stream] = OrderedDict()  # by head, the one that rested longest first
        self.chosen: tuple[Queue, bool] | None = None
        self.chosen_until = -1

    def access(self, block: int) -> bool:
        if block == self.previous and block in self.held:
            return True
        self.previous = block
        stream = self._follow(block)
        hit = block in self.held
        seen = block in self.last
        planned = block in self.where
        if not planned and len(self.where) >= self.capacity and self.chosen_until <= self.step:
            self._choose()
        key = self._learn(block, stream, planned) if seen else None
        self._take(block)
        if not planned and len(self.where) >= self.capacity:
            if self.chosen_until <= self.step:
                self._choose()
            self._give_up()
        queue = self._queue(key, stream)
        queue[block] = None
        self.where[block] = queue
        self.last[block] = self.step
        self.step += 1
        self._lru_note(block)
        if not hit:
            self.once += not seen
            self.held[block] = None
            if len(self.held) > self.capacity:
                self._evict()
        self.held.move_to_end(block)
        if self.step % ROUND == 0:
            self._look()
        return hit

    def _follow(self, block: int) -> Stream:
        steps = [*range(1, AHEAD + 1), *range(-1, -BEHIND - 1, -1)]
        found = next((block - step for step in steps if block - step in self.streams), None)
        stream = Stream() if found is None else self.streams.pop(found)
        self.streams.pop(block, None)
        if len(self.streams) >= STREAMS:
            self.streams.popitem(last=False)
        self.streams[block] = stream
        stream.length += 1
        return stream

    def _learn(self, block: int, stream: Stream, planned: bool) -> tuple[str, int]:
        elapsed = max(1, self.step - self.last[block])
        interval = self.interval.get(block, -1)
        in_loop = stream.length >= STREAM_BLOCKS and stream.interval >= 0 and agree(elapsed, stream.interval)
        if interval < 0:
            kind, interval = "regular" if in_loop else "hot", elapsed
            self.reuses[elapsed.bit_length()] += 1
        elif agree(elapsed, interval):
            kind, interval = "regular", elapsed
        else:
            kind, interval = "irregular" if in_loop else "hot", (interval + elapsed) // 2
        stream.interval = elapsed
        self.lead = max(-self.bound, min(self.bound, self.lead + (block in self.lru) - planned))
        self.interval[block] = interval
        octave = interval.bit_length() - 1
        return kind, 2 * octave + ((2 * (interval - (1 << octave))) >> octave)

    def _queue(self, key: tuple[str, int] | None, stream: Stream) -> Queue:
        if key is not None:
            return self.groups.setdefault(key, OrderedDict())
        if not any(run is stream.run for run in self.runs):
            stream.run = OrderedDict()
            self.runs.append(stream.run)
        return stream.run

    def _take(self, block: int) -> None:
        self.left.pop(block, None)
        self.gone.pop(block, None)
        queue = self.where.pop(block, None)
        if queue is not None:
            del queue[block]
            self._tidy(queue)

    def _tidy(self, queue: Queue) -> None:
        if queue:
            return
        if self.chosen is not None and self.chosen[0] is queue:
            self.chosen_until = -1
        self.groups = {key: group for key, group in self.groups.items() if group is not queue}
        self.runs = [run for run in self.runs if run is not queue]

    def _choose(self) -> None:
        furthest = -(1 << 62)
        for (kind, _), queue in sorted(self.groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])):
            head, tail = next(iter(queue)), next(reversed(queue))
            age, interval = self.step - self.last[head], self.interval[head]
            from_tail = False
            if kind == "hot":
                away = max(interval, age)
            elif age > (2 if kind == "regular" else 3) * interval + STREAMS:
                away = age
            else:
                away, from_tail = self.last[tail] + self.interval[tail] - self.step, True
            if away > furthest:
                furthest, self.chosen = away, (queue, from_tail)
        if self.runs:
            age = self.step - self.last[next(reversed(self.runs[0]))]
            if age > self.patience or self.worth >= furthest:
                self.chosen = (self.runs[0], True)
        self.chosen_until = (self.step // self.stale + 1) * self.stale

    def _give_up(self) -> None:
        assert self.chosen is not None
        queue, from_tail = self.chosen
        block, _ = queue.popitem(last=from_tail)
        del self.where[block]
        self._tidy(queue)
        if not from_tail and queue and not self._goes_on(block, next(iter(queue))):
            self.chosen_until = -1
        if block in self.held:
            self.left[block] = None
        else:
            self._forget(block)

    def _goes_on(self, block: int, following: int) -> bool:
        same = self.interval.get(block) == self.interval.get(following)
        return following == block + 1 and self.last[following] == self.last[block] + 1 and same

    def _forget(self, block: int) -> None:
        self.gone[block] = None
        if len(self.gone) > self.remembered:
            oldest, _ = self.gone.popitem(last=False)
            del self.last[oldest]
            self.interval.pop(oldest, None)
            self.lru.pop(oldest, None)

    def _lru_note(self, block: int) -> None:
        self.lru[block] = None
        self.lru.move_to_end(block)
        if len(self.lru) > self.capacity:
            self.lru.popitem(last=False)

    def _evict(self) -> None:
        victim = next(iter(self.held)) if self.led_by_lru else next(iter(self.left))
        del self.held[victim]
        self.evictions += 1
        if victim in self.left:
            del self.left[victim]
            self._forget(victim)

    def _look(self) -> None:
        if self.lead >= self.bound:
            self.led_by_lru = True
        elif self.lead <= -self.bound:
            self.led_by_lru = False
        self._weigh()
        if self.step % (FADE_ROUNDS * ROUND) == 0:
            self.reuses = [count >> 1 for count in self.reuses]
            self.once >>= 1

    def _weigh(self) -> None:
        self.patience = -1
        waiting, reused, waited, best = self.once, 0, 0.0, 0.0
        if waiting <= STREAMS:
            return
        for octave in range(40):
            horizon = 1 << octave
            reused += self.reuses[octave]
            waited += waiting * (horizon - (horizon >> 1))
            waiting = max(0, waiting - self.reuses[octave])
            if reused > LEAST_EVIDENCE and reused > best * waited:
                best = reused / waited
                self.patience, self.worth = horizon, int(1 / best)


def agree(elapsed: int, interval: int) -> bool:
    return abs(elapsed - interval) <= interval // 8 + SLACK
