"""From reads of watched tensors to passes over a model: when each began and ended, and where its time went.

Pure: events in, passes out. Times are CLOCK_MONOTONIC. A pass begins when the first layer is read after a later one, and
ends when the next pass begins, without the time in between in which the process is idle.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

HIT, WAIT, LOOK = 1, 2, 3  # kinds of events
IDLE_NS = 20_000_000  # a pause after a pass that is longer, in which no thread runs or waits for storage, is no part of it
LONE_NS = 1_000_000_000  # so long no pass reads its first layer
LONE_IDLE_NS = 1_000_000_000  # a longer pause is none of a pass where only one tensor shows passes
SAME_PASS_NS = 2_000_000  # there, reads of the first layer that are closer than this are of one pass
BATCH_ROWS = 32  # so many rows at a time are a prompt
PREFILL_FACTOR = 3.0  # a prompt computes for so many times as long as a token
RECENT = 32  # passes that the median is taken of

Kind = Literal["prefill", "decode"]


class Role(enum.IntEnum):
    """What a watched tensor stands for: the first layer, the last one, and what follows the layers."""

    FIRST = 0
    LAST = 1
    AFTER = 2


class Event(NamedTuple):
    """A report of the kernel. The sums are those of the process since it is observed.

    HIT: a read of the tensor whose role is `place`. WAIT: a thread has waited `wait_ns` for page `place` of a file.
    LOOK: the sums at this moment.
    """

    t_ns: int
    kind: int
    pid: int
    place: int = 0
    dev: int = 0
    inode: int = 0
    compute_ns: int = 0
    storage_ns: int = 0
    other_ns: int = 0
    wait_ns: int = 0
    major_faults: int = 0
    read_bytes: int = 0


class Wait(NamedTuple):
    """A thread waited for a page of a file."""

    dev: int
    inode: int
    page: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the model. `rows`: reads of the watched bytes of the first layer.

    `compute_ns`: no thread waits for storage and at least one runs; `storage_ns`: at least one waits for storage;
    `other_ns`: neither. `wait_ns`: the waits of all threads together. `is_first`: the process was idle before, or was not
    observed.
    """

    start_ns: int
    compute_ns: int
    storage_ns: int
    other_ns: int
    wait_ns: int
    major_faults: int
    read_bytes: int
    rows: int
    is_first: bool
    waits: tuple[Wait, ...] = ()

    @property
    def time_ns(self) -> int:
        """How long the pass took, without idle time."""
        return self.compute_ns + self.storage_ns + self.other_ns


