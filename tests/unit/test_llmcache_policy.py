"""The filesystem as a policy: a mount's log row by row, other traces as a mount would cut them, and damaged logs."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.cache.models import UNKNOWN
from llmcache.cache.policies import policy_class
from llmcache.cache.policies.base import Policy
from llmcache.cache.policies.llmcache import SCHEME
from llmcache.cache.steering import LARGE_EXTENT, SMALL_EXTENT
from llmcache.errors import DataError
from llmcache.fs.layout.tensors import Experts, ModelLayout, Tensor
from llmcache.trace.record import HIT, BlockSpace, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES
from tests.unit.trace_parts import KnownModels

MIB = 1 << 20
BLOCKS = LARGE_EXTENT // BLOCK_BYTES
LLAMA = Path(__file__).resolve().parents[2] / "traces" / "llama-arena.parquet"

Run = tuple[int, int, int]  # file, first, count


def trace_of(runs: list[Run], sizes: dict[str, int], extra: dict[str, str] | None = None) -> Trace:
    """A trace of these runs over files of these sizes, numbered in their order."""
    files = [TraceFile(number, name, 0, 0, 0, size) for number, (name, size) in enumerate(sizes.items())]
    columns = zip(*runs, strict=True)
    provenance = Provenance("mount" if extra else "synthetic", extra=extra or {})
    return Trace.build(range(len(runs)), *columns, files=files, provenance=provenance)


def policy_for(trace: Trace, capacity: int) -> tuple[Policy, BlockSpace]:
    space = BlockSpace.of([trace])
    policy = policy_class("llmcache")(capacity, space.blocks)
    policy.describe(space, trace.files, trace.provenance, UNKNOWN)
    return policy, space


def hits_of(trace: Trace, capacity: int) -> tuple[list[int], Policy]:
    """Hit blocks of each row, and the policy after the last."""
    policy, space = policy_for(trace, capacity)
    return policy.replay(space.place(trace), trace.count.astype(np.int64)).tolist(), policy


def passes(file: int, mib: int, number: int, step: int = BLOCKS) -> list[Run]:
    """A file read from front to back, some times, in runs of `step` blocks."""
    return [(file, first, step) for _ in range(number) for first in range(0, mib * BLOCKS, step)]


@pytest.mark.parametrize("step", [1 << 15, BLOCKS, 64])
def test_a_loop_hits_its_share_whatever_the_runs(step: int) -> None:
    trace = trace_of(passes(0, 128, 4, step), {"/loop": 128 * MIB})
    hits, policy = hits_of(trace, 50 * BLOCKS)
    in_passes = np.array(hits).reshape(4, -1).sum(1).tolist()
    assert in_passes[0] == 0 and in_passes[1] <= 50 * BLOCKS, "the end of the first pass, until it is known to loop"
    assert in_passes[2] >= 7 / 8 * in_passes[3], "all but what came before the second pass had proved it"
    assert 0.9 * 50 * BLOCKS < in_passes[3] <= len(policy.resident()) <= 50 * BLOCKS


def test_a_model_is_believed_to_loop_from_the_start() -> None:
    hits, _ = hits_of(trace_of(passes(0, 40, 2), {"/model.gguf": 40 * MIB}), 60 * BLOCKS)
    assert hits == [0] * 40 + [BLOCKS] * 40


def test_blocks_that_come_again_soon_are_hits_and_new_ones_of_a_missed_extent_are_not() -> None:
    trace = trace_of([(0, 0, 64), (0, 64, 64), (0, 32, 64), (0, 96, 64)], {"/loop": 100 * MIB})
    assert hits_of(trace, 100 * BLOCKS)[0] == [0, 0, 64, 32]


def test_small_files_are_kept_by_the_page_least_recently_read_first_out() -> None:
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


# Mixtures of experts

LAYERS, EXPERTS, SLICE = 2, 8, 300_000
DENSE = 2 * MIB


def mixture() -> ModelLayout:
    """Layers of a dense tensor and two tensors of eight experts, whose slices end within blocks."""
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


def tokens(layout: ModelLayout, routing: Sequence[Sequence[tuple[int, ...]]]) -> list[Run]:
    """What is read of the model for each token: dense tensors whole, of the others the slices of the chosen experts."""
    runs: list[Run] = []
    for token in routing:
        for tensor in layout.tensors:
            first = tensor.offset
            parts = [(first, tensor.size_bytes)]
            if tensor.experts > 1:
                chosen = token[int(tensor.layer.rpartition(".")[2])]
                parts = [(first + expert * SLICE, SLICE) for expert in chosen]
            for offset, size in parts:
                begin, end = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
                runs += [(0, block, min(32, end - block)) for block in range(begin, end, 32)]
    return runs


def mixture_hits(routing: Sequence[Sequence[tuple[int, ...]]], capacity_mib: float) -> tuple[float, Policy]:
    """Share of the experts' blocks that hit in the last half of the tokens, and the policy."""
    layout = mixture()
    runs = tokens(layout, routing)
    trace = trace_of(runs, {"/mixture.gguf": layout.tensors[-1].end})
    space = BlockSpace.of([trace])
    policy = policy_class("llmcache")(int(capacity_mib * MIB) // BLOCK_BYTES, space.blocks)
    policy.describe(space, trace.files, trace.provenance, KnownModels(mixture=Experts(layout), layout=layout))
    hits = policy.replay(space.place(trace), trace.count.astype(np.int64))
    sparse = np.array([tensor_at(layout, block).experts > 1 for _, block, _ in runs])
    sparse[: len(runs) // 2] = False
    return float(hits[sparse].sum() / trace.count[sparse].sum()), policy


def tensor_at(layout: ModelLayout, block: int) -> Tensor:
    return next(tensor for tensor in reversed(layout.tensors) if tensor.offset <= (block + 1) * BLOCK_BYTES - 1)


def test_popular_experts_stay_and_a_missed_one_comes_in_whole() -> None:
    source = random.Random(1)
    routing = [[(0, source.randrange(1, EXPERTS)) for _ in range(LAYERS)] for _ in range(60)]
    share, policy = mixture_hits(routing, 8.0)
    assert 0.5 <= share < 0.75, "expert 0 of each layer always, others by chance; not a part of a missed one"
    assert len(policy.resident()) <= 8 * MIB // BLOCK_BYTES


def test_all_experts_hit_where_they_fit_and_none_without_room() -> None:
    routing = [[(token % EXPERTS, (token + 3) % EXPERTS)] * LAYERS for token in range(40)]
    assert mixture_hits(routing, 20.0)[0] > 0.99
    assert mixture_hits(routing, 1.0)[0] < 0.1


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


def test_events_happen_before_their_row() -> None:
    rows = passes(0, 60, 4)
    halved, _ = hits_of(log_of(rows, [*BEGIN, [180, ["limit", 20 * MIB]]]), 40 * BLOCKS)
    steady, policy = hits_of(log_of(rows, BEGIN), 40 * BLOCKS)
    assert halved[:180] == steady[:180]
    assert sum(steady[180:]) == 40 * BLOCKS and sum(halved[180:]) == 20 * BLOCKS
    _, after = hits_of(log_of(rows, [*BEGIN, [240, ["end", "0"]]]), 40 * BLOCKS)
    assert len(policy.resident()) == 40 * BLOCKS
    assert len(after.resident()) == 0 and after.evictions == 40 * BLOCKS


def test_budget_changes_are_taken_in_proportion() -> None:
    trace = log_of(passes(0, 60, 5), [*BEGIN, [240, ["limit", 20 * MIB]]])
    hits, _ = hits_of(trace, 20 * BLOCKS)
    assert sum(hits[180:240]) == 20 * BLOCKS and sum(hits[240:]) == 10 * BLOCKS


def test_pages_of_small_files_were_read_from_storage_each_time() -> None:
    rows = [(1, 0, 3), (1, 0, 3)]
    assert hits_of(log_of(rows, BEGIN), 40 * BLOCKS)[0] == [0, 0]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (BEGIN[:1], "file 0 is in no event"),
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
def test_a_damaged_log_is_refused(events: Any, said: str) -> None:
    trace = log_of(passes(0, 60, 1), [])
    text = events if isinstance(events, str) else json.dumps(events)
    extra = {**trace.provenance.extra, "events": text}
    trace.provenance = dataclasses.replace(trace.provenance, extra=extra)
    with pytest.raises(DataError, match="provenance: .*" + said):
        hits_of(trace, 40 * BLOCKS)


def test_a_log_that_lacks_references_is_cut_like_any_trace() -> None:
    steer = log_of(passes(0, 60, 3), [], mode="steer")
    lossy = log_of(passes(0, 60, 3), [])
    lossy.provenance = dataclasses.replace(lossy.provenance, lost_events=1)
    for trace in (steer, lossy):
        assert sum(hits_of(trace, 60 * BLOCKS)[0]) == 120 * BLOCKS


# The real trace of llama.cpp


def test_the_real_trace_replays_to_what_the_mount_did() -> None:
    trace = Trace.load(LLAMA)
    budget = int(trace.provenance.extra["budget_bytes"])
    hits, policy = hits_of(trace, budget // BLOCK_BYTES)
    assert np.array_equal(np.array(hits) > 0, trace.miss == HIT)
    assert 0 < len(policy.resident()) * BLOCK_BYTES <= budget
    assert LLAMA.stat().st_size < 200_000


def test_the_real_trace_says_where_it_comes_from() -> None:
    provenance = Trace.load(LLAMA).provenance
    machine = json.loads(provenance.extra["machine"])
    assert machine["cpu"] and machine["versions"]["llama-cpp-python"]
    assert provenance.command.startswith("record_llama.py") and provenance.lost_events == 0
