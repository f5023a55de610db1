"""Refresh accounting against a controller that is played nanosecond by nanosecond, over random runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.edram.constants import RefreshIntervals
from llmcache.edram.refresh import EdramRun, RunRecorder, account
from tests.conftest import examples

PAIR, X = 10, 7
Step = tuple[int, list[tuple[int, bool]]]

steps = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.tuples(st.integers(-1, 3), st.booleans()), min_size=4, max_size=4)),
    min_size=1,
    max_size=12,
)
short = st.integers(1, 30)


def recorded(played: list[Step], kind: str) -> EdramRun:
    recorder = RunRecorder(PAIR, X)
    for duration, places in played:
        recorder.observe(0, kind, np.array([row for row, _ in places]), np.array([high for _, high in places]))
        recorder.end_step(duration)
    return recorder.finish("", "modelled: random")


def play(played: list[Step], intervals: RefreshIntervals) -> tuple[list[int], list[int]]:
    """Refreshes of rows by group: with a counter per group, and with a timer per row."""
    by_counter, by_timer = [0] * 4, [0] * 4
    last: dict[tuple[int, int], tuple[int, int, bool]] = {}  # of each place and half: row, when refreshed, group
    now = 0
    for duration, places in played:
        for place, (row, high) in enumerate(places):
            for half in (0, 1):
                before = last.pop((place, half), None)
                if row < 0:
                    continue
                if before is None or before[0] != row:
                    last[place, half] = (row, now, high)
                elif high and not before[2]:
                    by_counter[half] += 1
                    by_timer[half] += 1
                    last[place, half] = (row, now, high)
                else:
                    last[place, half] = (row, before[1], high)
        begin = now
        for now in range(begin + 1, begin + duration + 1):
            for key, (row, refreshed, high) in last.items():
                group = key[1] if high else 2 + key[1]
                interval = int(intervals.in_order()[group])
                by_counter[group] += now % interval == 0
                if now - refreshed >= interval:
                    by_timer[group] += 1
                    last[key] = (row, now, high)
    return by_counter, by_timer


@settings(max_examples=examples(150), deadline=None)
@given(steps, st.sampled_from(["kv", "x"]), short, short, short, short)
def test_equals_a_controller_that_is_played(played: list[Step], kind: str, a: int, b: int, c: int, d: int) -> None:
    intervals = RefreshIntervals(min(a, b), min(c, d), max(a, b), max(c, d))
    by_counter, by_timer = play(played, intervals)
    run = recorded(played, kind)
    vectors, half = (2, PAIR) if kind == "kv" else (1, X)
    for rule, wanted in (("ticks", by_counter), ("floor", by_timer)):
        found = account(run, intervals, 1.0, rule=rule)
        assert [group.refreshes for group in found.groups] == [vectors * count for count in wanted]
        assert [group.joules for group in found.groups] == [half * count for count in wanted]
        assert found.joules == half * sum(wanted)
    bound = account(run, intervals, 1.0, rule="ceil")
    assert all(group.refreshes >= vectors * count for group, count in zip(bound.groups, by_timer, strict=True))
