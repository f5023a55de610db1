"""Classes of whole traces: the paper's eight applications as the paper describes them, hard shapes, tensor names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmcache.cache.classify import READ_OP, WRITE_OP, Classification, TraceClasses, classify
from llmcache.cache.detector import HOT, LOOP, SEQ
from llmcache.model.tensors import Experts, ModelLayout, Tensor
from llmcache.papers.traces import SHAPES
from llmcache.trace.record import MAP, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES
from tests.unit.trace_parts import KnownModels

LEAST = 128 << 10


def row(found: TraceClasses, ending: str, kind: str, op: str = READ_OP) -> Classification:
    """Return the only class of this kind in the file whose path ends with `ending`."""
    (only,) = (each for each in found.rows if each.path.endswith(ending) and (each.kind, each.op) == (kind, op))
    return only


def blocks(of: Classification) -> tuple[int | None, int | None, float]:
    return of.first_block, of.last_block, of.size_bytes / BLOCK_BYTES


def large(found: TraceClasses) -> set[tuple[str, str, str]]:
    """Return path, op and class of all rows of at least `LEAST` bytes."""
    return {(each.path.rpartition("/")[2], each.op, each.kind) for each in found.rows if each.size_bytes >= LEAST}


def one_file(accesses: list[tuple[int, int]], op: int = 0, size_bytes: int = 0) -> Trace:
    """Return a trace of (first, count) accesses in one file, 1 ms apart."""
    first, count = zip(*accesses, strict=True)
    files = [TraceFile(0, "/models/m.gguf", 1, 2, 0, size_bytes)]
    times = [number * 10**6 for number in range(len(accesses))]
    return Trace.build(times, 0, first, count, op, files=files, provenance=Provenance("test", lost_events=3))


def ai_notes(found: TraceClasses) -> None:
    """Figure 1a: scan of 0-7500, hot near 7500, write loop 10,000-15,000, read loop 15,000-25,000."""
    assert blocks(row(found, "setup.bin", SEQ)) == (0, 7399, 7400)
    assert blocks(row(found, "engine.idx", HOT)) == (0, 299, 300)
    write, read = row(found, "handwriting.db", LOOP, WRITE_OP), row(found, "weights.bin", LOOP)
    assert (*blocks(write), write.passes, write.order, write.active) == (0, 4999, 5000, 6, "ascending", True)
    assert (*blocks(read), read.passes, read.order, read.active) == (0, 9999, 10_000, 12, "ascending", True)
    assert read.period_ns is not None and 8e9 < read.period_ns < 10e9  # pauses of 8 s, every second one 2 s longer
    assert write.period_ns is not None and 16e9 < write.period_ns < 20e9
    assert large(found) == {
        ("setup.bin", "read", SEQ),
        ("engine.idx", "read", HOT),
        ("handwriting.db", "write", LOOP),
        ("translation-weights.bin", "read", LOOP),
    }


def ai_translate(found: TraceClasses) -> None:
    """Figure 1b: two read loops and temporary copies of a database."""
    source, target = row(found, "source.bin", LOOP), row(found, "target.bin", LOOP)
    assert (blocks(source), blocks(target)) == ((0, 249, 250), (0, 261, 262))
    assert found.totals.loop_bytes == 512 * BLOCK_BYTES  # section 4.2: "AI Translate (≈2 MB loop)"
    assert found.size_command == "llmcache size --loop 2.097152M --hot 0.24576M"
    assert row(found, "engine.idx", HOT).size_bytes == 60 * BLOCK_BYTES
    assert row(found, "copy.db", LOOP, WRITE_OP).passes == 6
    assert row(found, "setup.bin", SEQ).size_bytes == 200 * BLOCK_BYTES


def copied(written: int, passes: int) -> Callable[[TraceClasses], None]:
    """Figures 1c and 1d: a periodic write loop, a scan and a hot set; no read loop."""

    def check(found: TraceClasses) -> None:
        loop = row(found, "model.tflite", LOOP, WRITE_OP)
        assert (*blocks(loop), loop.passes) == (0, written - 1, written, passes)
        assert found.totals.loop_bytes == 0 and found.size_command is None
        assert found.totals.write_loop_bytes == written * BLOCK_BYTES

    return check


def remote(found: TraceClasses) -> None:
    """Section 3.2: sequential accesses and hot sets; retried prompts and probabilistic rereads are not loops."""
    assert {each.kind for each in found.rows if each.size_bytes >= LEAST} == {SEQ, HOT}
    assert found.totals.loop_share < 0.001
    assert found.totals.once_share > 0.6


def whole(file: str, size: int) -> Callable[[TraceClasses], None]:
    """The loop is reported as one piece that covers the file."""

    def check(found: TraceClasses) -> None:
        loop = row(found, file, LOOP)
        assert (*blocks(loop), len(loop.pieces)) == (0, size - 1, size, 1)
        assert loop.regularity == 1

    return check


def page_order(found: TraceClasses) -> None:
    """Threads that interleave their blocks form one loop."""
    loop = next(each for each in found.rows if each.path.endswith("model.gguf") and each.kind == LOOP)
    assert loop.passes == 7 and blocks(loop)[2] == pytest.approx(9600, rel=0.01)


def multi_loop(found: TraceClasses) -> None:
    """Loops of different periods are separate."""
    passes = {name: row(found, f"{name}.gguf", LOOP).passes for name in ("draft", "encoder", "decoder", "vision")}
    assert passes == {"draft": 44, "encoder": 22, "decoder": 8, "vision": 4}
    periods = [row(found, f"{name}.gguf", LOOP).period_blocks or 0 for name in passes]
    assert periods == sorted(periods)


def prefill_decode(found: TraceClasses) -> None:
    """Blocks that decoding reads are separated from those that only prefill reads."""
    decode, prefill = sorted(
        (each for each in found.rows if each.path.endswith("model.gguf") and each.kind == LOOP),
        key=lambda each: -each.passes,
    )
    assert (decode.size_bytes, len(decode.pieces)) == (24 * 280 * BLOCK_BYTES, 24)
    assert (prefill.size_bytes, len(prefill.pieces)) == (24 * 120 * BLOCK_BYTES, 24)
    assert prefill.passes == 12


def moe_routing(found: TraceClasses) -> None:
    """Expert slices are separated from the weights that all tokens read."""
    loops = [each for each in found.rows if each.path.endswith("experts.gguf") and each.kind == LOOP]
    (shared,) = (each for each in loops if each.passes == 120)
    assert (shared.size_bytes, len(shared.pieces), shared.regularity) == (8 * 60 * BLOCK_BYTES, 8, 1)
    experts = max((each for each in loops if each is not shared), key=lambda each: each.size_bytes)
    assert experts.regularity is not None and experts.regularity < 0.75
    assert len(loops) <= 10


def model_switch(found: TraceClasses) -> None:
    """Only the last of three models is active."""
    active = {name: row(found, f"model-{name}.gguf", LOOP).active for name in "abc"}
    assert active == {"a": False, "b": False, "c": True}
    assert row(found, "model-a.gguf", LOOP).passes == 20


def random(found: TraceClasses) -> None:
    """Random accesses form no loop."""
    assert found.totals.loop_bytes == 0
    assert found.totals.hot_share > 0.7


CHECKS: dict[str, Callable[[TraceClasses], None]] = {
    **{check.__name__: check for check in (ai_notes, ai_translate, page_order, multi_loop, prefill_decode, moe_routing)},
    **{check.__name__: check for check in (model_switch, random)},
    "claude": remote,
    "text_classification": copied(6200, 20),
    "interleave": whole("model-a.gguf", 6000),
    "noisy": whole("model.gguf", 10_000),
}
"""Checks per trace shape. Each shape is classified once for all its checks, because that takes about 1 s."""
FIRST_ROWS = {"random": 30_000, "noisy": 30_000, "interleave": 40_000, "page_order": 60_000}
"""Rows used of the longest shapes, which continue in the same way."""


@pytest.mark.parametrize("name", CHECKS)
def test_classes_match_the_generated_shapes(name: str) -> None:
    trace = SHAPES[name]()
    trace = trace.slice(0, FIRST_ROWS.get(name, len(trace)))
    found = classify(trace.batches())
    assert sum(each.accesses for each in found.rows) == trace.accesses == found.accesses
    assert sum(each.share for each in found.rows) == pytest.approx(1)
    sizes = {file.id: file.size_bytes for file in trace.files}
    for each in found.rows:
        assert 0 < each.size_bytes <= sizes[each.file]
        assert each.first_block is not None and each.last_block is not None
        assert 0 <= each.first_block <= each.last_block < sizes[each.file] // BLOCK_BYTES
    CHECKS[name](found)


FORWARD = range(0, 2000, 100)
TURNED = (6000, 0, 4000, 2000)


@pytest.mark.parametrize(
    ("one_pass", "order", "pieces"),
    [
        ([(at, 100) for at in FORWARD], "ascending", ((0, 1999),)),
        ([(at, 100) for at in FORWARD[::-1]], "descending", tuple((at, at + 99) for at in FORWARD[::-1])),
        ([(start, 2000) for start in TURNED], "other", tuple((start, start + 1999) for start in TURNED)),
        ([(start + at, 100) for start in TURNED for at in FORWARD], "other", tuple((at, at + 1999) for at in TURNED)),
    ],
)
def test_order_of_a_loop(one_pass: list[tuple[int, int]], order: str, pieces: tuple[tuple[int, int], ...]) -> None:
    (loop,) = classify(one_file(one_pass * 6).batches()).rows
    assert (loop.kind, loop.order, loop.pieces) == (LOOP, order, pieces)


def test_blocks_read_twice_count_once_in_sizes() -> None:
    """A buffered reader reads the end of a file first, then continues with the block in which it stopped."""
    (seq,) = classify(one_file([(0, 49), (9000, 1), (48, 2100), (9001, 1)]).batches()).rows
    assert (seq.kind, seq.size_bytes) == (SEQ, 2150 * BLOCK_BYTES)
    within = classify(one_file([(0, 1000), *[(300, 2), (5000, 1), (310, 3)] * 100]).batches())
    assert row(within, "m.gguf", HOT).size_bytes == 6 * BLOCK_BYTES
    assert row(within, "m.gguf", SEQ).size_bytes == 995 * BLOCK_BYTES
    (loop,) = classify(one_file([(0, 100)] * 5, size_bytes=99 * BLOCK_BYTES + 7).batches()).rows
    assert loop.size_bytes == 99 * BLOCK_BYTES + 7, "the last block of a file is partial"


def test_consecutive_loops_need_only_the_cache_of_the_largest() -> None:
    found = classify(one_file([(0, 500)] * 6 + [(10_000, 800)] * 6).batches())
    assert found.totals.loop_bytes == 1300 * BLOCK_BYTES
    assert found.totals.loop_at_once_bytes == 800 * BLOCK_BYTES
    both = classify(one_file([(0, 500), (10_000, 800)] * 6).batches())
    assert both.totals.loop_at_once_bytes == 1300 * BLOCK_BYTES
    made = one_file([(0, 500), (10_000, 800)] * 6)
    timeless = classify(Trace.build(0, 0, made.first, made.count, files=made.files, provenance=made.provenance).batches())
    assert timeless.totals.loop_at_once_bytes == 1300 * BLOCK_BYTES, "all rows have the same time"


def test_rows_name_the_tensors_they_overlap() -> None:
    size = 100 * BLOCK_BYTES
    places = {"header": (0, 100), "blk.0.attn.weight": (4096, size - 4096), "blk.1.attn.weight": (size, size)}
    places["token_embd.weight"] = (2 * size, size)
    tensors = [Tensor(name, offset, size_bytes, "F32") for name, (offset, size_bytes) in places.items()]
    accesses = [*[(0, 200)] * 6, (200, 100)]
    found = classify(one_file(accesses).batches(), KnownModels(tensors, only=frozenset({0})))
    assert row(found, "m.gguf", LOOP).tensors == ("header", "blk.0.attn.weight", "blk.1.attn.weight")
    assert row(found, "m.gguf", SEQ).tensors == ("token_embd.weight",)


def test_small_rows_are_summed_up_in_the_document() -> None:
    found = classify(one_file([*[(0, 500), (9000, 2)] * 6, (20_000, 400)]).batches())
    document = found.document("t.parquet", min_bytes=64_000)
    assert (document["schema"], document["tier"], document["lost_events"]) == ("llmcache.classify/1", "test", 3)
    assert [each["class"] for each in document["rows"]] == [LOOP, SEQ]
    assert (document["smaller"]["rows"], document["smaller"]["bytes"]) == (1, 2 * BLOCK_BYTES)
    assert sum(each["share"] for each in document["rows"]) + document["smaller"]["share"] == pytest.approx(1)
    assert document["totals"]["hot_bytes"] == 2 * BLOCK_BYTES
    assert document["rows"][0]["pieces"] == ((0, 499),)


SLICE = 70 * BLOCK_BYTES + 1000


def moe_model(layers: int, experts: int) -> Experts:
    """Return layers of an up tensor, its bias and a down tensor, whose slices start and end inside blocks."""
    tensors, at = [], 100 * BLOCK_BYTES
    for layer in range(layers):
        for part, size in (("up_exps.weight", SLICE), ("up_exps.bias", 11_520), ("down_exps.weight", SLICE)):
            tensors.append(Tensor(f"blk.{layer}.ffn_{part}", at, experts * size, "F32", experts))
            at += experts * size
        at += 30 * BLOCK_BYTES
    return Experts(ModelLayout("gguf", 0, tuple(tensors)))


@pytest.mark.parametrize(("layers", "batch_rows"), [(1, 1 << 16), (5, 7)])
def test_pages_mapped_around_a_fault_are_not_uses_of_experts(layers: int, batch_rows: int) -> None:
    """A fault maps 16 blocks, which may include slices of unused neighboring experts and of the next layer."""
    experts = moe_model(layers, 6)
    tokens = [[{(token + layer) % 6, (token * layer + 5) % 6} for layer in range(layers)] for token in range(40)]
    accesses: list[tuple[int, int]] = []
    for token in tokens:
        accesses.append((0, 50))
        for (_, first, _), chosen in zip(experts.layers, token, strict=True):
            for part in range(2):
                for expert in sorted(chosen):
                    start, size = experts.ranges(first + expert)[part]
                    begin, end = start // BLOCK_BYTES // 16, (start + size - 1) // BLOCK_BYTES // 16
                    accesses += [(16 * window, 16) for window in range(begin, end + 1)]
    batches = one_file(accesses, MAP).batches(batch_rows)
    (found,) = classify(batches, KnownModels(moe=experts)).moe_models
    for number, layer in enumerate(found.layers):
        assert layer.visits == len(tokens)
        assert list(layer.popularity) == [sum(expert in token[number] for token in tokens) for expert in range(6)]
    assert found.incomplete is not None and "mmap" in found.incomplete


def test_lost_events_make_expert_counts_incomplete() -> None:
    experts = moe_model(2, 6)
    start, size = experts.ranges(0)[0]
    read = one_file([(start // BLOCK_BYTES, size // BLOCK_BYTES)])
    (found,) = classify([read], KnownModels(moe=experts)).moe_models
    assert found.incomplete is not None and "lost_events is 3" in found.incomplete
    first, second = found.layers
    assert (first.popularity, first.again, first.top(4)) == ((1, 0, 0, 0, 0, 0), None, 1)
    assert (second.popularity, second.visits, second.top(4)) == ((0,) * 6, 0, None)
    assert classify([one_file([(0, 50)])], KnownModels(moe=experts)).moe_models == ()