class Passes:
    """Cuts the events of one process into passes."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the pass under way: other tensors are watched from now on."""
        self.is_lone = False  # set it where the tensors of later layers are never read
        self.hits = self.later_hits = self._after_hits = 0  # since then
        self._lone_since_ns = 0  # the first read of the first layer since then
        self._start: Event | None = None  # of the pass under way
        self._end: Event | None = None  # its last read of a later tensor
        self._quiet: Event | None = None  # the last sums after it
        self._rows = 0
        self._last_hit_ns = 0
        self._waits: list[Wait] = []
        self._is_first = True

    def take(self, event: Event) -> Iterator[Pass]:
        """Take the next event; yields the pass that it ends, if it ends one."""
        if event.kind == WAIT:
            if self._start is not None:
                self._waits.append(Wait(event.dev, event.inode, event.place, event.wait_ns))
        elif event.kind == LOOK:
            yield from self._look(event)
        elif event.place == Role.FIRST:
            self.hits += 1
            self._lone_since_ns = self._lone_since_ns or event.t_ns
            yield from self._first(event)
            self._last_hit_ns = event.t_ns
        else:
            self.later_hits += 1
            self._after_hits += event.place == Role.AFTER
            if self._start is not None:
                self._end, self._quiet = event, None

    @property
    def seems_lone(self) -> bool:
        """Whether the first layer is read for longer than one pass reads it, and no later one."""
        return self.hits > 2 and not self.later_hits and self._last_hit_ns - self._lone_since_ns > LONE_NS

    def finish(self) -> Iterator[Pass]:
        """Yield the pass under way if all of its layers were computed: the process has ended, or is observed no more."""
        if self._start is not None and self._end is not None:
            yield self._closed(self._start, self._quiet or self._end)
        self._start = self._end = self._quiet = None

    def _first(self, event: Event) -> Iterator[Pass]:
        if self._start is None:
            self._begin(event)
        elif self._end is not None:
            yield self._closed(self._start, event)
            self._begin(event, is_first=self._idle_ns(event) > 0)
        elif not self.is_lone or event.t_ns - self._last_hit_ns < SAME_PASS_NS:
            self._rows += 1
        else:
            other_ns = event.other_ns - self._start.other_ns
            is_idle = other_ns > max(LONE_IDLE_NS, (event.t_ns - self._start.t_ns) // 2)
            yield self._closed(self._start, event, other_ns if is_idle else 0)
            self._begin(event, is_first=is_idle)

    def _begin(self, event: Event, *, is_first: bool | None = None) -> None:
        self._is_first = self._start is None if is_first is None else is_first
        self._start, self._end, self._quiet = event, None, None
        self._rows, self._waits = 1, []

    def _look(self, event: Event) -> Iterator[Pass]:
        """End a pass once the process is idle. What an idle process computes after the first look is no part of the pass."""
        if self._start is None or self._end is None or not self._is_computed(self._end):
            return
        before = self._quiet or self._end
        idle_ns = event.other_ns - before.other_ns
        if idle_ns > IDLE_NS and 2 * idle_ns > event.t_ns - before.t_ns:
            yield self._closed(self._start, event if self._quiet is None else self._quiet)
            self._start = self._end = self._quiet = None
        else:
            self._quiet = event

    def _is_computed(self, end: Event) -> bool:
        """Whether nothing of the pass follows a read: a prompt's parts but the last end with the layers."""
        return end.place == Role.AFTER or not self._after_hits

    def _idle_ns(self, now: Event) -> int:
        """How long nothing has run after the pass under way; 0 for a short pause, and for a pass that is not at its end."""
        if self._end is None or not self._is_computed(self._end):
            return 0
        idle_ns = now.other_ns - self._end.other_ns
        return idle_ns if idle_ns > IDLE_NS else 0

    def _closed(self, start: Event, end: Event, idle_ns: int | None = None) -> Pass:
        """The pass from `start` to `end`, without idle time."""
        if idle_ns is None:
            idle_ns = self._idle_ns(end)
        return Pass(
            start_ns=start.t_ns,
            compute_ns=max(0, end.compute_ns - start.compute_ns),
            storage_ns=max(0, end.storage_ns - start.storage_ns),
            other_ns=max(0, end.other_ns - start.other_ns - idle_ns),
            wait_ns=max(0, end.wait_ns - start.wait_ns),
            major_faults=max(0, end.major_faults - start.major_faults),
            read_bytes=max(0, end.read_bytes - start.read_bytes),
            rows=self._rows,
            is_first=self._is_first,
            waits=tuple(self._waits),
        )


class Kinds:
    """Tells prompts (prefill) from tokens (decode), pass by pass."""

    def __init__(self) -> None:
        self._computes: deque[int] = deque(maxlen=RECENT)  # of the last decode passes
        self._rows: deque[int] = deque(maxlen=RECENT)
        self._previous: tuple[Kind, int] = ("decode", 1)

    def kind_of(self, found: Pass, *, are_rows_tokens: bool) -> Kind:
        """Return the kind of the next pass.

        `are_rows_tokens`: each read of the first layer is a row of a batch. A prompt is many rows, or several at the
        beginning of a request; a few rows later on are sequences side by side, or guessed tokens.
        """
        is_prefill = self._is_batch(found) if are_rows_tokens else self._is_slow(found, unknown=found.is_first)
        kind: Kind = "prefill" if is_prefill else "decode"
        if kind == "decode":
            self._computes.append(found.compute_ns)
            self._rows.append(found.rows)
        self._previous = (kind, found.rows)
        return kind

    def _is_batch(self, found: Pass) -> bool:
        if found.rows < 2:
            return False
        is_rest = self._previous[0] == "prefill" and found.rows < self._previous[1]
        if found.rows >= BATCH_ROWS or found.is_first or is_rest:
            return True
        usual = statistics.median(self._rows) if self._rows else found.rows
        return found.rows > PREFILL_FACTOR * usual and self._is_slow(found, unknown=False)

    def _is_slow(self, found: Pass, *, unknown: bool) -> bool:
        if not self._computes:
            return unknown
        return found.compute_ns > PREFILL_FACTOR * statistics.median(self._computes)
