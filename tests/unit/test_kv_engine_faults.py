"""The engine over a real spill file and an emulated device: what breaks is told where it is needed, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.errors import DataError, EnvironmentProblem
from llmcache.kv.pipeline import KvEngine, attention
from llmcache.kv.policies.hillinfer import HillInfer, HillInferSettings
from llmcache.kv.spill import SpillFile
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig
from llmcache.kv.tiers.ssd import CsdTier
from llmcache.kv.workload import StreamSpec, SyntheticStream
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked

pytestmark = FORKED

SPEC = StreamSpec(layers=3, kv_heads=2, heads=4, head_dim=16, context=256, dtype="float32")
STREAM = SyntheticStream(SPEC)
STEPS = 20


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    alive = [thread for thread in threading.enumerate() if thread.is_alive()]
    assert not [thread for thread in alive if thread.name.startswith("llmcache-kv-ahead")]


def config(path: Path, ssd: str = "csd") -> StoreConfig:
    """Return a store of half of the pages."""
    return StoreConfig(SPEC.shape, cpu_pages=9, path=path / "context.kv", ssd=ssd, force=True, threads=2)


def policy_of(store: KvStore, alpha: float = 0.4) -> HillInfer:
    return HillInfer(store, HillInferSettings(alpha, score_block_tokens=32))


def at(step: int) -> NDArray[np.int64]:
    return np.array([[SPEC.context + step]])


def fill(engine: KvEngine) -> None:
    for layer in range(SPEC.layers):
        engine.prefill(layer, None, *STREAM.keys_values(layer, range(SPEC.context)))
    tokens = np.arange(SPEC.context)[None]
    engine.finish_step(tokens, tokens)


def layer_step(engine: KvEngine, layer: int, step: int) -> Gathered:
    """Do one layer of one step, and look ahead for the next with what will be its true queries."""
    tokens = range(SPEC.context + step, SPEC.context + step + 1)
    found = engine.step(layer, STREAM.queries(layer, step), *STREAM.keys_values(layer, tokens))
    if layer + 1 < SPEC.layers:
        engine.ahead(layer + 1, STREAM.queries(layer + 1, step))
    engine.attended(layer)
    return found


def decode(engine: KvEngine, step: int) -> list[Gathered]:
    found = [layer_step(engine, layer, step) for layer in range(SPEC.layers)]
    engine.finish_step(at(step), at(step))
    return found


def same(first: list[Gathered], second: list[Gathered]) -> bool:
    return all(
        np.array_equal(a.positions, b.positions) and np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values)
        for a, b in zip(first, second, strict=True)
    )


def device_of(store: KvStore) -> int:
    assert isinstance(store.ssd, CsdTier)
    return store.ssd.device.pid


@pytest.mark.parametrize("ssd", ["csd", "file"])
def test_looking_ahead_and_where_scores_come_from_change_nothing_that_is_attended_to(tmp_path: Path, ssd: str) -> None:
    runs = []
    for app in (False, True):
        (tmp_path / str(app)).mkdir()
        with KvStore(config(tmp_path / str(app), ssd)) as store, KvEngine(store, policy_of(store), app=app) as engine:
            fill(engine)
            runs.append([found for step in range(STEPS) for found in decode(engine, step)])
            assert store.traffic.hits_cpu > 0 and store.traffic.hits_ssd > 0, "pages of both tiers are attended to"
    assert same(*runs)


def test_a_budget_of_the_whole_context_is_full_attention_bit_for_bit_from_the_ssd_too(tmp_path: Path) -> None:
    with KvStore(config(tmp_path)) as store, KvEngine(store, policy_of(store, alpha=1.0)) as engine:
        fill(engine)
        for step in range(STEPS):
            for layer, found in enumerate(decode(engine, step)):
                asked, whole = STREAM.queries(layer, step), STREAM.keys_values(layer, range(SPEC.context + step + 1))
                outs = attention(asked, found.keys, found.values)[0], attention(asked, *whole)[0]
                assert np.array_equal(*outs)
        assert store.traffic.hits_ssd > 0


def test_a_device_killed_while_looking_ahead_is_told_by_the_layer_and_restarted_without_loss(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with KvStore(config(tmp_path / "plain")) as store, KvEngine(store, policy_of(store)) as engine:
        fill(engine)
        wanted = [decode(engine, step) for step in range(4)]
    with KvStore(config(tmp_path)) as store, KvEngine(store, policy_of(store)) as engine:
        fill(engine)
        assert same(decode(engine, 0), wanted[0])
        found = [layer_step(engine, 0, 1)]
        engine.rest()
        os.kill(device_of(store), signal.SIGKILL)
        engine.ahead(1, STREAM.queries(1, 1))
        with pytest.raises(EnvironmentProblem, match="emulated device ended by signal 9"):
            layer_step(engine, 1, 1)
        store.restart_device()
        found += [layer_step(engine, layer, 1) for layer in (1, 2)]
        engine.finish_step(at(1), at(1))
        assert same(found, wanted[1])
        assert all(same(decode(engine, step), wanted[step]) for step in (2, 3))


def test_a_damaged_page_is_told_by_its_layer_and_never_attended_to(tmp_path: Path) -> None:
    with KvStore(config(tmp_path, "file")) as store, KvEngine(store, policy_of(store, alpha=1.0)) as engine:
        fill(engine)
        path = tmp_path / "context.kv"
        data = bytearray(path.read_bytes())
        missing = np.flatnonzero(~store.in_cpu(1, 0))
        rows = STREAM.keys_values(1, range(SPEC.context))[1][0, 0, 16 * missing[0] : 16 * missing[0] + 4]
        place = data.find(rows.tobytes())
        assert place > 0, "values of a page that is only in the file"
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([data[place] ^ 1]))
        layer_step(engine, 0, 0)
        with pytest.raises(DataError, match="values: the checksum of page"):
            layer_step(engine, 1, 0)


def test_a_disk_full_for_a_while_costs_nothing_but_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise EnvironmentProblem("context.kv: no space left", "make room")

    first = SPEC.context % 16  # the step whose token completes a page
    with KvStore(config(tmp_path, "file")) as store, KvEngine(store, policy_of(store), app=True) as engine:
        fill(engine)
        steps = range(15 - first)
        for step in steps:
            decode(engine, step)
        last = len(steps)
        with monkeypatch.context() as patched:
            patched.setattr(SpillFile, "_write_pages", full)
            with pytest.raises(EnvironmentProblem, match="no space left"):
                layer_step(engine, 0, last)
        found = [layer_step(engine, layer, last) for layer in range(SPEC.layers)]
        engine.finish_step(at(last), at(last))
        assert store.length == SPEC.context + last + 1
        for layer, got in enumerate(found):
            keys = STREAM.keys_values(layer, range(store.length))[0]
            assert got.positions[..., -1].max() == store.length - 1 and (np.diff(got.positions, axis=2) > 0).all()
            assert np.array_equal(got.keys, np.take_along_axis(keys, got.positions[..., None], axis=2))
        decode(engine, last + 1)
