"""A simple model of a KvStore: arrays that are appended to and indexed."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.errors import MissingRequirement
from llmcache.kv.pipeline import widened
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig
from llmcache.kv.tiers.ssd import CsdTier, FileTier
from tests.unit.kv_parts import carried

Numbers = NDArray[np.int64]
Rows = NDArray[Any]


def shape_of(dtype: str = "float16", layers: int = 2, value_dim: int = 0) -> KvShape:
    """Return a small shape: two key heads of 8, pages of 4 tokens."""
    return KvShape("tiny", layers, kv_heads=2, head_dim=8, dtype=dtype, page_tokens=4, value_dim=value_dim)


def noise(shape: KvShape, size: tuple[int, ...], seed: int) -> Rows:
    """Return random numbers in the numpy type of `shape`."""
    return carried(np.random.default_rng(seed).standard_normal(size, dtype=np.float32), shape.dtype)


Make = Callable[..., tuple[KvStore, "Plain"]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates a store over tmp/a.kv with `tokens` tokens, and the arrays that it must equal.

    Its device is killed after the test.
    """
    made: list[KvStore] = []

    def build(tokens: int = 0, batch: int = 1, **options: Any) -> tuple[KvStore, Plain]:
        config = {"sink_tokens": 4, "window_tokens": 8, "cpu_pages": 5, "path": tmp_path / "a.kv", "threads": 1, **options}
        made.append(store := KvStore(StoreConfig(shape_of(), batch, **config)))
        plain = Plain(store.shape, batch)
        if tokens:
            plain.step(store, tokens)
        return store, plain

    yield build
    for store in made:
        crash(store)


class HostFastTier:
    """A FastTier of up to `pages` pages in host memory, in place of a GPU."""

    def __init__(self, pages: int) -> None:
        self._most = pages
        self._pages: OrderedDict[tuple[int, int], tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()

    def have(self, layer: int, pages: Numbers) -> NDArray[np.bool_]:
        found = np.array([(layer, int(page)) in self._pages for page in pages], np.bool_)
        for page in pages[found].tolist():
            self._pages.move_to_end((layer, page))
        return found

    def put(self, layer: int, pages: Numbers, keys: NDArray[Any], values: NDArray[Any]) -> None:
        for index, page in enumerate(pages.tolist()):
            self._pages[layer, page] = (keys[index].copy(), values[index].copy())
            self._pages.move_to_end((layer, page))
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def rows(self, layer: int, pages: Numbers, offsets: Numbers) -> tuple[Any, Any]:
        used, index = np.unique(pages, return_inverse=True)
        index, heads = index.reshape(pages.shape), np.arange(pages.shape[1])[:, None]
        sides = (np.stack([self._pages[layer, int(page)][side] for page in used]) for side in (0, 1))
        keys, values = (pages_of[index, heads, offsets] for pages_of in sides)
        return keys, values

    def drop(self, pages: Numbers) -> None:
        gone = set(pages.tolist())
        for key in [key for key in self._pages if key[1] in gone]:
            del self._pages[key]


class Plain:
    """All keys and values of every layer, [batch, kv_heads, tokens, dim]."""

    def __init__(self, shape: KvShape, batch: int) -> None:
        self.shape = shape
        self.ids = np.empty((batch, 0), np.int64)
        forms = shape.forms(batch, shape.kv_heads, 0)
        self.layers = [[np.empty(*form) for form in forms] for _ in range(shape.layers)]

    def rows(self, layer: int, tokens: int, seed: int) -> list[Rows]:
        """Return the rows to append to a layer."""
        size = (len(self.ids), self.shape.kv_heads, tokens)
        dims = (self.shape.head_dim, self.shape.value_dim)
        return [noise(self.shape, (*size, dim), seed + 2 * layer + side) for side, dim in enumerate(dims)]

    def append(self, store: KvStore, tokens: int, seed: int) -> None:
        """Append to all layers of both, in a different order each time."""
        for layer in np.random.default_rng(seed).permutation(self.shape.layers).tolist():
            store.append(layer, *self.grow(layer, tokens, seed))

    def grow(self, layer: int, tokens: int, seed: int) -> list[Rows]:
        """Append only to a layer of this model, and return the rows."""
        rows = self.rows(layer, tokens, seed)
        self.layers[layer] = [np.concatenate(pair, axis=2) for pair in zip(self.layers[layer], rows, strict=True)]
        return rows

    def commit(self, store: KvStore, tokens: int, seed: int) -> None:
        ids = self.grow_ids(tokens, seed)
        store.commit(ids, ids + 7)

    def grow_ids(self, tokens: int, seed: int) -> Numbers:
        """Append only to the ids of this model, and return them."""
        ids = seed + np.arange(tokens) + 1000 * np.arange(len(self.ids))[:, None]
        self.ids = np.concatenate([self.ids, ids], axis=1)
        return ids

    def step(self, store: KvStore, tokens: int, seed: int = 0) -> None:
        self.append(store, tokens, seed)
        self.commit(store, tokens, seed)

    def crop(self, tokens: int) -> None:
        self.ids = self.ids[:, :tokens]
        self.layers = [[array[:, :, :tokens] for array in arrays] for arrays in self.layers]

    def choose(self, index: Numbers) -> None:
        """Replace sequence i by sequence `index[i]`."""
        self.ids = self.ids[index]
        self.layers = [[array[index] for array in arrays] for arrays in self.layers]

    def wide(self, layer: int, sequence: int) -> NDArray[np.float32]:
        return widened(self.layers[layer][0][sequence])

    def check(self, layer: int, found: Gathered) -> None:
        """Compare every byte of gathered rows."""
        index = found.positions[..., None]
        for side, got in zip(self.layers[layer], (found.keys, found.values), strict=True):
            wanted = np.take_along_axis(side, index, axis=2)
            assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()

    def check_all(self, store: KvStore) -> None:
        """Compare every byte of every layer of a store."""
        for layer in range(self.shape.layers):
            found = store.gather(layer, store.everything)
            assert found.positions.shape[2] == self.ids.shape[1]
            self.check(layer, found)

    def check_side(self, layer: int, pages: Numbers, side: int, rows: Rows) -> None:
        """Compare keys or values of whole pages of sequence 0."""
        size = self.shape.page_tokens
        for page, found in zip(pages.tolist(), rows, strict=True):
            assert (found == self.layers[layer][side][0, :, page * size : (page + 1) * size]).all()


def crash(store: KvStore) -> None:
    """End a store as a kill of its process would, without a flush or an orderly close."""
    ssd = store.ssd
    if isinstance(ssd, CsdTier):
        ssd.device.kill()
    elif isinstance(ssd, FileTier):
        with contextlib.suppress(MissingRequirement):  # the mount may be dead
            ssd.file.raw.close()
