"""From reads of watched tensors to passes over a model.

Pure: events in, passes out. Times are CLOCK_MONOTONIC. A pass begins when the first layer is read after a later tensor, and
ends when the next pass begins, without idle time in between. The parts of a long prompt, of which only the last computes
logits, are one pass.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

HIT, WAIT, LOOK = 1, 2, 3  # kinds of events
IDLE_NS = 20_000_000  # a pause after a pass that is longer, in which no thread runs or waits for storage, is no part of it
LONG_IDLE_NS = 1_000_000_000  # the same where the end of a pass is not known; it must be most of the time as well
LONE_NS = 1_000_000_000  # longer than a pass reads its first layer
SAME_PASS_NS = 2_000_000  # reads of the first layer that are closer than this are of one pass, where it alone shows passes
BATCH_ROWS = 32  # least rows of a batch that is always taken for a prompt
PREFILL_FACTOR = 3.0  # least ratio of the computing time of a prompt to that of a token
RECENT = 32  # passes that the median is taken of

Kind = Literal["prefill", "decode"]


class Role(enum.IntEnum):
    """The part of a pass that a watched tensor marks."""

    FIRST = 0
    LATER = 1


class Event(NamedTuple):
    """A report of the kernel, with the sums since the process is observed.

    HIT: a read of the tensor whose role is `place`. WAIT: a thread has waited `wait_ns` for page `place` of a file. LOOK:
    the sums at this moment.
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
    queued_ns: int = 0

    @property
    def idle_ns(self) -> int:
        """Return the time in which all threads slept; in the rest of `other_ns`, one waited for a processor."""
        return self.other_ns - self.queued_ns


class Where(NamedTuple):
    """The layer, and the expert, that a thread waited for."""

    layer: str
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the model. `rows`: reads of the watched bytes of the first layer.

    `compute_ns`: no thread waits for storage and at least one runs; `storage_ns`: at least one waits for storage;
    `other_ns`: neither. `wait_ns`: the waits of all threads together; `waits`: those for pages of the model. `is_first`: the
    process was idle or unobserved before.
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
    waits: Mapping[Where, int] = field(default_factory=dict)

    @property
    def time_ns(self) -> int:
        return self.compute_ns + self.storage_ns + self.other_ns


class Passes:
    """The passes in the events of one process."""

    def __init__(self) -> None:
        self.restart()

    def restart(self, *, shows_end: bool = True, is_lone: bool = False) -> None:
        """Forget the pass under way, because other tensors are watched.

        `shows_end`: a pause after the later tensor is idle time. `is_lone`: only the first layer is ever read.
        """
        self._shows_end, self.is_lone = shows_end and not is_lone, is_lone
        self.hits = self.later_hits = 0  # since then
        self._lone_since_ns = 0  # the first read of the first layer since then
        self._start: Event | None = None  # of the pass under way
        self._end: Event | None = None  # its last read of the later tensor
        self._quiet: Event | None = None  # the last sums after it
        self._last: Event | None = None  # the last read
        self._rows = 0
        self._waits: dict[Where, int] = {}
        self._is_first = True

    def take(self, event: Event) -> Iterator[Pass]:
        if event.kind == LOOK:
            yield from self._look(event)
            return
        if event.place == Role.FIRST:
            self.hits += 1
            self._lone_since_ns = self._lone_since_ns or event.t_ns
            yield from self._first(event)
        else:
            self.later_hits += 1
            if self._start is not None:
                self._end, self._quiet = event, None
        self._last = event

    def wait(self, where: Where, wait_ns: int) -> None:
        if self._start is not None:
            self._waits[where] = self._waits.get(where, 0) + wait_ns

    @property
    def seems_lone(self) -> bool:
        """Return whether the first layer is read for longer than one pass reads it, and the later tensor is not."""
        since_ns = 0 if self._last is None else self._last.t_ns - self._lone_since_ns
        return self.hits > 2 and not self.later_hits and since_ns > LONE_NS

    def finish(self) -> Iterator[Pass]:
        """Yield the pass under way if all of its layers were computed."""
        if self._start is not None and self._end is not None:
            yield self._closed(self._start, self._quiet or self._end)
        self._start = self._end = self._quiet = None

    def _first(self, event: Event) -> Iterator[Pass]:
        if self._start is None or self._last is None:
            self._begin(event, is_first=True)
            return
        is_next = self._end is not None or (self.is_lone and event.t_ns - self._last.t_ns >= SAME_PASS_NS)
        idle_ns = self._idle_ns(event, self._last)
        if is_next or idle_ns:  # a prompt that was given up has no end
            yield self._closed(self._start, event, idle_ns)
            self._begin(event, is_first=idle_ns > 0)
        else:
            self._rows += 1

    def _begin(self, event: Event, *, is_first: bool) -> None:
        self._start, self._end, self._quiet = event, None, None
        self._rows, self._waits, self._is_first = 1, {}, is_first

    def _look(self, event: Event) -> Iterator[Pass]:
        """Work of an idle process after the first look is no part of the pass."""
        if self._start is None or self._end is None or not self._shows_end:
            return
        before = self._quiet or self._end
        idle_ns = event.idle_ns - before.idle_ns
        if idle_ns > IDLE_NS and 2 * idle_ns > event.t_ns - before.t_ns:
            last = event if self._quiet is None else self._quiet
            yield self._closed(self._start, last, self._idle_ns(last, self._end))
            self._start = self._end = self._quiet = None
        else:
            self._quiet = event

    def _idle_ns(self, now: Event, last: Event) -> int:
        idle_ns = now.idle_ns - last.idle_ns
        if self._shows_end and last is self._end:
            return idle_ns if idle_ns > IDLE_NS else 0
        return idle_ns if idle_ns > max(LONG_IDLE_NS, (now.t_ns - last.t_ns) // 2) else 0

    def _closed(self, start: Event, end: Event, idle_ns: int = 0) -> Pass:
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
            waits=self._waits,
        )


class Kinds:
    """Distinguishes prompts (prefill) from tokens (decode)."""

    def __init__(self) -> None:
        self._computes: deque[int] = deque(maxlen=RECENT)  # of the last decode passes
        self._rows: deque[int] = deque(maxlen=RECENT)
        self._previous: tuple[Kind, int] = ("decode", 1)

    def kind_of(self, found: Pass, *, are_rows_tokens: bool) -> Kind:
        """Return the kind of the next pass.

        A prompt is many rows, or several at the beginning of a request; a few rows later are parallel sequences or guesses.
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
