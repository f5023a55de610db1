"""Defaults of `llmcache size`, and the sizing formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.policies import policy_class
from llmcache.cache.sizing import (
    DEVICES,
    PAPER,
    Need,
    SizingParameters,
    Storage,
    ask,
    blocks_needed,
    largest_loop,
    need,
    passes,
)
from llmcache.model.moe import MoeBytes, expert_curve
from llmcache.units import BLOCK_BYTES
from tools.bench.routing import Habits, misses, ranked

MB = 10**6


def test_options_override_the_defaults_of_a_device_class() -> None:
    """The device classes of section 4.2; a model's own hot set and a measurement also override them."""
    plain = ask(bw=100 * MB, loop=70 * MB)
    assert (plain.storage, plain.loop_bytes, plain.caches) == (Storage(100 * MB, "given"), 70 * MB, ())
    assert (plain.period_ns, plain.hot_bytes, plain.device) == (10**8, None, None)
    assert ask(bw=100 * MB, loop=70 * MB, tokens_per_second=4).period_ns == 250 * MB
    assert set(DEVICES) == {"watch", "phone"}
    watch, phone = ask(device="watch"), ask(device="phone")
    assert watch.storage is not None and (watch.storage.bandwidth, watch.storage.source) == (100 * MB, "device")
    assert phone.storage is not None and phone.storage.bandwidth == 1000 * MB
    assert (watch.caches, watch.hot_bytes) == ((64 * MB,), 4 * MB)
    assert (phone.caches, phone.hot_bytes) == ((256 * MB, 512 * MB), 0)
    assert (PAPER.period_ns, PAPER.hot_bytes) == (10**8, 4 * MB)
    changed = ask(device="phone", bw=2000 * MB, cache=1000 * MB, hot=8 * MB)
    assert (changed.storage, changed.caches, changed.hot_bytes) == (Storage(2000 * MB, "given"), (1000 * MB,), 8 * MB)
    assert ask(device="watch", model="m.gguf").hot_bytes is None
    measured = ask(measure="/data", loop=70 * MB, device="watch")
    assert (measured.storage, measured.measure) == (None, "/data")


WATCH_SETTING = SizingParameters(100 * MB, 10**8, 4 * MB)

settings = st.builds(
    SizingParameters,
    bandwidth=st.integers(1, 10**11),
    period_ns=st.integers(1, 10**12),
    hot_bytes=st.integers(0, 10**10),
)
loops = st.integers(1, 10**12)
mixtures = st.builds(
    lambda dense, expert, experts, used: MoeBytes(dense, expert, experts, min(used, experts)),
    st.integers(0, 10**12),
    st.integers(1, 10**12),
    st.integers(1, 256),
    st.integers(1, 16),
)


def test_the_smartwatch_example_of_section_4_2() -> None:
    assert need(70 * MB, WATCH_SETTING) == Need(60 * MB, 14649, 64 * MB)  # ceil(17090 - 2441.4) blocks
    assert blocks_needed(10, 2.5) == 8  # the paper's floor gives 7, and then three blocks are due where 2.5 fit
    assert largest_loop(64 * MB, WATCH_SETTING) == 70 * MB


@given(loops, settings)
def test_the_computed_cache_is_the_smallest_without_stalls(loop_bytes: int, setting: SizingParameters) -> None:
    found = need(loop_bytes, setting)
    assert passes(loop_bytes, found.cache_bytes, setting).stall_free
    if found.loop_cache_bytes:
        bare = SizingParameters(setting.bandwidth, setting.period_ns, 0)
        assert not passes(loop_bytes, found.loop_cache_bytes - 1, bare).stall_free


# MoE models


@pytest.mark.parametrize(("experts", "used", "share"), [(64, 4, 0.12), (128, 8, 0.3), (64, 4, 0.8)])
def test_estimated_expert_misses_match_a_replay_with_lru(experts: int, used: int, share: float) -> None:
    """A generated routing with drifting popularities; within 10 %."""
    layers, size = 4, MB
    room = int(share * experts * layers)
    missed = misses(*ranked(500, layers, experts, used), Habits(), room, warmup=200)["lru"]
    mixture = MoeBytes(0, layers * experts * size, experts, used)
    assert mixture.missed_expert_bytes(room * size) == pytest.approx(missed * size, rel=0.1)


def test_dense_tensors_are_cached_before_experts() -> None:
    mixture = MoeBytes(300 * MB, 1600 * MB, 64, 4)
    assert (mixture.used_bytes, mixture.token_bytes) == (100 * MB, 400 * MB)
    assert mixture.missing_bytes(0) == 400 * MB
    assert mixture.missing_bytes(200 * MB) == 200 * MB
    assert mixture.missing_bytes(399 * MB) == 100 * MB  # LRU with less than one token's experts never hits
    assert mixture.missing_bytes(401 * MB) < 75 * MB and mixture.expert_hit_ratio(401 * MB) > 0.25
    assert mixture.missing_bytes(1900 * MB) == 0 and mixture.expert_hit_ratio(1900 * MB) == 1
    kept = [mixture.page_cache_kept_bytes(size * MB) for size in (399, 400, 1000, 5000)]
    assert kept == [0, 400 * MB, 1000 * MB, 1900 * MB], "the page cache keeps all that fits if a token fits, else nothing"
    curve = expert_curve(8, 8)
    assert (curve.missed(0.999), curve.missed(1)) == (1, 0), "LRU never hits a loop over all experts of a layer"


@given(mixtures, settings)
def test_the_computed_cache_of_an_moe_model_is_the_smallest_without_stalls(
    mixture: MoeBytes, setting: SizingParameters
) -> None:
    kept = need(mixture, setting).loop_cache_bytes
    assert passes(mixture, kept + setting.hot_bytes, setting).stall_free
    less = kept - 2 - kept // 10**9  # tolerance for floating point
    assert less < 0 or mixture.missing_bytes(less) > setting.staged_bytes


@pytest.mark.parametrize(("loop", "bandwidth", "period_ms"), [(70 * MB, 100 * MB, 100), (300 * MB, 500 * MB, 125)])
def test_the_simulator_stalls_below_the_size_of_the_formula(loop: int, bandwidth: int, period_ms: int) -> None:
    setting = SizingParameters(bandwidth, period_ms * 10**6, 0)
    blocks, size = -(-loop // BLOCK_BYTES), need(loop, setting).loop_cache_blocks

    def missed_bytes(cache_blocks: int) -> float:
        hits = policy_class("belady")(cache_blocks, blocks).replay(np.zeros(6, np.int64), np.full(6, blocks))
        return (blocks - float(hits[1:].mean())) * BLOCK_BYTES

    assert missed_bytes(size) <= setting.staged_bytes < missed_bytes(size - 2)
