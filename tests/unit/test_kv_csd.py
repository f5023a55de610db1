"""The emulated computational SSD: scores equal the host's, bytes are counted, and no data is lost if it dies."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.kernels import score
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.papers.csd import PROFILES, CsdProfile, EmulatedCsd, ScoreBlock, host
from llmcache.papers.csd.profile import ModelledClock
from llmcache.papers.csd.wire import decode, encode
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.kv_parts import ids

SHAPE = KvShape("tiny", layers=2, kv_heads=2, head_dim=64, page_tokens=16)
ROWS = KvShape("tiny", layers=1, kv_heads=2, head_dim=64, page_tokens=16, value_dim=32)
Make = Callable[..., EmulatedCsd]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates a device over tmp/a.kv; its process is killed after the test."""
    made: list[EmulatedCsd] = []

    def start(profile: CsdProfile = PROFILES["none"], shape: KvShape = SHAPE, create: bool = True) -> EmulatedCsd:
        made.append(EmulatedCsd(tmp_path / "a.kv", shape, profile, create=create, threads=1))
        return made[-1]

    yield start
    for device in made:
        device.kill()


def normal(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def filled(device: EmulatedCsd, tokens: int) -> list[NDArray[Any]]:
    """Write `tokens` to sequence 0; return keys and values [kv_heads, tokens, dim] of the last layer."""
    shape, sides = device.shape, list[NDArray[Any]]()
    for layer in range(shape.layers):
        sides = [normal((2, tokens, dim), layer).astype(shape.numpy_dtype) for dim in (shape.head_dim, shape.value_dim)]
        device.append(0, layer, *sides)
    device.append_tokens(0, ids(0, tokens), ids(0, tokens))
    return sides


def gathered(blocks: Iterator[ScoreBlock], tokens: int) -> NDArray[np.float32]:
    """Return the scores [kv_heads, tokens] of all blocks, which must contain each token once."""
    found = np.full((2, tokens), np.nan, np.float32)
    for block in blocks:
        assert np.isnan(found[block.head, block.positions]).all()
        found[block.head, block.positions] = block.scores
    assert not np.isnan(found).any()
    return found


def test_a_killed_device_is_reported_and_restarted_without_loss(make: Make) -> None:
    device = make()
    keys = filled(device, 3000)[0]
    device.append(1, 0, keys, keys)  # one layer of a step: it is acknowledged, so it must not be lost
    queries = normal((2, 64), 2)
    before = gathered(device.execute(queries, 0, 1), 3000)
    old = device.process.pid
    os.kill(old, signal.SIGKILL)
    with pytest.raises(MissingRequirement, match="ended by signal 9") as caught:
        device.read(0, 1, [0])
    assert caught.value.exit_code == 3 and caught.value.hint and "restart" in caught.value.hint
    with pytest.raises(MissingRequirement, match="not running"):
        device.flush()
    device.restart()
    assert device.process.pid != old and device.pages(1, 0) == 188
    assert (gathered(device.execute(queries, 0, 1), 3000) == before).all()
    assert (device.read(1, 0, [3])[0] == keys.reshape(2, -1, 64)[:, 48:64]).all()
    device.close()
    assert not psutil.pid_exists(device.process.pid)


@FORKED
def test_a_device_that_hangs_counts_as_dead(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make()
    filled(device, 100)
    os.kill(device.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(MissingRequirement, match="says nothing"):
        patch.setattr(host, "ANSWER_S", 0.3)
        device.flush()
    assert device.process.poll() is not None, "its process was killed"
    device.restart()
    assert device.pages(0, 1) == 7 and device.read(0, 1, [6])


def interrupted(command: Callable[[], object]) -> None:
    """Send SIGINT while `command` waits."""
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        command()
        timer.join()


@FORKED
def test_replies_of_an_interrupted_command_are_discarded(make: Make) -> None:
    """After an interrupted read, execution or write; the written pages are known."""
    device = make(CsdProfile("slow", math.inf, math.inf, 1e6, 0, throttle=True))
    keys = filled(device, 1600)[0]
    pages, queries = keys.reshape(2, 100, 16, 64).swapaxes(0, 1), normal((2, 64), 2)
    commands: list[Callable[[], object]] = [
        lambda: device.read(0, 1, list(range(60))),
        lambda: list(device.execute(queries, 0, 1, block_tokens=16)),
        lambda: device.append(0, 1, keys, keys),
    ]
    for command in commands:
        interrupted(command)
        assert (device.read(0, 1, list(range(40, 100)))[0] == pages[40:]).all()
    interrupted(commands[-1])
    known = device.pages(0, 1)
    device.read(0, 1, [known - 1])
    with pytest.raises(ValueError, match="which do not include"):
        device.read(0, 1, [known])


@FORKED
def test_missing_acknowledged_pages_are_reported(make: Make) -> None:
    device = make()
    filled(device, 3000)
    device.kill()
    with SpillFile.open(device.path, SHAPE) as file:
        file.truncate(0, 100)
    with pytest.raises(DataError, match="pages by layer"):
        device.restart()


def test_the_device_ends_with_its_host(make: Make) -> None:
    device = make()
    filled(device, 64)
    assert device.end is not None
    device.end.close()
    assert device.process.wait(120) == 0
    with SpillReader.open(device.path, SHAPE) as file:
        assert file.length(0) == 64


@FORKED
def test_the_device_raises_the_errors_of_the_file(make: Make) -> None:
    before = psutil.Process().children()
    with make() as device:
        with pytest.raises(UsageError, match="the file exists"):
            make()
        with pytest.raises(ValueError, match="which do not include"):
            device.read(0, 0, [1])
        with pytest.raises(ValueError, match="queries: "):
            device.execute(normal((2, 65), 1), 0, 0)
        with pytest.raises(ValueError, match=r"block_tokens: must be from 1 to .*, not 0"):
            list(device.execute(normal((2, 64), 1), 0, 0, block_tokens=0))
        assert not list(device.execute(normal((2, 64), 1), 0, 0))
    with pytest.raises(DataError, match="spill file of another model"):
        make(shape=KvShape("other", 2, 2, 64), create=False)
    assert psutil.Process().children() == before, "no device process remains"


def test_fp16_scores_are_rounded_to_nearest() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0.0, -0.0, 65504, 65519.9, 65520, 1e9, -np.inf, np.inf, np.nan, 6e-8, 2.9e-8, 6.1e-5], np.float32)
    scores = np.concatenate([bits.view(np.float32), normal((5000,), 1) * 1e-4, normal((500,), 1) * 3e-7, edges])
    found = []
    for first in range(0, len(scores), 1000):
        data = np.empty((len(scores[first : first + 1000]), 2), np.uint16)
        encode(scores[first : first + 1000], data)
        block = decode(5, 70_000 + first, data)
        assert block.head == 5 and (block.positions == 70_000 + first + np.arange(len(data))).all()
        found.append(block.scores)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.clip(scores, -65504, 65504).astype(np.float16).astype(np.float32)
    assert np.array_equal(np.concatenate(found), expected, equal_nan=True)


def test_the_modelled_clock_models_a_pipeline() -> None:
    clock = ModelledClock(CsdProfile("p", 1e9, 0.5e9, 0.1e9, 100, fdm_bytes=4000, buffer_bytes=1000))
    assert clock.now_ns == 100
    for _ in range(10):
        clock.read(1000)
        clock.compute(1000)
        clock.send(10)
    # The computation is the bottleneck: 10 buffers of 2000 ns after the first read, and the last block on the link.
    assert clock.now_ns == 100 + 1000 + 10 * 2000 + 100
    other = ModelledClock(CsdProfile("p", 1e9, 1e9, 0.1e9, 0, fdm_bytes=1 << 20, buffer_bytes=1000))
    for _ in range(3):
        other.receive(100)
        other.read(100)
    assert other.now_ns == 3 * 1000 + 100


# A part of a layer: only the given pages are read and scored, and only the requested rows are sent


@FORKED
def test_only_the_given_pages_are_read_and_scored(make: Make) -> None:
    device = make(shape=ROWS)
    keys, queries = filled(device, 5000)[0], normal((4, 64), 2)
    pages = [3, 4, 5, 70, 100, 312]  # in several extents; the last is partial
    found = np.full((2, 5000), np.nan, np.float32)
    for block in device.execute(queries, 0, 0, pages=pages, block_tokens=20):
        assert np.isnan(found[block.head, block.positions]).all()
        found[block.head, block.positions] = block.scores
    tokens = [token for page in pages for token in range(page * 16, min(5000, page * 16 + 16))]
    expected = score(queries[None], keys[None])[0]
    assert (found[:, tokens] == expected.astype(np.float16).astype(np.float32)[:, tokens]).all()
    assert np.isnan(np.delete(found, tokens, axis=1)).all()
    report = device.last
    summed = gathered(device.execute(queries, 0, 0, combine="sum"), 5000)
    assert np.abs(summed - score(queries[None], keys[None], combine="sum")[0]).max() < 0.05
    assert report.scored_keys == 2 * len(tokens)
    assert report.internal_read_bytes == len(pages) * ROWS.key_slot_bytes
    assert report.link_to_device_bytes == 64 + queries.nbytes + 4 * 8, "four runs of pages, 8 bytes each"
    with pytest.raises(ValueError, match="which do not include"):
        list(device.execute(queries, 0, 0, pages=[313]))
    with pytest.raises(ValueError, match="pages: must not be empty"):
        device.execute(queries, 0, 0, pages=[])


@FORKED
def test_a_gather_of_more_rows_than_fit_the_ring(make: Make) -> None:
    shape = KvShape("big", 1, 2, 128, "float32", page_tokens=16)
    device = make(shape=shape)
    keys, values = filled(device, 12_000)
    assert keys.nbytes + values.nbytes > 2 << 23
    found = device.gather(0, 0, [np.arange(12_000)] * 2)
    assert (found[0] == keys.reshape(-1, 128)).all() and (found[1] == values.reshape(-1, 128)).all()
