"""KvStore: the keys and values of a batch of equally long sequences, in tiers.

A sequence is sink pages, middle pages, window pages and a tail that fills no page yet. Sink, window and tail are always in
memory; policies choose among the middle. Every page that is full is written to the ssd tier once, in order, so that tier
is inclusive: moving down only drops the copy in memory, moving up reads it. Differs from hillinfer.txt, section 3.3, whose
pools are exclusive; there a page that moves down is written. Moves are counted all the same.

Concurrency: one thread appends, commits, crops and reorders. Another may, meanwhile, score, stage and move pages of
*other* layers, or of the same layer what was committed: each layer's pool has a lock, held only while memory is looked
at; the device has one too, and nobody who holds a pool waits for it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.spill import KvShape
from llmcache.kv.tiers.config import Gathered, Selection, StoreConfig, Victims
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.gathering import Gatherer, Staged
from llmcache.kv.tiers.scoring import score_slots
from llmcache.kv.tiers.traffic import Traffic

Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]


class KvStore:
    """Keys and values of `config.batch` sequences of one length; a context manager."""

    def __init__(self, config: StoreConfig) -> None:
        self._core = Core(config)
        self._gatherer = Gatherer(self._core)

    # What it is

    @property
    def config(self) -> StoreConfig:
        """What it was made from; `batch` is that of the beginning."""
        return self._core.config

    @property
    def shape(self) -> KvShape:
        """Whose keys and values it holds."""
        return self._core.shape

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._core.table.batch

    @property
    def length(self) -> int:
        """Tokens of every sequence, left padding included, whose step is over (`commit`)."""
        return self._core.tokens.length

    def layer_length(self, layer: int) -> int:
        """Returns the tokens a layer has, those of a step that is under way included."""
        self._core.checked(layer)
        return int(self._core.lengths[layer])

    @property
    def step(self) -> int:
        """Steps so far: how often `commit` was called."""
        return self._core.step

    @property
    def middle(self) -> range:
        """Pages that may be chosen now: between sink and window, counted in tokens whose step is over."""
        return self._core.middle

    @property
    def traffic(self) -> Traffic:
        """What moved so far."""
        return self._core.traffic

    @property
    def ids(self) -> Numbers:
        """Ids of all tokens, [batch, length], as they were committed."""
        return self._core.tokens.ids

    @property
    def positions(self) -> Numbers:
        """Positions of all tokens, [batch, length], as they were committed."""
        return self._core.tokens.positions

    @property
    def memory_bytes(self) -> int:
        """Memory of the cpu pools of all layers, used or not."""
        return sum(pool.size_bytes for pool in self._core.pools)

    @property
    def victims(self) -> Victims | None:
        """Who chooses the pages that go down when the window moves on and the pool is full; None: the longest there."""
        return self._core.victims

    @victims.setter
    def victims(self, choose: Victims | None) -> None:
        self._core.victims = choose

    # Adding tokens

    def append(
        self,
        layer: int,
        keys: NDArray[Any],
        values: NDArray[Any],
        key_scales: Floats | None = None,
        value_scales: Floats | None = None,
    ) -> None:
        """Adds tokens to a layer: keys and values [batch, kv_heads, tokens, dim] in the shape's numpy type.

        Scales, float32 [batch, kv_heads, tokens], belong to int8. Layers of a step come in any order; `commit` ends it.
        """
        core = self._core
        pool = core.checked(layer)
        rows = _checked_rows(core, keys, values, key_scales, value_scales)
        size, first = core.shape.page_tokens, int(core.lengths[layer])
        end = first + keys.shape[2]
        core.table.extend(core.shape.pages_of(end))
        with pool.lock:
            pool.know(core.table.numbers)
            for b in range(core.table.batch):
                numbers = core.table.table[b, first // size : core.shape.pages_of(end)]
                pool.fill(numbers, [part[b] for part in rows], first % size)
        core.lengths[layer] = end

    def commit(self, ids: Numbers, positions: Numbers) -> None:
        """Ends a step after all layers: takes the ids and positions [batch, tokens] of its tokens."""
        core = self._core
        if ids.ndim != 2 or ids.shape != positions.shape or len(ids) != core.table.batch:
            raise ValueError(f"ids: {ids.shape}, positions: {positions.shape}; both [{core.table.batch}, tokens] is needed")
        if (core.lengths != self.length + ids.shape[1]).any():
            found = core.lengths.tolist()
            raise ValueError(f"ids: {ids.shape[1]} tokens after {self.length}, but the layers have {found}")
        core.tokens.add(ids, positions)
        core.step += 1

    # Looking and bringing

    def in_cpu(self, layer: int, sequence: int) -> NDArray[np.bool_]:
        """Returns for each whole page of a sequence, [length // page_tokens], whether it is in the cpu pool of a layer."""
        pool = self._core.checked(layer, sequence)
        pages = self.length // self.shape.page_tokens
        with pool.lock:
            return pool.slot_of[self._core.table.table[sequence, :pages]] >= 0

    def score_cpu(
        self, layer: int, sequence: int, queries: Floats, pages: Numbers | None = None, combine: str = "max"
    ) -> tuple[Numbers, Floats]:
        """Returns pages in the pool, int64 [n] ascending, and the scores float32 [kv_heads, n * page_tokens] of their tokens.

        `queries` [heads, head_dim] float32. `pages`: score no others; None: those of the middle.
        """
        core, pool = self._core, self._core.checked(layer, sequence)
        wanted = np.arange(core.middle.start, core.middle.stop) if pages is None else np.sort(pages)
        wanted, numbers = core.checked_pages(sequence, wanted, range(self.length // self.shape.page_tokens))
        with pool.lock:
            slots = pool.slot_of[numbers]
            here = slots >= 0
            return wanted[here], score_slots(pool.keys, slots[here], queries, combine, core.config.threads)

    def stage(self, layer: int, selection: Selection) -> Staged:
        """Fetches what is chosen ahead of time, for a later `gather`; ValueError if it is not all in the middle."""
        return self._gatherer.stage(layer, selection)

    def gather(self, layer: int, selection: Selection | None = None, *, staged: Staged | None = None) -> Gathered:
        """Returns sink, chosen tokens, window and tail of a layer, as far as it was appended.

        Either a `selection` or what `stage` made of one. Staged rows keep: what has left the window meanwhile comes along.
        """
        if (selection is None) == (staged is None):
            raise ValueError("selection: either a selection or what was staged is needed")
        chosen = staged if selection is None else selection
        assert chosen is not None
        return self._gatherer.gather(layer, chosen)

    # Changing sequences

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens` tokens; between steps only."""
        core = self._core
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: {tokens}, between 0 and {self.length} is needed")
        self._check_between_steps()
        core.tokens.length = tokens
        core.lengths[:] = tokens
        self._forget(core.table.cut(core.shape.pages_of(tokens)))
        self._choose(np.arange(core.table.batch))

    def reorder(self, index: Numbers) -> None:
        """Makes sequence i what sequence `index[i]` was (beam search); shares whole pages, copies tails."""
        if len(index) != self.batch:
            raise ValueError(f"index: {len(index)} sequences, the batch has {self.batch}")
        self.select(index)

    def repeat(self, times: int) -> None:
        """Makes `times` of every sequence, one after the other; shares whole pages, copies tails."""
        if times < 1:
            raise ValueError(f"times: {times}, at least 1 is needed")
        self.select(np.repeat(np.arange(self.batch), times))

    def select(self, index: Numbers) -> None:
        """Makes a batch of the sequences `index`, any of them any number of times; shares whole pages, copies tails."""
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0 or index.max() >= self.batch:
            raise ValueError(f"index: {index.tolist()}, sequences 0 to {self.batch - 1} can be named")
        self._check_between_steps()
        if len(index) != self.batch or (index != np.arange(self.batch)).any():
            self._choose(index)
            self._core.tokens.choose(index)

    def _choose(self, index: Numbers) -> None:
        core = self._core
        gone, copies = core.table.choose(index, bool(self.length % core.shape.page_tokens))
        for pool in core.pools:
            pool.know(core.table.numbers)
            for source, target in copies:
                pool.copy(source, target)
        self._forget(gone)

    def _forget(self, numbers: Numbers) -> None:
        for pool in self._core.pools:
            with pool.lock:
                pool.forget(numbers)

    def _check_between_steps(self) -> None:
        if (self._core.lengths != self.length).any():
            raise ValueError("commit: a step is under way, end it first")

    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> KvStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _checked_rows(
    core: Core, keys: NDArray[Any], values: NDArray[Any], key_scales: Floats | None, value_scales: Floats | None
) -> list[NDArray[Any]]:
    """Returns keys, values and for int8 their scales if they fit; ValueError naming the argument if not."""
    shape = core.shape
    tokens = keys.shape[2] if keys.ndim == 4 else 0
    for name, rows, dim in (("keys", keys, shape.head_dim), ("values", values, shape.value_dim)):
        wanted = (core.table.batch, shape.kv_heads, tokens, dim)
        if rows.shape != wanted or not tokens or rows.dtype != shape.numpy_dtype:
            raise ValueError(f"{name}: {rows.dtype} {rows.shape}, {shape.numpy_dtype} {wanted} is needed")
    found: list[NDArray[Any]] = [keys, values]
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if (scales is not None) != (shape.dtype == "int8"):
            raise ValueError(f"{name}: they belong to int8 and only to int8, the type is {shape.dtype}")
        if scales is not None:
            if scales.shape != keys.shape[:3] or scales.dtype != np.float32:
                raise ValueError(f"{name}: {scales.dtype} {scales.shape}, float32 {keys.shape[:3]} is needed")
            found.append(scales)
    return found
