"""KvStore: the keys and values of a batch of equally long sequences, in tiers (gpu, cpu, ssd).

A sequence is sink pages, middle pages, window pages and a tail that fills no page yet. Sink, window and tail are always in
memory; policies choose among the middle. Every page that is full is written to the ssd tier once, in order, so that tier
is inclusive: moving down only drops the copy in memory, moving up reads it. Differs from hillinfer.txt, section 3.3, whose
pools are exclusive; there a page that moves down is written. Moves are counted all the same.

What a key passes: `append` lays it out in the pool of its layer (`Pool`, cpu); once its page is full `Spill` writes that to
the ssd tier (`FileTier`, `CsdTier`); when the window has moved on and the pool is over its bound, the page goes down; a
policy finds it by `score_cpu` and `score_ssd`, and `gather` brings it from wherever it is, `gather_fast` through the gpu.

Concurrency: one thread appends, commits, crops and reorders. Another may, meanwhile, score, stage and move pages of
*other* layers, or of the same layer what was committed: each layer's pool has a lock, held only while memory is looked
at; the device has one too, and nobody who holds a pool waits for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache import files
from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import LlmcacheError, UsageError
from llmcache.kv.csd import Report, ScoreBlock
from llmcache.kv.csd.wire import BLOCK_TOKENS
from llmcache.kv.spill import Recovery
from llmcache.kv.spill.layout import check_rows
from llmcache.kv.tiers.config import Arrays, Selection, StoreConfig
from llmcache.kv.tiers.gather import Gatherer
from llmcache.kv.tiers.pool import Pool, score_slots
from llmcache.kv.tiers.spill import Fresh, Spill
from llmcache.kv.tiers.ssd import CsdTier, KeyRows, SsdTier, open_tier
from llmcache.kv.tiers.table import Restored, Snapshot, Tables, look


class KvStore(Gatherer):
    """Keys and values of `config.batch` sequences of one length; a context manager."""

    def __init__(self, config: StoreConfig, found: Snapshot | None = None) -> None:
        """Makes an empty store and its spill file. `found` is for `restore`."""
        super().__init__(config)
        ssd, recovery = open_tier(config, self.traffic, create=found is None)
        core = weakref.proxy(self)  # a cycle would keep the memory of the pools until the collector comes
        self._spill = None if ssd is None else Spill(core, ssd, None if found is None else found.told)
        self.restored: Restored | None = None
        try:
            if found is not None and self._spill is not None:
                self.restored = self._adopt(self._spill, found, recovery)
            elif config.path is not None:
                Tables.remove(config.path)  # those of a file that was replaced
        except BaseException:
            self.close()
            raise

    @classmethod
    def restore(cls, path: str | Path, config: StoreConfig) -> KvStore:
        """Goes on with the spill file at `path`, as its last writer left it; `restored` tells what may be missing.

        `config`: as for a new store; path and batch are those of the file. DataError: another model's file, or damaged.
        """
        found = look(Path(path), config.shape)
        return cls(replace(config, path=Path(path), batch=len(found.sequences)), found)

    def _adopt(self, spill: Spill, found: Snapshot, recovery: Recovery) -> Restored:
        """Takes over what was found: the tables, the tokens, and in memory sink, window, tail and the latest pages."""
        length = found.ids.shape[1]
        self.table.adopt(found.sequences)
        self.tokens.add(found.ids, found.positions)
        self.lengths[:] = length
        full, rest = divmod(length, self.shape.page_tokens)
        spill.adopt(full, bool(rest), found.streams)
        sink, bound = self.config.sink_pages, self.config.cpu_pages
        last = 0 if bound is None else max(sink, full - (bound - sink))
        pages = [*range(min(sink, last, self.table.pages)), *range(last, self.table.pages)]
        for layer in range(self.shape.layers):
            spill.bring(layer, self.table.table[:, pages].reshape(-1))
        if rest:
            self.table.unsettle(full)
        return Restored(length, rest, 0 if found.saved else self.shape.page_tokens - 1, recovery)

    # What it is

    def layer_length(self, layer: int) -> int:
        """Returns the tokens a layer has, those of a step that is under way included."""
        self.checked(layer)
        return int(self.lengths[layer])

    @property
    def everything(self) -> Selection:
        """The choice of all tokens of the middle."""
        return Selection.of_all(self.middle, self.batch, self.shape.kv_heads, self.shape.page_tokens)

    @property
    def ssd(self) -> SsdTier | None:
        """The ssd tier; None without a spill file."""
        return None if self._spill is None else self._spill.ssd

    @property
    def device_report(self) -> Report | None:
        """What the commands to the *emulated* device took so far, bytes, modelled and wall time; None without a device."""
        return self.ssd.device.report if isinstance(self.ssd, CsdTier) else None

    @property
    def ids(self) -> Int64s:
        """Ids of all tokens, [batch, length], as they were committed."""
        return self.tokens.ids

    @property
    def positions(self) -> Int64s:
        """Positions of all tokens, [batch, length], as they were committed."""
        return self.tokens.positions

    @property
    def memory_bytes(self) -> int:
        """Memory of the cpu pools of all layers, used or not."""
        return sum(pool.size_bytes for pool in self.pools)

    # Adding tokens

    def append(self, layer: int, *arrays: NDArray[Any]) -> None:
        """Adds tokens to a layer: keys and values [batch, kv_heads, tokens, dim] in the shape's numpy type.

        For int8 then their scales, float32 [batch, kv_heads, tokens]. Layers of a step come in any order; `commit` ends it.
        EnvironmentProblem (disk full, device dead): the tokens are in memory all the same, must not be appended again, and
        are written with the next page, or by `spill`.
        """
        size = self.shape.page_tokens
        self.checked(layer)
        check_rows(self.shape, arrays, self.batch)
        first = int(self.lengths[layer])
        end = first + arrays[0].shape[2]
        full = range(first // size, end // size)
        self.table.extend(self.shape.pages_of(end))
        pool = self.checked(layer)
        fresh = self._fresh(pool, arrays, first, full) if full and self._spill is not None else None
        kept = self._kept(first, end)
        if len(full) > 1 and self._spill is not None:
            # Many at once: what must go goes before they come, so that the pool need not be larger than its bound.
            more = sum(len(part) for part in kept) - bool(first % size) - bool(end % size)
            self._spill.trim(layer, end, more, placing=True)
        with pool.lock:
            for part in kept:
                start, stop = max(first, part.start * size), min(end, part.stop * size)
                for b, numbers in enumerate(self.table.table[:, part.start : part.stop]):
                    fitting = [array[b][:, start - first : stop - first] for array in arrays]
                    pool.fill(numbers, fitting, start - part.start * size)
            if fresh is not None and not any(full.start in part for part in kept):
                pool.drop(self.table.table[:, full.start])  # it was being filled, is full now, and does not stay
        self.lengths[layer] = end
        if self._spill is not None and (fresh is not None or self._spill.is_saved):
            self._spill.add(layer, fresh)
        if len(full) > 1 and self._spill is not None:
            self._spill.trim(layer, end, placing=True)

    def _kept(self, first: int, end: int) -> list[range]:
        """Pages of those an append touches that are to be in the pool: all, or sink, the latest, and the tail."""
        size, sink, bound = self.shape.page_tokens, self.config.sink_pages, self.config.cpu_pages
        touched = range(first // size, self.shape.pages_of(end))
        if bound is None:
            return [touched]
        # Whatever the sink leaves of the pool belongs to the latest: what falls out of it would only come in to go again.
        last = max(sink, end // size - (bound - sink))
        parts = [range(touched.start, min(sink, touched.stop)), range(max(touched.start, last), touched.stop)]
        return [part for part in parts if part]

    def _fresh(self, pool: Pool, rows: Sequence[NDArray[Any]], first: int, full: range) -> Fresh:
        """Rows of the full pages, with those that the first of them has already."""
        offset, count = first % self.shape.page_tokens, full.stop * self.shape.page_tokens - first
        found: list[Arrays] = []
        with pool.lock:
            for b, numbers in enumerate(self.table.table):
                arrays = [array[b][:, :count] for array in rows]
                if offset:
                    pairs = zip(pool.rows(int(numbers[full.start])), arrays, strict=True)
                    arrays = [np.concatenate([old[:, :offset], new], axis=1) for old, new in pairs]
                found.append(arrays)
        return full.start, found

    def commit(self, ids: Int64s, positions: Int64s) -> None:
        """Ends a step after all layers: takes the ids and positions [batch, tokens] of its tokens. Errors as `append`."""
        size, before = self.shape.page_tokens, self.length
        if ids.ndim != 2 or ids.shape != positions.shape or len(ids) != self.batch:
            raise ValueError(f"ids: {ids.shape}, positions: {positions.shape}; both [{self.batch}, tokens] is needed")
        if (self.lengths != before + ids.shape[1]).any():
            found = self.lengths.tolist()
            raise ValueError(f"ids: {ids.shape[1]} tokens after {before}, but the layers have {found}")
        self.tokens.add(ids, positions)
        self.step += 1
        if self.length // size == before // size or self._spill is None:
            return
        try:
            self._spill.write_tokens()
        finally:
            for layer in range(self.shape.layers):
                self._spill.trim(layer, self.length)

    def spill(self) -> None:
        """Writes what could not be written before; EnvironmentProblem if it still cannot."""
        if self._spill is not None:
            self._spill.resume()

    # Looking and bringing

    def in_cpu(self, layer: int, sequence: int) -> Flags:
        """Returns for each whole page of a sequence, [length // page_tokens], whether it is in the cpu pool of a layer."""
        pool = self.checked(layer, sequence)
        pages = self.length // self.shape.page_tokens
        with pool.lock:
            return pool.slot_of[self.table.table[sequence, :pages]] >= 0

    def score_cpu(
        self, layer: int, sequence: int, queries: Floats, pages: Int64s | None = None, combine: str = "max"
    ) -> tuple[Int64s, Floats]:
        """Returns pages in the pool, int64 [n] ascending, and scores float32 [kv_heads, n * page_tokens] of their tokens.

        `queries` [heads, head_dim] float32. `pages`: score no others; None: those of the middle.
        """
        pool = self.checked(layer, sequence)
        wanted, numbers = self._wanted(sequence, pages)
        with pool.lock:
            slots = pool.slot_of[numbers]
            here = slots >= 0
            return wanted[here], score_slots(pool.keys, slots[here], queries, combine, self.config.threads)

    def _wanted(self, sequence: int, pages: Int64s | None) -> tuple[Int64s, Int64s]:
        """Whole pages to be scored, ascending, and their numbers; `pages` None: those of the middle."""
        wanted = np.arange(self.middle.start, self.middle.stop) if pages is None else np.sort(pages)
        return self.checked_pages(sequence, wanted, range(self.length // self.shape.page_tokens))

    def score_ssd(
        self,
        layer: int,
        sequence: int,
        queries: Floats,
        pages: Int64s | None = None,
        combine: str = "max",
        block_tokens: int = BLOCK_TOKENS,
    ) -> Iterator[ScoreBlock]:
        """Yields score blocks of pages on the ssd tier as they come, each of one key head.

        `pages`: None for those of the middle that are not in the pool. A device scores near its data, at its own pace, and
        rounds to halves: take all blocks before anything else is asked of the store's device. Keys of a file come to the
        host. Errors (DataError: a page is damaged; EnvironmentProblem: the device died) come from the iteration.
        """
        pool = self.checked(layer, sequence)
        wanted, numbers = self._wanted(sequence, pages)
        if pages is None:
            with pool.lock:
                wanted = wanted[pool.slot_of[numbers] < 0]
        if self._spill is None:
            return iter(())
        return self._spill.score(layer, sequence, wanted, queries, combine, block_tokens)

    def read_keys(self, layer: int, sequence: int, pages: Int64s) -> KeyRows:
        """Returns copies of the keys [n, kv_heads, page_tokens, head_dim] of whole pages, and for int8 their scales.

        For indexes and page summaries; bytes from the ssd tier are counted as "index".
        """
        pool = self.checked(layer, sequence)
        pages, numbers = self.checked_pages(sequence, pages, range(self.length // self.shape.page_tokens))
        with pool.lock:
            slots = pool.slot_of[numbers]
            keys = pool.keys.pages[slots]
            scales = None if pool.keys.scales is None else pool.keys.scales[slots]
        missing = np.unique(numbers[slots < 0])
        if self._spill is not None:
            for found, rows, row_scales in self._spill.read_keys(layer, missing):
                for index, number in enumerate(found):
                    keys[numbers == number] = rows[index]
                    if scales is not None and row_scales is not None:
                        scales[numbers == number] = row_scales[index]
        return keys, scales

    # Moving pages

    def move_up(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Reads pages of the middle into the cpu pool; ValueError if it has no room, or one is not of the middle."""
        self._movable().up(layer, sequence, pages)

    def move_down(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Drops pages of the middle from the cpu pool; ValueError if one is pinned (sink, window)."""
        self._movable().down(layer, sequence, pages)

    def _movable(self) -> Spill:
        if self._spill is None:
            raise ValueError("path: the store has no ssd tier that pages could move to")
        return self._spill

    # Changing sequences: whole pages are shared, the page that is being filled is everyone's own

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens` tokens; takes a step that is under way back."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: {tokens}, between 0 and {self.length} is needed")
        if (self.lengths == tokens).all():
            return
        full, rest = divmod(tokens, self.shape.page_tokens)
        before = dict(self.table.ends)
        if self._spill is not None:
            # What will be sink, window and tail then must be in memory.
            sink = range(min(full, self.config.sink_pages))
            last = range(max(sink.stop, full - self.config.window_pages), full + bool(rest))
            for layer in range(self.shape.layers):
                self._spill.bring(layer, self.table.table[:, [*sink, *last]].reshape(-1))
        self.tokens.length = tokens
        self.lengths[:] = tokens
        self._forget(self.table.cut(self.shape.pages_of(tokens)))
        if rest:
            # What was full and is not any more may be shared, and will be another page.
            self._choose(np.arange(self.batch))
            self.table.unsettle(full)
            self._drop_served(self.table.table[:, full])
        if self._spill is not None:
            self._spill.shrink(before)
            for layer in range(self.shape.layers):
                self._spill.trim(layer, tokens)

    def select(self, index: Int64s) -> None:
        """Makes a batch of the sequences `index`, any of them any number of times; shares whole pages, copies tails.

        Between steps only; free if it is the batch that there is. What nobody refers to any more is taken away in the file.
        """
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0 or index.max() >= self.batch:
            raise ValueError(f"index: {index.tolist()}, sequences 0 to {self.batch - 1} can be named")
        self.check_between_steps()
        if np.array_equal(index, np.arange(self.batch)):
            return
        before = dict(self.table.ends)
        self._choose(index)
        self.tokens.choose(index)
        if self._spill is not None:
            self._spill.shrink(before)

    def _choose(self, index: Int64s) -> None:
        gone, copies = self.table.choose(index, bool(self.length % self.shape.page_tokens))
        for pool in self.pools:
            with pool.lock:
                pool.know(self.table.numbers)
                for source, target in copies:
                    pool.copy(source, target)
        self.bound_pools()
        self._forget(gone)

    def _forget(self, numbers: Int64s) -> None:
        for pool in self.pools:
            with pool.lock:
                pool.forget(numbers)
        self._drop_served(numbers)

    # Beginning and end

    @property
    def beside(self) -> str:
        """What the last `save` was given, also that of whoever had the spill file before; "" if there was none."""
        return "" if self._spill is None else self._spill.beside

    def tail(self) -> tuple[Int64s, Int64s, list[list[NDArray[Any]]]]:
        """Returns the ids and positions [batch, n] of the tokens that fill no page, and the rows of each layer.

        Rows: keys, values and for int8 their scales, [batch, kv_heads, n, ..], as `append` takes them. Between steps only.
        """
        self.check_between_steps()
        full, rest = divmod(self.length, self.shape.page_tokens)
        rows: list[list[NDArray[Any]]] = []
        for pool in self.pools if rest else ():
            with pool.lock:
                pages = [pool.rows(int(number)) for number in self.table.table[:, full]]
                rows.append([np.stack([side[:, :rest] for side in sides]) for sides in zip(*pages, strict=True)])
        return self.ids[:, self.length - rest :], self.positions[:, self.length - rest :], rows

    def save(self, beside: str = "") -> None:
        """Writes all, the last page too, though it is not full: `restore` then loses nothing. Between steps only.

        `beside`: name (hexadecimal) of what else belongs to this save; it is told with it, or not at all.
        """
        if self._spill is None:
            raise UsageError("path: the store has no spill file to save to", "make it with one")
        self.check_between_steps()
        self._spill.save(beside)

    def restart_device(self) -> None:
        """Starts the *emulated* device anew after it has died, and writes what it had not acknowledged.

        DataError if something is missing that it had.
        """
        if self._spill is None or not isinstance(self._spill.ssd, CsdTier):
            raise UsageError("ssd: the store has no device", "make it with ssd='csd'")
        self._spill.ssd.restart()
        self._spill.resume()

    def close(self) -> None:
        """Flushes and closes the spill file; what fills no page is not in it, unless `save` was called."""
        if self._spill is not None:
            self._spill.ssd.close()

    def discard(self) -> None:
        """Closes it and deletes its spill file and page tables."""
        try:
            self.close()
        finally:
            if self.config.path is not None:
                files.remove(self.config.path)
                Tables.remove(self.config.path)

    def __enter__(self) -> KvStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the error that is under way says more than one that follows from it
            with contextlib.suppress(LlmcacheError):
                self.close()
