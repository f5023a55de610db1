"""What the emulated device does with a part of a layer: scores given pages, sends single rows, and reads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import DataError
from llmcache.kv.csd import PROFILES, CsdProfile, EmulatedCsd
from llmcache.kv.csd.host import page_runs
from llmcache.kv.csd.wire import shares
from llmcache.kv.kernels import score
from llmcache.kv.spill import KvShape, SpillReader
from tests.unit.kv_parts import flip

SHAPE = KvShape("tiny", layers=1, kv_heads=2, head_dim=64, page_tokens=16, value_dim=32)
Make = Callable[..., EmulatedCsd]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make a device over tmp/a.kv; whatever a test does, its process is gone afterwards."""
    made: list[EmulatedCsd] = []

    def start(shape: KvShape = SHAPE, profile: CsdProfile = PROFILES["none"]) -> EmulatedCsd:
        made.append(EmulatedCsd(tmp_path / "a.kv", shape, profile, create=True, threads=1))
        made[-1].activate(made[-1].load())
        return made[-1]

    yield start
    for device in made:
        device.kill()


def filled(device: EmulatedCsd, tokens: int) -> list[Any]:
    """Write `tokens` to layer 0 of sequence 0; returns keys, values and scales [kv_heads, tokens, ..]."""
    random, shape = np.random.default_rng(1), device.shape
    rows = [random.standard_normal((2, tokens, dim), dtype=np.float32) for dim in (shape.head_dim, shape.value_dim)]
    arrays: list[Any] = [(30 * row).astype(shape.numpy_dtype) for row in rows]
    if shape.dtype == "int8":
        arrays += [random.random((2, tokens), dtype=np.float32) + 1 for _ in range(2)]
    device.append(0, 0, *arrays)
    device.append_tokens(0, np.arange(tokens), np.arange(tokens))
    return arrays


def test_only_the_pages_named_are_read_and_scored(make: Make) -> None:
    device = make()
    keys = filled(device, 5000)[0]
    queries = np.random.default_rng(2).standard_normal((4, 64), dtype=np.float32)
    pages = [3, 4, 5, 70, 100, 312]  # over several extents; the last is not full
    found = np.full((2, 5000), np.nan, np.float32)
    running = device.execute(0, queries, 0, 0, pages=pages, block_tokens=20)
    for block in running:
        assert np.isnan(found[block.head, block.positions]).all()
        found[block.head, block.positions] = block.scores
    tokens = [token for page in pages for token in range(page * 16, min(5000, page * 16 + 16))]
    wanted = score(queries[None], keys[None])[0]
    assert (found[:, tokens] == wanted.astype(np.float16).astype(np.float32)[:, tokens]).all()
    assert np.isnan(np.delete(found, tokens, axis=1)).all()
    report = running.report
    assert report is not None and report.scored_keys == 2 * len(tokens)
    assert report.internal_read_bytes == len(pages) * SHAPE.key_slot_bytes
    assert report.link_to_device_bytes == 64 + queries.nbytes + 4 * 8, "four runs of pages, 8 bytes each"
    with pytest.raises(ValueError, match="not all of"):
        device.execute(0, queries, 0, 0, pages=[313]).drain()
    with pytest.raises(ValueError, match="pages: none"):
        device.execute(0, queries, 0, 0, pages=[])


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_are_gathered_near_the_data(make: Make, dtype: str) -> None:
    shape = KvShape("tiny", 1, 2, 64, dtype, page_tokens=16, value_dim=32)
    device = make(shape, CsdProfile("modelled", 1e9, 1e9, 1e8, 1000))
    arrays = filled(device, 5000)
    random = np.random.default_rng(3)
    positions = [np.sort(random.choice(4990, size, replace=False)) for size in (700, 3)]
    written = device.report.internal_read_bytes, device.report.link_to_host_bytes, device.report.modelled_ns
    rows = device.gather(0, 0, positions)
    for side, got in zip(arrays, (rows.keys, rows.values, rows.key_scales, rows.value_scales), strict=False):
        wanted = np.concatenate([side[head, of_head] for head, of_head in enumerate(positions)])
        assert got is not None and got.dtype == wanted.dtype and (got == wanted).all()
    pages = len(np.unique(np.concatenate(positions) // 16))
    assert device.report.internal_read_bytes - written[0] == pages * (shape.key_slot_bytes + shape.value_slot_bytes)
    moved = 703 * (96 * shape.numpy_dtype.itemsize + (8 if dtype == "int8" else 0))
    assert device.report.link_to_host_bytes - written[1] == moved + 16
    assert device.report.modelled_ns - written[2] >= 1000 + moved * 10, "the link is the slowest"


def test_nothing_is_asked_for(make: Make) -> None:
    device = make()
    filled(device, 100)
    commands = device.report.commands
    rows = device.gather(0, 0, [np.empty(0, np.int64)] * 2)
    assert rows.keys.shape == (0, 64) and rows.values.shape == (0, 32) and device.report.commands == commands
    assert (device.gather(0, 0, [np.array([5]), np.empty(0, np.int64)]).keys.shape) == (1, 64)


def test_more_rows_than_the_ring_holds(make: Make) -> None:
    shape = KvShape("big", 1, 2, 128, "float32", page_tokens=16)
    device = make(shape)
    keys, values = filled(device, 12_000)
    assert keys.nbytes + values.nbytes > 2 << 23
    rows = device.gather(0, 0, [np.arange(12_000)] * 2)
    assert (rows.keys == keys.reshape(-1, 128)).all() and (rows.values == values.reshape(-1, 128)).all()


def test_rows_that_cannot_be(make: Make) -> None:
    device = make()
    filled(device, 100)
    for wrong in ([1, 1], [2, 1], [-1], [112]):
        with pytest.raises(ValueError, match=r"positions: |has 7 pages"):
            device.gather(0, 0, [np.array(wrong)] * 2)
    with pytest.raises(ValueError, match="positions: for 1 heads, the model has 2"):
        device.gather(0, 0, [np.array([1])])
    device.flush()
    with SpillReader.open(device.path) as file:
        place = file.key_ranges(0, 0)[0].offset + SHAPE.key_slot_bytes * 2 + 5
    flip(device.path, place)
    with pytest.raises(DataError, match="keys: the checksum of page 2"):
        device.gather(0, 0, [np.array([1, 33])] * 2)
    assert device.gather(0, 0, [np.array([1, 50])] * 2).keys.shape == (4, 64), "the device goes on"


def test_what_both_ends_agree_on() -> None:
    assert page_runs(np.array([3, 4, 5, 9, 8])).tolist() == [[3, 3], [9, 1], [8, 1]]
    assert page_runs(np.array([0])).tolist() == [[0, 1]] and not len(page_runs(np.empty(0, np.int64)))
    positions = [np.array([1, 40, 41, 900]), np.array([39, 8000])]
    found = list(shares(SHAPE, positions))
    assert [pages.tolist() for pages, _ in found] == [[0, 2, 56, 500]]
    assert found[0][1] == [slice(0, 4), slice(4, 6)]
    large = KvShape("large", 1, 2, 1 << 12, "float32", page_tokens=32)  # a page of a megabyte
    assert [parts for _, parts in shares(large, positions)] == [
        [slice(0, 1), slice(4, 4)],
        [slice(1, 3), slice(4, 5)],
        [slice(3, 4), slice(5, 5)],
        [slice(4, 4), slice(5, 6)],
    ]
