"""Spans in which resources were busy. Several threads may record them; none while spans are read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

COMPUTE, CPU, DEVICE, LINK = RESOURCES = ("compute", "cpu", "device", "link")
"""The accelerator, the host's CPU, the computational SSD, and the path of KV data (link or disk)."""

EVALUATE, FETCH, ATTEND, UPDATE = STAGES = ("evaluate", "fetch", "compute", "update")  # the stages of a layer in a step


class Span(NamedTuple):
    """`resource` was busy with `stage` of `layer` in decode step `step`."""

    resource: str
    stage: str
    layer: int
    step: int
    begin_ns: int
    end_ns: int


class Timeline:
    """Records spans, in ns of its clock. `emulated`: resources that stand for a device that does not exist."""

    def __init__(self, emulated: Iterable[str] = ()) -> None:
        self.emulated = frozenset(emulated)
        if not self.emulated <= set(RESOURCES):
            raise ValueError(f"emulated: must be of {', '.join(RESOURCES)}, not {', '.join(sorted(self.emulated))}")
        self._spans: list[Span] = []
        self._paused_ns = 0

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._paused_ns

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._paused_ns += time.perf_counter_ns() - begin_ns

    @contextmanager
    def span(self, resource: str, stage: str, layer: int, step: int) -> Iterator[None]:
        begin_ns = self.now_ns()
        try:
            yield
        finally:
            self.add(Span(resource, stage, layer, step, begin_ns, self.now_ns()))

    def add(self, span: Span) -> None:
        if span.resource not in RESOURCES:
            raise ValueError(f"resource: must be one of {', '.join(RESOURCES)}, not '{span.resource}'")
        if span.stage not in STAGES:
            raise ValueError(f"stage: must be one of {', '.join(STAGES)}, not '{span.stage}'")
        if span.end_ns < span.begin_ns:
            raise ValueError(f"end_ns: must not be before begin_ns ({span.begin_ns}), not {span.end_ns}")
        self._spans.append(span)

    def has(self, stage: str, layer: int, step: int, since_ns: int) -> bool:
        for span in reversed(self._spans):
            if span.end_ns < since_ns:  # spans are appended when they end, so all earlier ones end before
                break
            if (span.stage, span.layer, span.step) == (stage, layer, step) and span.begin_ns >= since_ns:
                return True
        return False

    @property
    def spans(self) -> list[Span]:
        return sorted(self._spans, key=lambda span: (span.begin_ns, span.end_ns))

    @property
    def steps(self) -> list[int]:
        return sorted({span.step for span in self._spans})

    def last_step(self) -> Timeline:
        made = Timeline(self.emulated)
        made._spans = [span for span in self._spans if span.step == self.steps[-1]]
        return made

    def clear(self) -> None:
        self._spans.clear()

    def busy_ns(self, step: int, resource: str | None = None, stage: str | None = None) -> int:
        """Return how long `resource` was busy with `stage` (None: any); overlapping spans count once."""
        return covered(
            span
            for span in self._spans
            if span.step == step and resource in (None, span.resource) and stage in (None, span.stage)
        )

    def to_json(self) -> dict[str, Any]:
        spans = self.spans
        zero = spans[0].begin_ns if spans else 0
        rows = [span._replace(begin_ns=span.begin_ns - zero, end_ns=span.end_ns - zero)._asdict() for span in spans]
        return {"emulated": sorted(self.emulated), "spans": rows}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        made = cls(data["emulated"])
        for row in data["spans"]:
            made.add(Span(**row))
        return made


class _NoTimeline(Timeline):
    def add(self, span: Span) -> None:
        return


NO_TIMELINE: Timeline = _NoTimeline()


def covered(spans: Iterable[Span]) -> int:
    """Return the time (ns) that `spans` cover; overlaps count once."""
    total, until = 0, 0
    for begin_ns, end_ns in sorted((span.begin_ns, span.end_ns) for span in spans):
        total += max(0, end_ns - max(begin_ns, until))
        until = max(until, end_ns)
    return total
