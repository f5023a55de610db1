"""Timelines: what overlaps counts once, idle is what nothing covers, and what is saved comes back."""

from __future__ import annotations

import json
import threading
import time

import pytest

from llmcache.kv.pipeline import NO_TIMELINE, Span, Timeline
from llmcache.kv.pipeline.timeline import covered


def made() -> Timeline:
    """Return two steps: compute busy 60 of 100 and 50 of 100; evaluation by two resources at one time."""
    timeline = Timeline(emulated=["compute"])
    for span in (
        Span("cpu", "evaluate", 0, 4, 1000, 1040),
        Span("device", "evaluate", 0, 4, 1010, 1050),
        Span("compute", "compute", 0, 4, 1030, 1060),
        Span("compute", "compute", 1, 4, 1060, 1090),
        Span("link", "fetch", 1, 4, 1050, 1100),
        Span("compute", "compute", 0, 5, 2000, 2050),
        Span("cpu", "update", 0, 5, 2040, 2100),
    ):
        timeline.add(span)
    return timeline


def test_idle_is_what_no_span_covers_within_the_steps() -> None:
    timeline = made()
    assert [timeline.period_ns(step) for step in timeline.steps] == [100, 100]
    assert timeline.idle_share("compute") == pytest.approx(1 - (60 + 50) / 200)
    assert timeline.idle_share("device") == pytest.approx(1 - 40 / 200)
    assert timeline.busy_ns(4, stage="evaluate") == 50, "what two resources do at a time counts once"
    assert timeline.busy_ns(4, "cpu", "update") == 0 and timeline.busy_ns(5, "cpu") == 60
    assert timeline.period_ns(6) == 0
    with pytest.raises(ValueError, match="timeline"):
        Timeline().idle_share("compute")


def test_cover_of_nested_and_touching_spans() -> None:
    spans = [Span("cpu", "evaluate", 0, 0, *times) for times in ((0, 10), (2, 3), (10, 12), (20, 25), (24, 30))]
    assert covered(spans) == 22
    assert covered([]) == 0


def test_what_is_saved_comes_back() -> None:
    timeline = made()
    again = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert again.emulated == {"compute"} and again.spans[0].begin_ns == 0
    assert again.to_json() == timeline.to_json()
    assert again.idle_share("compute") == timeline.idle_share("compute")


def test_the_last_step_alone_and_a_new_beginning() -> None:
    timeline = made()
    assert [span.step for span in timeline.last_step().spans] == [5, 5] and timeline.last_step().emulated == {"compute"}
    timeline.clear()
    assert timeline.spans == [] and timeline.last_step().spans == []


def test_what_is_paused_takes_no_time() -> None:
    timeline = Timeline()
    real_ns, begin_ns = time.perf_counter_ns(), timeline.now_ns()  # in this order: a pause between them counts as real
    with timeline.span("cpu", "update", 0, 0):
        with timeline.paused():
            time.sleep(0.2)
        time.sleep(0.05)
    taken_ns, real_ns = timeline.now_ns() - begin_ns, time.perf_counter_ns() - real_ns
    (span,) = timeline.spans
    assert span.end_ns - span.begin_ns <= taken_ns <= real_ns - 200_000_000
    assert span.end_ns - span.begin_ns >= 50_000_000


def test_spans_of_several_threads_are_all_there_also_after_errors() -> None:
    timeline = Timeline()

    def record(layer: int) -> None:
        for step in range(50):
            with pytest.raises(KeyError), timeline.span("cpu", "evaluate", layer, step):
                raise KeyError

    threads = [threading.Thread(target=record, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorded = [(span.layer, span.step) for span in timeline.spans]
    assert sorted(recorded) == [(layer, step) for layer in range(4) for step in range(50)]
    assert all(span.begin_ns <= span.end_ns for span in timeline.spans)


def test_what_is_no_resource_or_stage_is_refused() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="resource: 'gpu'"):
        timeline.span("gpu", "compute", 0, 0)
    with pytest.raises(ValueError, match="stage: 'sleep'"):
        timeline.span("cpu", "sleep", 0, 0)
    with pytest.raises(ValueError, match="emulated: disk"):
        Timeline(["disk"])
    with pytest.raises(ValueError, match="end_ns"):
        timeline.add(Span("cpu", "fetch", 0, 0, 5, 4))


def test_no_timeline_keeps_nothing() -> None:
    with NO_TIMELINE.span("cpu", "fetch", 0, 0):
        pass
    NO_TIMELINE.add(Span("cpu", "fetch", 0, 0, 0, 1))
    assert NO_TIMELINE.spans == []
