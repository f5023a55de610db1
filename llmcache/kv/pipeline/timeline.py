"""Timeline: which resource did what when, as spans on one clock; how long it was busy.

Several threads record into one timeline: a span is complete when it is appended, and appending to a list is one step of
the interpreter. What reads the spans does so when the threads that record are at rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

COMPUTE, CPU, DEVICE, LINK = RESOURCES = ("compute", "cpu", "device", "link")
"""What can be busy: the accelerator, the host's processor, the computational SSD, what moves KV data (link or disk)."""

EVALUATE, FETCH, ATTEND, UPDATE = STAGES = ("evaluate", "fetch", "compute", "update")
"""What a step of a layer consists of."""


class Span(NamedTuple):
    """`resource` was busy with `stage` of `layer` in decode step `step`, from `begin_ns` to `end_ns`."""

    resource: str
    stage: str
    layer: int
    step: int
    begin_ns: int
    end_ns: int


class Timeline:
    """Records spans, in ns of its clock, `now_ns`. `emulated`: resources that stand for one that is not there."""

    def __init__(self, emulated: Iterable[str] = ()) -> None:
        self.emulated = frozenset(emulated)
        if not self.emulated <= set(RESOURCES):
            raise ValueError(f"emulated: must be of {', '.join(RESOURCES)}, not {', '.join(sorted(self.emulated))}")
        self._spans: list[Span] = []
        self._paused_ns = 0

    def now_ns(self) -> int:
        """Returns the time by its clock: that of the machine, without what was paused."""
        return time.perf_counter_ns() - self._paused_ns

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock, for what is not part of what is measured; nothing may be recorded meanwhile."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._paused_ns += time.perf_counter_ns() - begin_ns

    @contextmanager
    def span(self, resource: str, stage: str, layer: int, step: int) -> Iterator[None]:
        """A with block that is recorded as a span, also when it ends by an exception."""
        begin_ns = self.now_ns()
        try:
            yield
        finally:
            self.add(Span(resource, stage, layer, step, begin_ns, self.now_ns()))

    def add(self, span: Span) -> None:
        """Records a span that was timed elsewhere, on the same clock. ValueError: there is no such resource or stage."""
        if span.resource not in RESOURCES:
            raise ValueError(f"resource: must be one of {', '.join(RESOURCES)}, not '{span.resource}'")
        if span.stage not in STAGES:
            raise ValueError(f"stage: must be one of {', '.join(STAGES)}, not '{span.stage}'")
        if span.end_ns < span.begin_ns:
            raise ValueError(f"end_ns: must not be before begin_ns ({span.begin_ns}), not {span.end_ns}")
        self._spans.append(span)

    def has(self, stage: str, layer: int, step: int, since_ns: int) -> bool:
        """Returns whether a span of `stage` of `layer` in `step` was recorded that began at `since_ns` or after."""
        for span in reversed(self._spans):
            if span.end_ns < since_ns:  # spans are appended when they end: none before this one is later
                break
            if (span.stage, span.layer, span.step) == (stage, layer, step) and span.begin_ns >= since_ns:
                return True
        return False

    @property
    def spans(self) -> list[Span]:
        """All spans, by their begin."""
        return sorted(self._spans, key=lambda span: (span.begin_ns, span.end_ns))

    @property
    def steps(self) -> list[int]:
        """The decode steps that have spans, ascending."""
        return sorted({span.step for span in self._spans})

    def last_step(self) -> Timeline:
        """Returns a timeline of the spans of the last step alone."""
        made = Timeline(self.emulated)
        made._spans = [span for span in self._spans if span.step == self.steps[-1]]
        return made

    def clear(self) -> None:
        """Forgets all spans, to begin anew after a warm-up."""
        self._spans.clear()

    def busy_ns(self, step: int, resource: str | None = None, stage: str | None = None) -> int:
        """Returns how long `resource` (None: any) was busy with `stage` (None: any); spans that overlap count once."""
        return covered(
            span
            for span in self._spans
            if span.step == step and resource in (None, span.resource) and stage in (None, span.stage)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, times in ns from the first begin on."""
        spans = self.spans
        zero = spans[0].begin_ns if spans else 0
        rows = [span._replace(begin_ns=span.begin_ns - zero, end_ns=span.end_ns - zero)._asdict() for span in spans]
        return {"emulated": sorted(self.emulated), "spans": rows}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Timeline:
        """Returns the timeline that `to_json` has told of. KeyError, TypeError, ValueError: it is not one."""
        made = cls(told["emulated"])
        for row in told["spans"]:
            made.add(Span(**row))
        return made


class _NoTimeline(Timeline):
    """Records nothing: what everything takes that can record, unless it is given a timeline."""

    def add(self, span: Span) -> None:
        return


NO_TIMELINE: Timeline = _NoTimeline()


def covered(spans: Iterable[Span]) -> int:
    """Returns the time (ns) that `spans` cover together; what several cover counts once."""
    total, until = 0, 0
    for begin_ns, end_ns in sorted((span.begin_ns, span.end_ns) for span in spans):
        total += max(0, end_ns - max(begin_ns, until))
        until = max(until, end_ns)
    return total
