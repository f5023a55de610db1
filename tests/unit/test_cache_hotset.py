"""LRFU (between least recently and least frequently used) and the expert routings of the benchmark."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.hotset import HotSet, Lrfu
from tools.bench import routing

USES = st.lists(st.integers(0, 12), min_size=1, max_size=200)


@given(USES, st.integers(1, 8))
def test_the_victim_has_the_lowest_value(uses: list[int], room: int) -> None:
    """Compare with the definition, evaluated from scratch for every victim."""
    hot, clock, past = Lrfu(1.0), 0.0, []
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


@given(USES, st.integers(1, 8), st.integers(1, 12))
def test_keys_used_within_the_window_are_evicted_last(uses: list[int], room: int, window: int) -> None:
    hot = Lrfu(1.0, window)
    for number, key in enumerate(uses, 1):
        hot.use(key)
        hot.keep(key)
        recent = set(uses[max(0, number - window) : number])
        while len(hot) > room:
            kept = [one for one in range(13) if one in hot]
            victim = hot.least()
            assert victim is not None
            assert hot.value(victim) == min(hot.value(one) for one in kept if one not in recent or recent >= set(kept))
            assert victim not in recent or recent >= set(kept)
            hot.drop(victim)


@pytest.mark.parametrize(
    ("habits", "share", "most"),
    [
        (routing.Habits(1.0, 0.15, 0.0), 0.1, 0.88),  # stable popularity: a long memory helps
        (routing.Habits(1.0, 0.15, 0.01), 0.2, 0.85),  # protects the last token's experts: 0.92 without a window
        (routing.Habits(0.3, 0.4, 0.1), 0.2, 1.02),  # popularity changes constantly: no better than LRU
    ],
)
def test_lrfu_misses_less_than_lru_and_more_than_oracles(habits: routing.Habits, share: float, most: float) -> None:
    """Misses of a generated expert routing; `known` knows the popularities, `belady` all future uses."""
    routed, ranks = routing.ranked(200, 6, 64, 4, habits)
    missed = routing.misses(routed, ranks, habits, int(share * 6 * 64), warmup=50)
    assert missed["belady"] < missed["known"] < missed["llmcache"] <= most * missed["lru"]


@pytest.mark.parametrize(("zipf", "share"), [(1.0, 0.2), (1.0, 0.5), (1.3, 0.3)])
def test_a_change_of_topic_costs_no_more_than_with_lru(zipf: float, share: float) -> None:
    """Two texts with different popular experts; after the change, LRU is at its usual miss ratio within ten tokens."""
    habits = routing.Habits(zipf, 0.2, 0.0)
    first, second = (routing.ranked(150, 8, 64, 6, habits, seed)[0] for seed in (1, 2))
    missed = routing.replay(np.concatenate([first, second]), int(share * 8 * 64))

    def ratio(begin: int, end: int) -> float:
        return float(missed["llmcache"][begin:end].sum() / missed["lru"][begin:end].sum())

    assert ratio(150, 200) <= 0.97
    assert ratio(50, 150) < 0.92 and ratio(200, 300) < 0.92


@pytest.mark.parametrize(("zipf", "share"), [(1.0, 0.6), (1.3, 0.5)])
def test_experts_that_move_to_a_gpu_do_not_stay(zipf: float, share: float) -> None:
    """The most popular fifth of the experts is used no longer after 150 tokens; the hits of the others are counted."""
    layers, experts, used, moved_from = 8, 64, 6, 150
    routed, ranks = routing.ranked(350, layers, experts, used, routing.Habits(zipf, 0.2, 0.0))
    kept = np.array(ranks[0]) >= experts // 5
    token_uses, room = layers * used, int(share * layers * experts)
    hot, lru = HotSet(), OrderedDict[int, None]()
    hot.token_uses = token_uses
    missed = {"hot": np.zeros(len(routed)), "lru": np.zeros(len(routed))}
    for token, chosen in enumerate(routed):
        uses = 0
        for layer in range(layers):
            for expert in chosen[layer].tolist():
                key = layer * experts + expert
                if token >= moved_from and not kept[layer, expert]:
                    continue
                uses += 1
                missed["hot"][token] += key not in hot
                missed["lru"][token] += key not in lru
                hot.use(key)
                hot.keep(key)
                lru[key] = None
                lru.move_to_end(key)
                while len(hot) > room and (victim := hot.least()) is not None:
                    hot.drop(victim)
                if len(lru) > room:
                    lru.popitem(last=False)
        hot.skip(token_uses - uses)
        hot.retire(range(layers * experts))
    assert missed["hot"][200:].sum() <= missed["lru"][200:].sum()


def test_keys_are_not_retired_while_their_uses_are_not_observed() -> None:
    hot = HotSet()
    for key in [*range(4)] * 20 + [4, 5, 6, 7]:
        hot.use(key)
        hot.keep(key)
    keys = range(8)
    hot.skip(200)
    hot.unobserved(keys)
    hot.retire(keys)
    assert hot.coldest(4) == [4, 5, 6, 7]
    for key in range(4):
        hot.use(key)
    hot.skip(200)
    hot.retire(keys)
    for key in range(4, 8):
        hot.use(key)
    assert hot.coldest(4) == [0, 1, 2, 3]


def test_a_preloaded_cache_misses_only_what_did_not_fit() -> None:
    """Three experts of one layer in turn with room for two: the first two are in memory already."""
    routed = np.array([0, 1, 2, 0, 1, 2]).reshape(-1, 1, 1)
    assert routing.replay(routed, 2)["belady"].tolist() == [1, 1, 1, 0, 1, 0]
    assert routing.replay(routed, 2, is_loaded=True)["belady"].tolist() == [0, 0, 1, 0, 1, 0]
    assert routing.replay(routed, 3, is_loaded=True)["lru"].sum() == 0


def test_locality_of_a_routing_is_measured() -> None:
    """One layer of four experts; each token uses expert 0 and one other."""
    routed = np.array([[[0, 1 + token % 2]] for token in range(20)])
    found = routing.locality(routed, 4)
    assert found.reused == {1: 0.5, 4: 1.0, 16: 1.0} and found.top == 0.5 and found.ninety == 0.75


def test_forgotten_keys_have_no_value() -> None:
    hot = HotSet()
    for key in range(20):
        hot.use(key)
        hot.keep(key)
    hot.forget(range(10))
    assert len(hot) == 10 and hot.least() == 10
    hot.forget(range(20))
    assert hot.least() is None and math.isinf(-hot.value(3))
