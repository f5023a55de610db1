"""KvStore against plain arrays: after any appends, crops, forks, moves and restores, every byte is right."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmcache.kv.kernels import score
from llmcache.kv.tiers import Gathered, KvStore, Selection, StoreConfig, store
from tests.conftest import examples
from tests.unit.store_parts import HostFastTier, Plain, crash, shape_of

LAYERS = 2
BOUND = 5
ROWS = 12
DTYPES = ["float32", "float16", "bfloat16"]
SEEDS = st.integers(0, 1 << 30)


@pytest.fixture(scope="module", autouse=True)
def _no_real_sync() -> Iterator[None]:
    """Only processes crash here, so syncing the real disk thousands of times is useless. The contexts are short."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fdatasync", "fsync"):
            patch.setattr(os, name, lambda _fd: None)
        patch.setattr(store, "RECENT_SHARE", 2)
        yield


class Store(RuleBasedStateMachine):
    """A store compared with `Plain`; seeds determine its choices, so that failing examples shrink."""

    ssd = "file"

    @initialize(dtype=st.sampled_from(DTYPES), batch=st.integers(1, 2), wide=st.booleans(), interleaved=st.booleans())
    def make(self, dtype: str, batch: int, wide: bool, interleaved: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        # rows of 601 values span several blocks, some of them two
        self.shape = shape_of(dtype, LAYERS, value_dim=601 if wide else 3)
        self.plain = Plain(self.shape, batch)
        path = self.directory / "a.kv"
        more: dict[str, Any] = {"cpu_rows": ROWS, "interleaved": interleaved}
        self.config = StoreConfig(self.shape, batch, 4, 4, BOUND, path, self.ssd, threads=2, **more)
        self.store = KvStore(self.config)
        self.fast = HostFastTier(1000)
        self.saved = False
        self.starts = 0

    @rule(tokens=st.integers(20, 40), seed=SEEDS)
    def prefill(self, tokens: int, seed: int) -> None:
        self.append(tokens, seed)

    @rule(tokens=st.integers(1, 6), seed=SEEDS)
    def append(self, tokens: int, seed: int) -> None:
        self.plain.append(self.store, tokens, seed)
        self._compare(seed % LAYERS, self._selection(seed), committed=False)
        self.plain.commit(self.store, tokens, seed)
        self.saved = False

    def _selection(self, seed: int) -> Selection:
        random, middle = np.random.default_rng(seed), self.store.middle
        tokens = np.arange(middle.start * 4, middle.stop * 4)
        count = int(random.integers(0, min(len(tokens), random.choice([ROWS, len(tokens)])) + 1))
        shape = (self.store.batch, self.shape.kv_heads, 1)
        chosen = random.permuted(np.tile(tokens, shape), axis=2)[:, :, :count]
        return Selection(np.sort(chosen, axis=2))

    def _compare(self, layer: int, selection: Selection, committed: bool = True) -> None:
        hits = self.store.traffic.hits_cpu + self.store.traffic.hits_ssd
        found = self.store.gather(layer, selection)
        self._check(layer, found, selection, self.store.middle)
        assert self.store.traffic.hits_cpu + self.store.traffic.hits_ssd - hits == selection.positions.size
        found.release()

    def _check(self, layer: int, found: Gathered, selection: Selection, middle: range) -> None:
        """Check that `found` has the selected tokens of `middle` and all tokens around it."""
        ends = (np.arange(middle.start * 4), np.arange(middle.stop * 4, self.store.layer_length(layer)))
        before, after = (np.broadcast_to(end, (*selection.positions.shape[:2], len(end))) for end in ends)
        assert (found.positions == np.concatenate([before, selection.positions, after], axis=2)).all()
        self.plain.check(layer, found)

    @rule(seed=SEEDS, layer=st.integers(0, LAYERS - 1))
    def gather(self, seed: int, layer: int) -> None:
        self._compare(layer, self._selection(seed))

    @rule(seed=SEEDS, tokens=st.integers(0, 9))
    def stage(self, seed: int, tokens: int) -> None:
        layer, selection, middle = seed % LAYERS, self._selection(seed), self.store.middle
        staged = self.store.stage(layer, selection)
        if tokens:
            self.append(tokens, seed)
        self._check(layer, self.store.complete(staged), selection, middle)

    @precondition(lambda self: self.store.length > 0)
    @rule(seed=SEEDS)
    def gather_fast(self, seed: int) -> None:
        self.plain.check(seed % LAYERS, self.store.gather_fast(seed % LAYERS, self._selection(seed), self.fast))

    @rule(seed=SEEDS)
    def score(self, seed: int) -> None:
        random, layer = np.random.default_rng(seed), seed % LAYERS
        sequence = int(random.integers(self.store.batch))
        queries = random.standard_normal((2 * self.shape.kv_heads, self.shape.head_dim), dtype=np.float32)
        middle = self.store.middle
        found = np.full((self.shape.kv_heads, self.store.length), np.nan, np.float32)
        pages, scores = self.store.score_cpu(layer, sequence, queries)
        tokens = (pages[:, None] * 4 + np.arange(4)).reshape(-1)
        found[:, tokens] = scores
        for block in self.store.score_ssd(layer, sequence, queries, block_tokens=8):
            assert np.isnan(found[block.head, block.positions]).all()
            found[block.head, block.positions] = block.scores
        keys = self.plain.wide(layer, sequence)
        expected = score(queries[None], keys[None])[0][:, middle.start * 4 : middle.stop * 4]
        assert np.allclose(found[:, middle.start * 4 : middle.stop * 4], expected, rtol=2e-3, atol=2e-3)

    @rule(seed=SEEDS, side=st.integers(0, 1))
    def read_side(self, seed: int, side: int) -> None:
        pages = np.random.default_rng(seed).permutation(self.store.length // 4)[:3]
        self.plain.check_side(seed % LAYERS, pages, side, self.store.read_side(seed % LAYERS, 0, pages, side))

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        self._crop(round(share * self.store.length))

    @rule(seed=SEEDS)
    def crop_a_little(self, seed: int) -> None:
        self._crop(max(0, self.store.length - seed % 7))

    def _crop(self, tokens: int) -> None:
        self.saved = self.saved and tokens == self.store.length
        self.store.crop(tokens)
        self.plain.crop(tokens)

    @rule(seed=SEEDS, count=st.integers(1, 4))
    def select(self, seed: int, count: int) -> None:
        index = np.random.default_rng(seed).integers(0, self.store.batch, count)
        self.saved = self.saved and index.tolist() == list(range(self.store.batch))
        self.store.select(index)
        self.plain.choose(index)

    @precondition(lambda self: self.store.batch < 3)
    @rule()
    def repeat(self) -> None:
        self.plain.choose(np.repeat(np.arange(self.store.batch), 2))
        self.store.select(np.repeat(np.arange(self.store.batch), 2))
        self.saved = False

    @rule(seed=SEEDS)
    def move(self, seed: int) -> None:
        """Move one page up and one down, as policies do."""
        layer, sequence, middle = seed % LAYERS, seed % self.store.batch, self.store.middle
        in_memory = self.store.in_cpu(layer, sequence)
        up = [page for page in middle if not in_memory[page]][:1]
        down = [page for page in middle if in_memory[page]][: len(up)]
        self.store.move_down(layer, sequence, np.array(down, np.int64))
        assert not self.store.in_cpu(layer, sequence)[down].any()
        if self.store.in_cpu(layer, sequence).sum() + len(up) <= BOUND:
            self.store.move_up(layer, sequence, np.array(up, np.int64))
            assert self.store.in_cpu(layer, sequence)[up].all()

    @rule()
    def save(self) -> None:
        self.store.save()
        self.saved = True

    def _restore(self, tokens: int, batch: int) -> None:
        self.plain.crop(tokens)
        self.store = KvStore.restore(self.directory / "a.kv", self.config)
        self.fast = HostFastTier(1000)
        self.starts += self.ssd == "csd"  # starting a process takes time
        assert self.store.length == tokens and self.store.batch == batch
        assert (self.store.ids == self.plain.ids).all() and (self.store.positions == self.plain.ids + 7).all()
        assert sorted(os.listdir(self.directory)) in (["a.kv"], ["a.kv", "tables-a.kv"])

    @precondition(lambda self: self.starts < 3 and (self.store.length >= 4 or self.saved))
    @rule()
    def killed(self) -> None:
        crash(self.store)
        expected = self.store.length if self.saved else self.store.length // 4 * 4
        self._restore(expected, self.store.batch)

    @precondition(lambda self: self.starts < 3 and self.store.length > 0)
    @rule()
    def closed(self) -> None:
        self.store.save()
        self.store.close()
        self.saved = True
        self._restore(self.store.length, self.store.batch)

    @invariant()
    def is_within_bounds(self) -> None:
        if not hasattr(self, "store"):
            return
        full = self.store.length // 4
        for layer in range(LAYERS):
            for sequence in range(self.store.batch):
                in_memory = self.store.in_cpu(layer, sequence)
                assert in_memory[:1].all() and in_memory[max(0, full - 1) :].all(), "sink and window are in memory"
                assert in_memory.sum() <= BOUND + self.store.batch, "more only while sequences share a page"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.plain.check_all(self.store)
            self.store.discard()
            files_left = os.listdir(self.directory)
            shutil.rmtree(self.directory)
            assert not files_left


class Device(Store):
    """The same with the emulated device, in few examples, because each starts a process."""

    ssd = "csd"

    @precondition(lambda self: self.starts < 3)
    @rule()
    def device_dies(self) -> None:
        self.starts += 1
        self.store.ssd.device.kill()  # type: ignore[union-attr]
        self.store.restart_device()


TestFile: Any = Store.TestCase
TestFile.settings = settings(max_examples=examples(30), stateful_step_count=25, deadline=None)
TestDevice: Any = Device.TestCase
TestDevice.settings = settings(max_examples=3, stateful_step_count=30, deadline=None)
