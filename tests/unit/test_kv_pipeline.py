"""The pipeline: lookahead changes the time of fetches, not the selected rows; errors are raised at their layer.

Attention equals the formula, also for grouped heads and half precision. Overlapping spans of a timeline count once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.errors import MissingRequirement
from llmcache.kv.pipeline import KvEngine, Span, Timeline, attention
from llmcache.kv.policies.base import PolicySettings
from llmcache.kv.policies.hillinfer import HillInfer, HillInferSettings
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig
from llmcache.kv.tiers.ssd import CsdTier
from llmcache.kv.workload import StreamSpec, SyntheticStream
from tests.mount.live import wait_for
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.kv_policy_parts import Best

SPEC = StreamSpec(layers=3, kv_heads=2, heads=4, head_dim=16, context=300, batch=2, dtype="float32")
STREAM = SyntheticStream(SPEC)
STEPS = 8


def opened(**settings: object) -> tuple[KvStore, Best]:
    """Return a store with everything in memory, and a policy over it."""
    store = KvStore(StoreConfig(SPEC.shape, batch=SPEC.batch))
    return store, Best(store, PolicySettings(**settings))  # type: ignore[arg-type]


def ids(positions: range) -> NDArray[np.int64]:
    return np.tile(np.arange(positions.start, positions.stop), (SPEC.batch, 1))


def at(step: int) -> range:
    return range(SPEC.context + step, SPEC.context + step + 1)


def fill(engine: KvEngine) -> None:
    for layer in range(SPEC.layers):
        engine.prefill(layer, None, *STREAM.keys_values(layer, range(SPEC.context)))
    engine.finish_step(ids(range(SPEC.context)), ids(range(SPEC.context)))


def layer_step(engine: KvEngine, layer: int, step: int, error: float = 0.0) -> Gathered:
    """Run a layer of a step, and start lookahead for the next layer; with `error` 0, its estimated queries are exact."""
    found = engine.step(layer, STREAM.queries(layer, step), *STREAM.keys_values(layer, at(step)))
    if layer + 1 < SPEC.layers:
        engine.ahead(layer + 1, STREAM.estimate(layer + 1, step, error))
    engine.attended(layer)
    return found


def decode(engine: KvEngine, step: int, error: float = 0.2) -> list[Gathered]:
    """Run a step, and return the gathered rows of each layer."""
    found = [layer_step(engine, layer, step, error) for layer in range(SPEC.layers)]
    engine.finish_step(ids(at(step)), ids(at(step)))
    return found


def run(
    steps: int = STEPS, error: float = 0.2, alpha: float = 0.3, app: bool = True, exact: bool = False
) -> list[list[Gathered]]:
    """Return the gathered rows by step and layer."""
    store, policy = opened(alpha=alpha)
    with store, KvEngine(store, policy, app=app, exact=exact) as engine:
        fill(engine)
        return [decode(engine, step, error) for step in range(steps)]


def same(first: list[list[Gathered]], second: list[list[Gathered]]) -> bool:
    return all(
        np.array_equal(a.positions, b.positions) and np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_for(lambda: not any(each.name.startswith("llmcache-kv-ahead") for each in threading.enumerate()), "all have ended")


def test_lookahead_with_exact_queries_changes_nothing() -> None:
    plain = run(app=False)
    assert same(run(app=True, error=0), plain), "the estimate is exact"
    assert same(run(app=True, exact=True), plain), "the estimate is inexact, but corrected"
    assert not same(run(app=True), plain), "the estimate is inexact"


def test_the_next_layer_is_evaluated_while_the_current_one_computes() -> None:
    store, policy = opened(alpha=0.3)
    begun, may_end = threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        if layer == 1:
            begun.set()
            assert may_end.wait(120)

    policy.before_select = hold
    with KvEngine(store, policy) as engine:
        fill(engine)
        engine.step(0, STREAM.queries(0, 0), *STREAM.keys_values(0, at(0)))
        engine.ahead(1, STREAM.estimate(1, 0))
        assert begun.wait(120)
        assert ("select", 1) not in policy.calls, "the worker evaluates while this thread computes"
        engine.attended(0)  # must not wait for the worker
        may_end.set()
        found = engine.step(1, STREAM.queries(1, 0), *STREAM.keys_values(1, at(0)))
    assert found.positions.shape[2] == 90 + 1  # alpha of 300, and the newest token
    assert policy.calls == [("select", 0), ("select", 1), ("attended", 0)]


def gone(layer: int) -> None:
    if layer == 1:
        raise MissingRequirement("the device is gone", "restart it")


@pytest.mark.parametrize("app", [False, True])
def test_an_evaluation_error_is_raised_at_its_layer_and_can_be_retried(app: bool) -> None:
    store, policy = opened(alpha=0.3)
    expected = run(steps=1, app=app)[0]
    policy.before_select = gone
    with KvEngine(store, policy, app=app) as engine:
        fill(engine)
        found = [layer_step(engine, 0, 0, 0.2)]
        with pytest.raises(MissingRequirement, match="the device is gone"):
            layer_step(engine, 1, 0)
        policy.before_select = lambda layer: None
        engine.ahead(1, STREAM.estimate(1, 0))
        found += [layer_step(engine, layer, 0, 0.2) for layer in (1, 2)]
        engine.finish_step(ids(at(0)), ids(at(0)))
    assert same([found], [expected])


def test_an_update_error_is_raised_at_the_end_of_the_step() -> None:
    store, policy = opened(alpha=0.3)
    policy.before_update = gone
    with KvEngine(store, policy) as engine:
        fill(engine)
        with pytest.raises(MissingRequirement, match="the device is gone"):
            decode(engine, 0)
        assert [layer for what, layer in policy.calls if what == "attended"] == [0, 2], (
            "the other updates were done, in order"
        )
        engine.finish_step(ids(at(0)), ids(at(0)))
        policy.before_update = lambda layer: None
        decode(engine, 1)


def test_close_finishes_the_current_job_and_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is joined: `close` may run in a garbage collection while another thread starts, for which a join waits."""
    join, joined = threading.Thread.join, []

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    store, policy = opened(alpha=0.3)
    begun, may_end = threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        begun.set()
        assert may_end.wait(120)

    engine = KvEngine(store, policy)
    fill(engine)
    policy.before_select = hold
    for layer in range(SPEC.layers):
        engine.ahead(layer, STREAM.estimate(layer, 0))
    assert begun.wait(120)
    waiting = [engine.looked_ahead[layer] for layer in range(1, SPEC.layers)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_for(lambda: all(one.cancelled() for one in waiting), "queued jobs are dropped")
    may_end.set()
    closing.join(120)
    assert not closing.is_alive()
    assert joined == [closing]
    assert policy.calls == [("select", 0)]
    assert not engine.looked_ahead
    engine.close()  # a second call has no effect
    with pytest.raises(RuntimeError):
        engine.ahead(0, STREAM.estimate(0, 0))


def test_rest_discards_lookahead_results() -> None:
    store, policy = opened(alpha=0.3)
    with KvEngine(store, policy) as engine:
        fill(engine)
        engine.ahead(0, STREAM.estimate(0, 0))
        engine.rest()
        store.crop(200)
        policy.calls.clear()
        found = engine.step(0, STREAM.queries(0, 0), *STREAM.keys_values(0, range(200, 201)))
    assert policy.calls == [("select", 0)] and found.positions.max() == 200


# With a spill file and an emulated device


def spilling(path: Path, ssd: str) -> tuple[KvStore, HillInfer]:
    """Return a store with half of its pages in memory, and HillInfer over it."""
    (path / "context.kv").unlink(missing_ok=True)
    config = StoreConfig(SPEC.shape, SPEC.batch, cpu_pages=10, path=path / "context.kv", ssd=ssd, threads=2)
    store = KvStore(config)
    return store, HillInfer(store, HillInferSettings(0.4, score_block_tokens=32))


@FORKED
def test_a_device_killed_during_lookahead_is_reported_and_restarted_without_loss(tmp_path: Path) -> None:
    plain, policy = spilling(tmp_path, "csd")
    with plain, KvEngine(plain, policy) as engine:
        fill(engine)
        expected = [decode(engine, step, 0) for step in range(4)]
    store, policy = spilling(tmp_path, "csd")
    with store, KvEngine(store, policy) as engine:
        fill(engine)
        found = [decode(engine, 0, 0)]
        first = layer_step(engine, 0, 1)
        engine.rest()
        assert isinstance(store.ssd, CsdTier)
        os.kill(store.ssd.device.process.pid, signal.SIGKILL)
        engine.ahead(1, STREAM.queries(1, 1))
        with pytest.raises(MissingRequirement, match="emulated device was ended by signal 9"):
            layer_step(engine, 1, 1)
        store.restart_device()
        found.append([first, *(layer_step(engine, layer, 1) for layer in (1, 2))])
        engine.finish_step(ids(at(1)), ids(at(1)))
        found += [decode(engine, step, 0) for step in (2, 3)]
    assert same(found, expected)


def check_rows(found: Gathered, layer: int, length: int) -> None:
    """Check that these are rows of the stream: ascending, without repetition, and with the newest token."""
    assert (np.diff(found.positions, axis=2) > 0).all() and found.positions[..., -1].max() == length - 1
    for rows, everything in zip((found.keys, found.values), STREAM.keys_values(layer, range(length)), strict=True):
        assert np.array_equal(rows, np.take_along_axis(everything, found.positions[..., None], axis=2))


def test_a_temporarily_full_disk_causes_only_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MissingRequirement("context.kv: no space left", "make room")

    store, policy = spilling(tmp_path, "file")
    with store, KvEngine(store, policy, app=True) as engine:
        fill(engine)
        last = 15 - SPEC.context % 16  # the step whose token completes a page
        for step in range(last):
            decode(engine, step)
        with monkeypatch.context() as patched:
            patched.setattr(RawFile, "write", full)
            with pytest.raises(MissingRequirement, match="no space left"):
                layer_step(engine, 0, last)
        found = [layer_step(engine, layer, last) for layer in range(SPEC.layers)]
        engine.finish_step(ids(at(last)), ids(at(last)))
        for layer, got in enumerate(found):
            check_rows(got, layer, store.length)
        decode(engine, last + 1)


# Attention

RANDOM = np.random.default_rng(3)
QUERIES = RANDOM.standard_normal((2, 4, 8)).astype(np.float32)
KEYS, VALUES = (RANDOM.standard_normal((2, 2, 11, dim)).astype(np.float32) for dim in (8, 5))


def test_attention_is_the_softmax_of_scaled_products() -> None:
    out, weights = attention(QUERIES, KEYS, VALUES)
    assert out.shape == (2, 4, 5) and weights.shape == (2, 4, 11) and out.dtype == np.float32
    for b in range(2):
        for head in range(4):
            logits = KEYS[b, head // 2].astype(np.float64) @ QUERIES[b, head] / 8**0.5
            share = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(weights[b, head], share, rtol=1e-5)
            np.testing.assert_allclose(out[b, head], share @ VALUES[b, head // 2], rtol=1e-4, atol=1e-6)


# Timelines


def made() -> Timeline:
    """Return a timeline of two steps: compute is busy 60 of 100 and 50 of 100; two resources evaluate at the same time."""
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


def test_overlapping_spans_count_once() -> None:
    timeline = made()
    assert timeline.steps == [4, 5]
    assert [timeline.busy_ns(step, "compute") for step in timeline.steps] == [60, 50]
    assert timeline.busy_ns(4, stage="evaluate") == 50, "concurrent work counts once"
    assert timeline.busy_ns(4, "cpu", "update") == 0 and timeline.busy_ns(5, "cpu") == 60
    assert timeline.busy_ns(6) == 0
    assert [span.step for span in timeline.last_step().spans] == [5, 5] and timeline.last_step().emulated == {"compute"}
    timeline.clear()
    assert timeline.spans == [] and timeline.last_step().spans == []


def test_pauses_take_no_time() -> None:
    timeline = Timeline()
    real_ns, begin_ns = time.perf_counter_ns(), timeline.now_ns()  # a delay between the calls counts as real time
    with timeline.span("cpu", "update", 0, 0):
        with timeline.paused():
            time.sleep(0.2)
        time.sleep(0.05)
    taken_ns, real_ns = timeline.now_ns() - begin_ns, time.perf_counter_ns() - real_ns
    (span,) = timeline.spans
    assert span.end_ns - span.begin_ns <= taken_ns <= real_ns - 200_000_000
    assert span.end_ns - span.begin_ns >= 50_000_000
