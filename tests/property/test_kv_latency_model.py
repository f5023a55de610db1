"""The latency model for any machine, model and workload: more speed is never slower, more work never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.kv.planning.hardware import NUMBERS, PAPER_PC, Hardware
from llmcache.kv.planning.latency import DESIGNS, SYSTEMS, Latency, System, hillinfer, latency
from llmcache.kv.planning.placement import Placement, Workload, by_ssd_share
from llmcache.model.shapes import ModelShape, MoeMlp
from tests.conftest import examples

SPEEDS = [name for name in NUMBERS if name.endswith(("_per_s", "_flops"))]
POLICIES: list[System] = [*SYSTEMS.values(), *map(hillinfer, DESIGNS)]
LINKS = ("ssd to host", "device to host", "device internal", "host to gpu")
SLACK = 1 + 1e-9  # tolerance for sums in another order

models = st.builds(
    ModelShape,
    name=st.just("any"),
    layers=st.integers(1, 80),
    hidden=st.integers(64, 8192),
    heads=st.just(32),
    kv_heads=st.sampled_from([1, 4, 8, 32]),
    head_dim=st.sampled_from([64, 128, 256]),
    ffn=st.integers(64, 30000),
    vocabulary=st.integers(100, 200_000),
    gated=st.booleans(),
    tied=st.booleans(),
    kv_dtype=st.sampled_from(["float16", "bfloat16", "int8", "float32"]),
    moe=st.none()
    | st.builds(MoeMlp, st.just(1), experts=st.integers(8, 256), used=st.integers(1, 8), ffn=st.integers(64, 8192)),
)
workloads = st.builds(
    Workload,
    context=st.integers(1, 1 << 20),
    batch=st.integers(1, 16),
    alpha=st.floats(0.01, 1.0),
    host_evaluates=st.sampled_from(["keys", "keys and values"]),
    chunk_tokens=st.integers(1, 64),
    fetch_tokens=st.sampled_from([1, 16]),
    device_caches=st.booleans(),
)
shares = st.floats(0.0, 1.0)
policies = st.sampled_from(POLICIES)


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    faster = {name: draw(st.floats(0.01, 20.0)) for name in SPEEDS}
    sized = PAPER_PC.with_sizes(draw(st.integers(0, 96 << 30)), draw(st.integers(8 << 30, 512 << 30)))
    return sized.faster(**faster)


def at(share: float, system: System, machine: Hardware, model: ModelShape, workload: Workload) -> Latency:
    """Return the latency with a given share of the KV cache on the SSD; the sizes of pools do not depend on speeds."""
    places: Placement = by_ssd_share(model.kv_bytes(workload.context, workload.batch), share)
    return latency(system, machine, model, workload, places)


@settings(deadline=None, max_examples=examples(150))
@given(policies, machines(), models, workloads, shares, st.sampled_from(SPEEDS), st.floats(1.0, 50.0))
def test_more_bandwidth_is_never_slower(
    system: System, machine: Hardware, model: ModelShape, workload: Workload, share: float, name: str, factor: float
) -> None:
    before = at(share, system, machine, model, workload)
    after = at(share, system, machine.faster(**{name: factor}), model, workload)
    assert after.token_ns <= before.token_ns * SLACK
    assert after.prefill_ns <= before.prefill_ns * SLACK
    assert after.moved == before.moved


@settings(deadline=None, max_examples=examples(150))
@given(policies, machines(), models, workloads, st.integers(1, 1 << 20))
def test_a_larger_context_is_never_faster(
    system: System, machine: Hardware, model: ModelShape, workload: Workload, more: int
) -> None:
    larger = replace(workload, context=workload.context + more)
    before, after = (latency(system, machine, model, one) for one in (workload, larger))
    assert before.token_ns <= after.token_ns * SLACK
    assert before.prefill_ns <= after.prefill_ns * SLACK


@settings(deadline=None, max_examples=examples(150))
@given(policies, machines(), models, workloads, shares, st.floats(0.01, 1.0))
def test_a_larger_alpha_never_moves_fewer_bytes(
    system: System, machine: Hardware, model: ModelShape, workload: Workload, share: float, other: float
) -> None:
    low, high = sorted((workload.alpha, other))
    less, more = (at(share, system, machine, model, replace(workload, alpha=alpha)) for alpha in (low, high))
    for link in LINKS:
        assert less.moved[link] <= more.moved[link] * SLACK + 1e-6
    assert less.token_ns <= more.token_ns * SLACK


@settings(deadline=None, max_examples=examples(150))
@given(policies, machines(), models, workloads)
def test_the_kv_cache_is_placed_once_and_stages_overlap_plausibly(
    system: System, machine: Hardware, model: ModelShape, workload: Workload
) -> None:
    found = latency(system, machine, model, workload)
    kv = model.kv_bytes(workload.context, workload.batch)
    assert found.places.total == pytest.approx(kv)
    assert found.places.host <= found.found.host_kv + 1 and found.places.gpu in (0, kv)
    assert found.found.weights_on_gpu + found.found.weights_on_host == pytest.approx(model.weight_bytes)
    # The duration of a step is between its longest stage and the sum of all stages.
    assert max(found.stages.values()) <= found.token_ns * SLACK
    assert found.token_ns <= sum(found.stages.values()) * SLACK
    assert 0 <= found.idle_share < 1
    assert all(value >= 0 for value in [*found.busy.values(), *found.moved.values()])
