"""The mount as a simulated policy: replay of a mount's log, of other traces, and of damaged logs."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.cache.policies import policy_class
from llmcache.cache.policies.base import Policy
from llmcache.cache.policies.llmcache import SCHEME
from llmcache.cache.space import LARGE_EXTENT, SMALL_EXTENT
from llmcache.errors import DataError
from llmcache.model.modelfile import UNKNOWN, Models
from llmcache.model.tensors import Experts, ModelLayout, Tensor
from llmcache.trace.record import HIT, BlockSpace, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES
from tests.unit.trace_parts import KnownModels

MIB = 1 << 20
BLOCKS = LARGE_EXTENT // BLOCK_BYTES
LLAMA = Path(__file__).resolve().parents[2] / "traces" / "llama-arena.parquet"

Run = tuple[int, int, int]  # file, first, count


def trace_of(runs: list[Run], sizes: dict[str, int], extra: dict[str, str] | None = None) -> Trace:
    """Return a trace of these runs over files of these sizes, numbered in their order."""
    files = [TraceFile(number, name, 0, 0, 0, size) for number, (name, size) in enumerate(sizes.items())]
    columns = zip(*runs, strict=True)
    provenance = Provenance("mount" if extra else "synthetic", extra=extra or {})
    return Trace.build(range(len(runs)), *columns, files=files, provenance=provenance)


def policy_for(trace: Trace, capacity: int, models: Models = UNKNOWN) -> tuple[Policy, BlockSpace]:
    space = BlockSpace.of([trace])
    policy = policy_class("llmcache")(capacity, space.blocks)
    policy.describe(space, trace.files, trace.provenance, models)
    return policy, space


def hits_of(trace: Trace, capacity: int) -> tuple[list[int], Policy]:
    """Return the hit blocks of each row, and the policy after the last row."""
    policy, space = policy_for(trace, capacity)
    return policy.replay(space.place(trace), trace.count.astype(np.int64)).tolist(), policy


def passes(file: int, mib: int, number: int, step: int = BLOCKS) -> list[Run]:
    """Return runs of `step` blocks that read a file from front to back `number` times."""
    return [(file, first, step) for _ in range(number) for first in range(0, mib * BLOCKS, step)]


@pytest.mark.parametrize("step", [1 << 15, BLOCKS, 64])
def test_hits_of_a_loop_do_not_depend_on_the_size_of_runs(step: int) -> None:
    trace = trace_of(passes(0, 128, 4, step), {"/loop": 128 * MIB})
    hits, policy = hits_of(trace, 50 * BLOCKS)
    in_passes = np.array(hits).reshape(4, -1).sum(1).tolist()
    assert in_passes[0] == 0 and in_passes[1] <= 50 * BLOCKS, "the end of the first pass, before it is known to loop"
    assert in_passes[2] >= 7 / 8 * in_passes[3], "all but the blocks read before the second pass confirmed the loop"
    assert 0.9 * 50 * BLOCKS < in_passes[3] <= len(policy.resident()) <= 50 * BLOCKS


def test_new_blocks_of_a_missed_extent_are_not_hits() -> None:
    trace = trace_of([(0, 0, 64), (0, 64, 64), (0, 32, 64), (0, 96, 64)], {"/loop": 100 * MIB})
    assert hits_of(trace, 100 * BLOCKS)[0] == [0, 0, 64, 32]
    model = trace_of(passes(0, 40, 2), {"/model.gguf": 40 * MIB})  # treated as a loop from the start
    assert hits_of(model, 60 * BLOCKS)[0] == [0] * 40 + [BLOCKS] * 40


def test_pages_of_small_files_are_evicted_in_lru_order() -> None:
    runs = [(0, 0, 10), (0, 5, 10), (1, 0, 20), (0, 0, 5)]
    hits, policy = hits_of(trace_of(runs, {"/a.json": MIB, "/b.json": MIB}), 25)
    assert hits == [0, 5, 0, 0]
    assert policy.evictions == 15
    assert len(policy.resident()) == 25


def test_resident_blocks_are_those_that_hit() -> None:
    trace = trace_of([*passes(0, 50, 3), *passes(1, 80, 3)], {"/a": 50 * MIB, "/b": 80 * MIB})
    policy, space = policy_for(trace, 40 * BLOCKS)
    first, count = space.place(trace), trace.count.astype(np.int64)
    policy.replay(first, count)
    resident = set(policy.resident().tolist())
    last = slice(len(trace) - 80, None)
    held = [start in resident for start in first[last].tolist()]
    assert (policy.replay(first[last], count[last]) > 0).tolist() == held and any(held)


# MoE models

LAYERS, EXPERTS, SLICE = 2, 8, 300_000
DENSE = 2 * MIB


def mixture() -> ModelLayout:
    """Return layers of a dense tensor and two tensors of eight experts, whose slices end inside blocks."""
    tensors, at = [], 4096
    for layer in range(LAYERS):
        for name, size, experts in (
            ("attn_q", DENSE, 1),
            ("ffn_gate_exps", SLICE * EXPERTS, EXPERTS),
            ("ffn_down_exps", SLICE * EXPERTS, EXPERTS),
        ):
            tensors.append(Tensor(f"blk.{layer}.{name}.weight", at, size, "Q8_0", experts))
            at += size
    return ModelLayout("gguf", 4096, tuple(tensors), experts_used=2)


def tokens(layout: ModelLayout, routing: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[Run, bool]]:
    """Return the reads of each token, whole dense tensors and slices of experts, each with a flag for experts."""
    runs: list[tuple[Run, bool]] = []
    for token in routing:
        for tensor in layout.tensors:
            parts = [(tensor.offset, tensor.size_bytes)]
            if tensor.experts > 1:
                chosen = token[int(tensor.layer.rpartition(".")[2])]
                parts = [(tensor.offset + expert * SLICE, SLICE) for expert in chosen]
            for offset, size in parts:
                begin, end = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
                runs += [((0, block, min(32, end - block)), tensor.experts > 1) for block in range(begin, end, 32)]
    return runs


def mixture_hits(routing: Sequence[Sequence[tuple[int, ...]]], capacity_mib: float) -> tuple[float, Policy]:
    """Return the share of expert blocks that hit in the last half of the tokens, and the policy."""
    layout = mixture()
    runs, of_experts = zip(*tokens(layout, routing), strict=True)
    trace = trace_of(list(runs), {"/mixture.gguf": layout.tensors[-1].end})
    models = KnownModels(moe=Experts(layout), layout=layout)
    policy, space = policy_for(trace, int(capacity_mib * MIB) // BLOCK_BYTES, models)
    hits = policy.replay(space.place(trace), trace.count.astype(np.int64))
    sparse = np.array(of_experts)
    sparse[: len(runs) // 2] = False
    return float(hits[sparse].sum() / trace.count[sparse].sum()), policy


def test_popular_experts_stay_and_missed_ones_are_loaded_whole() -> None:
    source = random.Random(1)
    share, policy = mixture_hits([[(0, source.randrange(1, EXPERTS)) for _ in range(LAYERS)] for _ in range(60)], 8.0)
    assert 0.5 <= share < 0.75, "expert 0 of each layer always hits, others by chance; no part of a missed expert hits"
    assert len(policy.resident()) <= 8 * MIB // BLOCK_BYTES
    routing = [[(token % EXPERTS, (token + 3) % EXPERTS)] * LAYERS for token in range(40)]
    assert mixture_hits(routing, 20.0)[0] > 0.99, "all experts fit"
    assert mixture_hits(routing, 1.0)[0] < 0.1, "no room"


# A mount's log


def log_of(rows: list[Run], events: list[Any], budget: int = 40 * MIB, **more: str) -> Trace:
    sizes = {"/loop": 60 * MIB, "/small": MIB}
    extra = {
        "mount": SCHEME,
        "mode": "arena",
        "budget_bytes": str(budget),
        "rows": str(len(rows)),
        "events": json.dumps(events),
    }
    return trace_of(rows, sizes, extra | more)


BEGIN: list[Any] = [
    [0, ["space", "0", LARGE_EXTENT, [[60 * MIB, 0, 60]], "loop"]],
    [0, ["file", 0, "0", 0]],
    [0, ["space", "1", SMALL_EXTENT, [[MIB, 0, 8]], "hot"]],
    [0, ["file", 1, "1", 0]],
]


def test_events_apply_before_their_row() -> None:
    rows = passes(0, 60, 4)
    halved, _ = hits_of(log_of(rows, [*BEGIN, [180, ["limit", 20 * MIB]]]), 40 * BLOCKS)
    steady, policy = hits_of(log_of(rows, BEGIN), 40 * BLOCKS)
    assert halved[:180] == steady[:180]
    assert sum(steady[180:]) == 40 * BLOCKS and sum(halved[180:]) == 20 * BLOCKS
    smaller, _ = hits_of(log_of(rows, [*BEGIN, [180, ["limit", 20 * MIB]]]), 20 * BLOCKS)
    assert sum(smaller[180:]) == 10 * BLOCKS, "scaled to the capacity of the replay"
    _, after = hits_of(log_of(rows, [*BEGIN, [240, ["end", "0"]]]), 40 * BLOCKS)
    assert len(policy.resident()) == 40 * BLOCKS
    assert len(after.resident()) == 0 and after.evictions == 40 * BLOCKS
    pages = [(1, 0, 3), (1, 0, 3)]
    assert hits_of(log_of(pages, BEGIN), 40 * BLOCKS)[0] == [0, 0], "these pages were read from storage each time"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (BEGIN[:1], "no event names file 0"),
        ([*BEGIN, [0, ["dance", "0"]]], "dance"),
        ([*BEGIN, [0, ["close", "9"]]], "close"),
        ([*BEGIN, [0, ["convoy"]]], "convoy"),
        ([[0, ["space", "0", LARGE_EXTENT, [[MIB, 0, 1]], "loop"]], [0, ["file", 0, "0", 0]]], "no extent 1"),
        ([[0, ["space", "0", LARGE_EXTENT, [[MIB, 0, 1 << 60]], "loop"]]], "extents"),
        ([*BEGIN, [0, ["guess", "0", [], [], [[0, 1 << 60]]]]], "IndexError"),
        ([*BEGIN, [0, ["guess", "0", [[0, 60]] * 9, [], []]]], "IndexError"),
        ("[[1e400, []]]", "events"),
        ("[" * 100_000, "events"),
        ([[0]], "events"),
        ("{", "events"),
    ],
)
def test_a_damaged_log_is_refused_with_a_reason(events: Any, said: str) -> None:
    trace = log_of(passes(0, 60, 1), [])
    text = events if isinstance(events, str) else json.dumps(events)
    extra = {**trace.provenance.extra, "events": text}
    trace.provenance = dataclasses.replace(trace.provenance, extra=extra)
    with pytest.raises(DataError, match="provenance: .*" + said):
        hits_of(trace, 40 * BLOCKS)


def test_an_incomplete_log_is_treated_like_any_trace() -> None:
    steer = log_of(passes(0, 60, 3), [], mode="steer")
    lossy = log_of(passes(0, 60, 3), [])
    lossy.provenance = dataclasses.replace(lossy.provenance, lost_events=1)
    for trace in (steer, lossy):
        assert sum(hits_of(trace, 60 * BLOCKS)[0]) == 120 * BLOCKS


# The recorded trace of llama.cpp


def test_the_recorded_trace_replays_to_the_hits_of_the_mount() -> None:
    trace = Trace.load(LLAMA)
    origin = trace.provenance
    budget = int(origin.extra["budget_bytes"])
    hits, policy = hits_of(trace, budget // BLOCK_BYTES)
    assert np.array_equal(np.array(hits) > 0, trace.miss == HIT)
    assert 0 < len(policy.resident()) * BLOCK_BYTES <= budget
    assert LLAMA.stat().st_size < 200_000
    machine = json.loads(origin.extra["machine"])
    assert machine["cpu"] and machine["versions"]["llama-cpp-python"]
    assert origin.command.startswith("record_llama.py") and origin.lost_events == 0
