"""Accesses and misses per layer, and the order in which passes visit the layers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from llmcache.cache.classify import classify
from llmcache.cache.layers import Layer, Layers
from llmcache.model.tensors import Tensor
from llmcache.report.classify import layer_tables
from llmcache.trace.record import HIT, MAP, MISS, READ, UNKNOWN, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES
from tests.unit.trace_parts import KnownModels

# Blocks: header 0-9, embedding 10-109, then layers of 100 blocks, each in two tensors.
HEADER, EMBEDDING = Tensor("header", 0, 10 * BLOCK_BYTES, ""), Tensor("token_embd.weight", 40_960, 100 * BLOCK_BYTES, "")
LAYERS = 8
FIRST = 110
Row = tuple[int, int, int, int]  # first, count, op, miss


def model(order: Sequence[int] = range(LAYERS)) -> list[Tensor]:
    """Return tensors in file order; `order` lists the layers in that order."""
    places = [(FIRST + 100 * place + 50 * part, layer, part) for place, layer in enumerate(order) for part in range(2)]
    names = ("attn_q", "ffn_up")
    layers = [Tensor(f"blk.{n}.{names[part]}.weight", at * BLOCK_BYTES, 50 * BLOCK_BYTES, "F32") for at, n, part in places]
    return [HEADER, EMBEDDING, *layers]


def trace(rows: Sequence[Row]) -> Trace:
    first, count, op, miss = zip(*rows, strict=True)
    files = [TraceFile(0, "/models/m.gguf", 1, 2, 0, (FIRST + 100 * LAYERS) * BLOCK_BYTES)]
    times = [number * 10**6 for number in range(len(rows))]
    return Trace.build(times, 0, first, count, op, miss, files=files, provenance=Provenance("test"))


def found(rows: Sequence[Row], tensors: Sequence[Tensor], batch_rows: int = 1 << 16) -> dict[str, Layer]:
    layers = Layers(KnownModels(tensors))
    for batch in trace(rows).batches(batch_rows):
        layers.count(batch)
    return {layer.name: layer for layer in layers.found()}


def read_layer(place: int, step: int = 16, miss: int = MISS) -> list[Row]:
    start = FIRST + 100 * place
    return [(first, min(step, start + 100 - first), MAP, miss) for first in range(start, start + 100, step)]


@pytest.mark.parametrize("batch_rows", [7, 1 << 16])
def test_every_block_counts_for_its_layer(batch_rows: int) -> None:
    """Compare with a count block by block for random runs over several layers."""
    rng = random.Random(5)
    end = FIRST + 100 * LAYERS
    rows: list[Row] = []
    for _ in range(500):
        first = rng.randrange(end)
        rows.append(
            (first, rng.randint(1, min(400, end - first)), rng.choice((READ, MAP)), rng.choice((HIT, MISS, UNKNOWN)))
        )
    tensors = model()
    expected: dict[str, list[int]] = {}
    for first, count, _, miss in rows:
        for block in range(first, first + count):
            (tensor,) = (each for each in tensors if each.offset <= block * BLOCK_BYTES < each.end)
            counts = expected.setdefault(tensor.layer, [0, 0, 0])
            counts[0] += 1
            counts[1] += miss != UNKNOWN
            counts[2] += miss == MISS
    got = {name: [each.accesses, each.known, each.missed] for name, each in found(rows, tensors, batch_rows).items()}
    assert got == expected


# Layers in the alphabetical order of safetensors files.
SCATTERED = [0, 1, 4, 5, 2, 7, 3, 6]


@pytest.mark.parametrize("threads", [1, 2])
def test_places_follow_the_order_of_use(threads: int) -> None:
    """File order differs from the order of use, and the first read of the file is sequential."""
    rng = random.Random(3)
    rows: list[Row] = [(first, 10, READ, MISS) for first in range(0, FIRST + 100 * LAYERS, 10)]
    for turn in range(12):  # in every second pass some layers stay cached
        kept = [layer for layer in range(LAYERS) if turn % 2 and (turn + layer) % 3 == 0]
        one_pass = [row for layer in range(LAYERS) if layer not in kept for row in read_layer(SCATTERED.index(layer))]
        if threads == 2:  # one thread is up to ten rows ahead
            one_pass = [one_pass[at] for at in sorted(range(len(one_pass)), key=lambda at: at + rng.uniform(0, 10))]
        rows += [(10 + 3, 1, MAP, MISS), *one_pass]
    layers = found(rows, model(SCATTERED))
    assert [layers[f"blk.{number}"].place for number in range(LAYERS)] == list(range(LAYERS))
    assert list(layers)[:LAYERS] == [f"blk.{number}" for number in range(LAYERS)]
    assert layers["token_embd.weight"].place == LAYERS, "used last, before the first layer of the next pass"
    assert layers["header"].place is None


def test_layers_are_in_the_document_and_the_table() -> None:
    rows = [row for _ in range(5) for place in range(LAYERS) for row in read_layer(place)]
    classes = classify(trace(rows).batches(), KnownModels(model()))
    layers = {layer["layer"]: layer for layer in classes.document("t.parquet")["layers"]}
    assert layers["blk.2"]["missed_blocks"] == layers["blk.2"]["accesses"] == 500
    assert (layers["blk.2"]["place"], layers["blk.2"]["path"]) == (2, "/models/m.gguf")
    heading, *_ = layer_tables(classes.layers, 80)
    assert heading == "layers of /models/m.gguf, in the order of a pass:"
    assert classify(trace(rows).batches()).document("t.parquet")["layers"] == []
    assert classify(trace(rows).batches(), KnownModels()).layers == ()
