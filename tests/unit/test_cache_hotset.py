"""LRFU: between the least recently and the least frequently used."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.hotset import HotSet

USES = st.lists(st.integers(0, 12), min_size=1, max_size=200)


def kept(uses: list[int], room: int, half_lives: float) -> tuple[set[int], int]:
    """What is kept at the end, and how many uses found nothing."""
    hot, missed = HotSet(half_lives), 0
    for key in uses:
        hot.use(key)
        missed += key not in hot
        hot.keep(key)
        while len(hot) > room:
            victim = hot.least()
            assert victim is not None and victim in hot
            hot.drop(victim)
    return {key for key in range(13) if key in hot}, missed


@given(USES, st.integers(1, 8))
def test_who_has_the_least_left_leaves_first(uses: list[int], room: int) -> None:
    """Against the definition, summed anew for every victim."""
    hot, clock, past = HotSet(1.0), 0.0, []
    for key in uses:
        clock += 1 / max(8.0, len(hot))
        past.append((clock, key))
        hot.use(key)
        hot.keep(key)
        while len(hot) > room:
            values = {one: sum(2 ** (at - clock) for at, used in past if used == one) for one in range(13) if one in hot}
            victim = hot.least()
            assert victim is not None and values[victim] == pytest.approx(min(values.values()))
            hot.drop(victim)


@given(USES, st.integers(1, 8))
def test_with_a_short_half_life_it_is_the_least_recently_used(uses: list[int], room: int) -> None:
    recent: OrderedDict[int, None] = OrderedDict()
    for key in uses:
        recent.pop(key, None)
        recent[key] = None
        if len(recent) > room:
            recent.popitem(last=False)
    hot = HotSet(0.0, least_half_life=1e-3)
    for key in uses:
        hot.use(key)
        hot.keep(key)
        if len(hot) > room and (victim := hot.least()) is not None:
            hot.drop(victim)
    assert {key for key in range(13) if key in hot} == set(recent)


def test_what_is_used_often_outlives_what_is_used_once() -> None:
    uses = [use for turn in range(100) for use in (0, 1, 2 + turn % 11)]
    found, _ = kept(uses, 4, 4.0)
    assert {0, 1} <= found


def test_what_is_forgotten_stands_for_nothing() -> None:
    hot = HotSet()
    for key in range(20):
        hot.use(key)
        hot.keep(key)
    hot.forget(range(10))
    assert len(hot) == 10 and hot.least() == 10
    hot.forget(range(20))
    assert hot.least() is None and math.isinf(-hot.value(3))
