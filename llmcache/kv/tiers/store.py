"""KvStore: the keys and values of a batch of sequences of equal length, in tiers (gpu, cpu, ssd).

A sequence consists of sink pages, middle pages, window pages and a tail, which is an incomplete page. Sink, window and
tail are always in memory; policies choose among the middle. Every full page is written to the ssd tier once, in order: a
move down drops the copy in memory (in hillinfer.txt, section 3.3, it writes the page), a move up reads the page.

Concurrency: one thread appends, commits, crops and reorders. Concurrently, another may score, stage and move pages of
other layers, or committed pages of the same layer. The lock of a layer's pool is held only for memory accesses, never
while a thread waits for the disk or the device, which has its own lock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache import files
from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import LlmcacheError, UsageError
from llmcache.kv.spill.layout import check_rows
from llmcache.kv.tiers.config import Arrays, Gathered, Selection, StoreConfig, repeated
from llmcache.kv.tiers.pool import (
    FEW_BYTES,
    NOT_HERE,
    Destination,
    Pool,
    RowCache,
    copy_few,
    copy_pages,
    copy_repeated,
    count_missing,
    put_rows,
    rows_at,
    score_slots,
)
from llmcache.kv.tiers.spill import Fresh, Spill
from llmcache.kv.tiers.ssd import Buffers, CsdTier, FileTier, Memory, SsdTier, open_tier
from llmcache.kv.tiers.table import Sequences, Snapshot, Tables, snapshot_of
from llmcache.papers.csd import Report, ScoreBlock
from llmcache.papers.csd.wire import BLOCK_TOKENS

Sides = tuple[NDArray[Any], NDArray[Any]]
RECENT_SHARE = 8  # rows are cached for at most one in this many tokens of the context
MOST_SCATTERED = 0.75
"""Average number of rows per head and page up to which rows are read individually, instead of whole pages."""


class FastTier(Protocol):
    """A cache of pages in the memory of the accelerator (gpu), so that `KvStore.gather_fast` sends only missing pages.

    A page has the same number in all layers and in all sequences that share it. For each gather of a layer, the store calls
    `have`; `put` with the missing pages and the page being filled; `rows`; and `drop` with the page being filled. Pages of a
    gather must not be evicted before `rows`. The store also calls `drop` for removed pages, whose numbers are reused. Calls
    come from one thread at a time.
    """

    def have(self, layer: int, pages: Int64s) -> Flags:
        """Return which of `pages` [n] are cached, and mark them as used."""

    def put(self, layer: int, pages: Int64s, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy pages [n, kv_heads, page_tokens, dim] over the least recently used; ValueError if they do not fit."""

    def rows(self, layer: int, pages: Int64s, offsets: Int64s) -> tuple[Any, Any]:
        """Return keys and values [batch, kv_heads, k, dim] of head h's tokens `offsets` [..., k] in `pages` [..., k]."""

    def drop(self, pages: Int64s) -> None: ...


@dataclass
class Staged:
    """Rows of one layer, fetched ahead of time, with room for sink, window and tail.

    `sides`: keys and values [batch, kv_heads, tokens, dim] in `memory`.
    """

    layer: int
    middle: range
    positions: Int64s
    memory: Memory
    sides: Sides


class KvStore(Sequences):
    """Keys and values of `config.batch` sequences; a context manager. It creates a spill file unless it restores `found`."""

    def __init__(self, config: StoreConfig, found: Snapshot | None = None) -> None:
        super().__init__(config)
        self._buffers = Buffers()
        self._recent = [RowCache(config.cpu_rows) for _ in range(config.shape.layers)]
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        ssd = open_tier(config, self.traffic, create=found is None)
        core = weakref.proxy(self)  # a reference cycle would delay the release of the pools until a garbage collection
        self._spill = None if ssd is None else Spill(core, ssd, None if found is None else found.tables)
        try:
            if found is not None and self._spill is not None:
                self._adopt(self._spill, found)
            elif config.path is not None:
                Tables.remove(config.path)  # the tables of a spill file that was deleted
        except BaseException:
            self.close()
            raise

    @classmethod
    def restore(cls, path: str | Path, config: StoreConfig) -> KvStore:
        """Return a store that continues the spill file at `path`; path and batch of `config` are taken from the file.

        Tokens after the last full page are lost without `save`. DataError: the file is damaged, or from another model.
        """
        found = snapshot_of(Path(path), config.shape)
        return cls(replace(config, path=Path(path), batch=len(found.sequences)), found)

    def _adopt(self, spill: Spill, found: Snapshot) -> None:
        length = found.ids.shape[1]
        self.table.adopt(found.sequences)
        self.tokens.add(found.ids, found.positions)
        self.lengths[:] = length
        full, rest = divmod(length, self.shape.page_tokens)
        spill.adopt(full, bool(rest), found.streams)
        self._fill(spill)
        if rest:
            self.table.unsettle(full)

    def _fill(self, spill: Spill) -> None:
        sink, bound = self.config.sink_pages, self.config.cpu_pages
        last = 0 if bound is None else max(sink, self.length // self.shape.page_tokens - (bound - sink))
        pages = [*range(min(sink, last, self.table.pages)), *range(last, self.table.pages)]
        for layer in range(self.shape.layers):
            spill.bring(layer, self.table.table[:, pages].reshape(-1))

    def limit(self, cpu_pages: int, buffer_bytes: int) -> None:
        """Set the limits of the pools and of a reusable buffer; between steps only."""
        self.check_between_steps()
        spill, before = self._movable(), self.config.cpu_pages
        self.config = replace(self.config, cpu_pages=cpu_pages)
        self.bound_pools()
        for buffers in (self._buffers, spill.ssd.buffers) if isinstance(spill.ssd, FileTier) else (self._buffers,):
            buffers.most_bytes = buffer_bytes
        if before is not None and cpu_pages > before:
            self._fill(spill)
        for layer, pool in enumerate(self.pools):
            spill.trim(layer, self.length)
            with pool.lock:
                pool.shrink()

    # Properties

    def layer_length(self, layer: int) -> int:
        """Return the tokens of a layer, including those of a step in progress."""
        self.checked(layer)
        return int(self.lengths[layer])

    @property
    def everything(self) -> Selection:
        return Selection.of_all(self.middle, self.batch, self.shape.kv_heads, self.shape.page_tokens)

    @property
    def ssd(self) -> SsdTier | None:
        return None if self._spill is None else self._spill.ssd

    @property
    def device_report(self) -> Report | None:
        return self.ssd.device.report if isinstance(self.ssd, CsdTier) else None

    @property
    def ids(self) -> Int64s:
        found: Int64s = self.tokens.sides[0]
        return found

    @property
    def positions(self) -> Int64s:
        found: Int64s = self.tokens.sides[1]
        return found

    @property
    def memory_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self.pools) + sum(rows.size_bytes for rows in self._recent)

    # Adding tokens

    def append(self, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Append keys and values [batch, kv_heads, tokens, dim] to a layer; `commit` ends the step.

        MissingRequirement (disk full, device stopped): the tokens are in memory, must not be appended again, and are written
        with the next page or by `spill`.
        """
        size = self.shape.page_tokens
        self.checked(layer)
        check_rows(self.shape, keys, values, self.batch)
        arrays = (keys, values)
        first = int(self.lengths[layer])
        end = first + keys.shape[2]
        full = range(first // size, end // size)
        self.table.extend(self.shape.pages_of(end))
        pool = self.checked(layer)
        fresh = self._full_rows(pool, arrays, first, full) if full and self._spill is not None else None
        resident = self._resident_ranges(first, end)
        if len(full) > 1 and self._spill is not None:
            # Drop pages first, so that the pool need not exceed its limit.
            more = sum(len(part) for part in resident) - bool(first % size) - bool(end % size)
            self._spill.trim(layer, end, more, placing=True)
        with pool.lock:
            for part in resident:
                start, stop = max(first, part.start * size), min(end, part.stop * size)
                for b, numbers in enumerate(self.table.table[:, part.start : part.stop]):
                    fitting = [array[b][:, start - first : stop - first] for array in arrays]
                    pool.fill(numbers, fitting, start - part.start * size)
            if fresh is not None and not any(full.start in part for part in resident):
                pool.drop(self.table.table[:, full.start])  # the page that was being filled is full, and does not stay
        self.lengths[layer] = end
        if self._spill is not None and fresh is not None:
            self._spill.add(layer, fresh)
        elif self._spill is not None and self._spill.is_saved:
            self._spill.finish_changes()
        if len(full) > 1 and self._spill is not None:
            self._spill.trim(layer, end, placing=True)

    def _resident_ranges(self, first: int, end: int) -> list[range]:
        size, sink, bound = self.shape.page_tokens, self.config.sink_pages, self.config.cpu_pages
        touched = range(first // size, self.shape.pages_of(end))
        if bound is None:
            return [touched]
        # The latest pages get all of the pool but the sink: older ones would be dropped at once.
        last = max(sink, end // size - (bound - sink))
        parts = [range(touched.start, min(sink, touched.stop)), range(max(touched.start, last), touched.stop)]
        return [part for part in parts if part]

    def _full_rows(self, pool: Pool, rows: Sequence[NDArray[Any]], first: int, full: range) -> Fresh:
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
        """End a step after all layers: add the ids and positions [batch, tokens] of its tokens. Errors as `append`."""
        size, before = self.shape.page_tokens, self.length
        if ids.ndim != 2 or ids.shape != positions.shape or len(ids) != self.batch:
            raise ValueError(f"ids, positions: must both be [{self.batch}, tokens], not {ids.shape} and {positions.shape}")
        if (self.lengths != before + ids.shape[1]).any():
            found = self.lengths.tolist()
            raise ValueError(f"ids: {ids.shape[1]} tokens after {before} do not match the {found} tokens of the layers")
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
        """Write pages whose write failed before; MissingRequirement if it fails again."""
        if self._spill is not None:
            self._spill.resume()

    # Scoring and reading

    def in_cpu(self, layer: int, sequence: int) -> Flags:
        """Return which of the full pages of a sequence [length // page_tokens] are in the cpu pool."""
        pool = self.checked(layer, sequence)
        pages = self.length // self.shape.page_tokens
        with pool.lock:
            return pool.slot_of[self.table.table[sequence, :pages]] >= 0

    def score_cpu(
        self, layer: int, sequence: int, queries: Floats, pages: Int64s | None = None, combine: str = "max"
    ) -> tuple[Int64s, Floats]:
        """Return pages in the pool, int64 [n] ascending, and the scores float32 [kv_heads, n * page_tokens] of their tokens.

        `queries` [heads, head_dim] float32. `pages`: score only these; None for the middle.
        """
        pool = self.checked(layer, sequence)
        wanted, numbers = self._wanted(sequence, pages)
        with pool.lock:
            slots = pool.slot_of[numbers]
            resident = slots >= 0
            return wanted[resident], score_slots(pool.sides[0], slots[resident], queries, combine, self.config.threads)

    def _wanted(self, sequence: int, pages: Int64s | None) -> tuple[Int64s, Int64s]:
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
        """Yield score blocks, each of one key head, of pages on the ssd tier.

        `pages`: None for those of the middle that are not in the pool. A device rounds scores to fp16; consume all blocks
        before its next command. DataError: a page is damaged; MissingRequirement: the device stops.
        """
        pool = self.checked(layer, sequence)
        wanted, numbers = self._wanted(sequence, pages)
        if pages is None:
            with pool.lock:
                wanted = wanted[pool.slot_of[numbers] < 0]
        if self._spill is None:
            return iter(())
        return self._spill.score(layer, sequence, wanted, queries, combine, block_tokens)

    def read_side(self, layer: int, sequence: int, pages: Int64s, side: int) -> NDArray[Any]:
        """Return copies of the keys (`side` 0) or values (1) [n, kv_heads, page_tokens, dim] of full pages."""
        pool = self.checked(layer, sequence)
        pages, numbers = self.checked_pages(sequence, pages, range(self.length // self.shape.page_tokens))
        with pool.lock:
            slots = pool.slot_of[numbers]
            rows: NDArray[Any] = pool.sides[side][slots]
        missing = np.unique(numbers[slots < 0])
        if self._spill is not None:
            for stream, found in self.table.by_stream(missing):
                read = self._spill.ssd.read_side(stream, layer, self.table.places(found), side, "index")
                for index, number in enumerate(found):
                    rows[numbers == number] = read[index]
        return rows

    def pinned_keys(self, layer: int) -> tuple[NDArray[Any], Int64s]:
        """Return copies of the keys [batch, kv_heads, n, head_dim] of sink, window and tail, and their positions [n]."""
        pool, middle, length, size = self.checked(layer), self.middle, int(self.lengths[layer]), self.shape.page_tokens
        positions = np.concatenate([np.arange(middle.start * size), np.arange(middle.stop * size, length)])
        table = self.table.table[:, : self.shape.pages_of(length)]
        numbers = np.concatenate([table[:, : middle.start], table[:, middle.stop :]], axis=1)
        with pool.lock:
            by_head = pool.sides[0][pool.slot_of[numbers]].swapaxes(1, 2)
        keys = by_head.reshape(*by_head.shape[:2], -1, by_head.shape[4])
        return keys[:, :, : len(positions)], positions

    # Gathering rows for attention

    def stage(self, layer: int, selection: Selection, length: int | None = None) -> Staged:
        """Fetch chosen rows ahead of time for `complete`; ValueError if a position is not in the middle.

        `length`: tokens of the layer at that time; None for one more than now, as in a decode step.
        """
        self.checked(layer)
        middle = self.middle
        positions = self._checked(selection, middle)
        ends = (self.length + 1 if length is None else length) - len(middle) * self.shape.page_tokens
        staged = Staged(layer, middle, positions, *self._room(ends + selection.count))
        self._copy_in(staged, positions, middle.start * self.shape.page_tokens, True)
        return staged

    def gather(self, layer: int, selection: Selection) -> Gathered:
        """Return sink, chosen tokens, window and tail of a layer, including tokens of a step in progress."""
        return self.complete(self.stage(layer, selection, self.layer_length(layer)))

    def complete(self, staged: Staged) -> Gathered:
        """Like `gather`, with the staged rows; tokens that have left the window in the meantime are included."""
        length = self.layer_length(staged.layer)
        positions = self._with_ends(staged.middle, staged.positions, length)
        lead = staged.middle.start * self.shape.page_tokens
        end = lead + staged.positions.shape[2]
        if staged.sides[0].shape[2] != positions.shape[2]:  # another number of tokens was appended than expected
            old, memory = staged.sides, staged.memory
            staged.memory, staged.sides = self._room(positions.shape[2])
            for into, rows in zip(staged.sides, old, strict=True):
                into[:, :, lead:end] = rows[:, :, lead:end]
            self._buffers.give_back(memory)
        self._copy_in(staged, positions[:, :, :lead], 0, False)
        self._copy_in(staged, positions[:, :, end:], end, False)
        return Gathered(*staged.sides, positions, partial(self._buffers.give_back, staged.memory))

    def attended_positions(self, layer: int, selection: Selection) -> Int64s:
        return self._with_ends(self.middle, selection.positions, self.layer_length(layer))

    def _checked(self, selection: Selection, middle: range) -> Int64s:
        found = selection.positions
        if found.shape[:2] != (self.batch, self.shape.kv_heads):
            raise ValueError(f"positions: must be [{self.batch}, {self.shape.kv_heads}, k], not {found.shape}")
        first, end = (page * self.shape.page_tokens for page in (middle.start, middle.stop))
        if found.size and (found[..., 0].min() < first or found[..., -1].max() >= end):
            raise ValueError(f"positions: must be from {first} to {end - 1}")
        # The compiled loops support only this kind of array.
        plain = found.flags.writeable and found.strides[2] == found.itemsize
        return found if plain else found.copy()

    def _with_ends(self, middle: range, chosen: Int64s, length: int) -> Int64s:
        size = self.shape.page_tokens
        lead, recent = middle.start * size, length - middle.stop * size
        found = np.empty((*chosen.shape[:2], lead + chosen.shape[2] + recent), np.int64)
        found[..., :lead] = np.arange(lead)
        found[..., lead : found.shape[2] - recent] = chosen
        found[..., found.shape[2] - recent :] = np.arange(length - recent, length)
        return found

    def _room(self, tokens: int) -> tuple[Memory, Sides]:
        forms = self.shape.forms(self.batch, self.shape.kv_heads, tokens)
        sizes = [math.prod(form) * dtype.itemsize for form, dtype in forms]
        memory = self._buffers.take(*sizes)
        parts = zip(memory, sizes, forms, strict=True)
        keys, values = (side[:size].view(dtype).reshape(form) for side, size, (form, dtype) in parts)
        return memory, (keys, values)

    def _copy_in(self, staged: Staged, positions: Int64s, first: int, chosen: bool) -> None:
        if not positions.size:
            return
        outs = [side[:, :, first : first + positions.shape[2]] for side in staged.sides]
        pool, table = self.checked(staged.layer), self.table.table
        with pool.lock:
            pool.extend_to(self.table.numbers)  # another layer may have added pages since the check
            index = pool.slot_of[table]
            if sum(out.nbytes for out in outs) < FEW_BYTES:
                missing, repeats = copy_few(pool.sides, index, positions, outs)
            else:
                missing = count_missing(index, positions, self.shape.page_tokens) if (index < 0).any() else 0
                repeats = int(repeated(positions).sum())
                if missing < positions.size:
                    copy_pages(pool.sides, index, positions, outs, self.config.threads)
        if missing and self._spill is not None:
            # Without the lock: other threads may use the pool during the read.
            missing = self._fetch(self._spill.ssd, staged.layer, index, positions, outs)
            if repeats:
                copy_repeated(positions, outs)
        if chosen:
            self.traffic.count(hits_cpu=positions.size - repeats - missing, hits_ssd=missing)

    # Reading rows from the ssd tier

    def _fetch(self, ssd: SsdTier, layer: int, index: Int64s, positions: Int64s, outs: Arrays) -> int:
        """Read the rows whose pages are not in the pool (`index` [batch, pages] below 0); return their number."""
        size, recent = self.shape.page_tokens, self._recent[layer]
        most = min(recent.capacity, self.length // RECENT_SHARE)
        if isinstance(ssd, FileTier) and positions.shape[2] <= most:
            with recent.lock:
                absent = recent.absent(index, positions, size)
                self._read(ssd, layer, absent, positions, outs)
                recent.lay(index, positions, size, absent, outs, most)
            return int(absent.sum())
        absent = (np.take_along_axis(index[:, None], positions // size, 2) < 0) & ~repeated(positions)
        if isinstance(ssd, FileTier):
            self._read(ssd, layer, absent, positions, outs)
        else:
            self._read_near_data(ssd, layer, absent, positions, outs)
        return int(absent.sum())

    def _read(self, ssd: FileTier, layer: int, absent: Flags, positions: Int64s, outs: Arrays) -> None:
        """Read the `absent` [batch, kv_heads, k] rows: individually, or by whole pages if there are many."""
        size = self.shape.page_tokens
        # The current table: concurrent appends of another layer may have added pages.
        table = self.table.table
        where, numbers, rows = rows_at(absent, positions, table, size)
        streams = self.table.stream[numbers]
        several = set(streams.tolist())  # faster than numpy for few numbers
        for stream in several:
            in_stream = streams == stream if len(several) > 1 else slice(None)
            pages = set(numbers[in_stream].tolist())
            if len(numbers[in_stream]) > MOST_SCATTERED * len(pages) * self.shape.kv_heads:
                ((_, found),) = self.table.by_stream(np.array(list(pages)))
                known = np.full(self.table.numbers, NOT_HERE, np.int64)
                known[found] = np.arange(len(found))
                target = Destination(known[table], positions, outs, size)
                ssd.read_through(stream, layer, self.table.places(found), target.take, "fetch")
            else:
                sides = ssd.read_rows(stream, layer, self.table.places(numbers[in_stream]), rows[in_stream], "fetch")
                put_rows(outs, where[in_stream], sides)

    def _read_near_data(self, ssd: CsdTier, layer: int, absent: Flags, positions: Int64s, outs: Arrays) -> None:
        size = self.shape.page_tokens
        for b, of_sequence in enumerate(positions):
            streams = self.table.stream[self.table.table[b]]
            of_rows = streams[of_sequence // size]
            for stream in np.unique(of_rows[absent[b]]).tolist():
                # A sequence's pages of one stream are consecutive, from the start of the stream.
                first = int(np.flatnonzero(streams == stream)[0]) * size
                in_stream = absent[b] & (of_rows == stream)
                local = [of_head[mask] - first for of_head, mask in zip(of_sequence, in_stream, strict=True)]
                for out, rows in zip(outs, ssd.gather(stream, layer, local, "fetch"), strict=True):
                    out[b][in_stream] = rows

    # Gathering through a fast tier

    def _drop_served(self, numbers: Int64s) -> None:
        if len(numbers):
            for fast in list(self._served):
                fast.drop(numbers)

    def gather_fast(self, layer: int, selection: Selection, fast: FastTier) -> Gathered:
        """Like `gather`, with keys and values from `fast.rows`; only missing pages are sent and count as "attend"."""
        size = self.shape.page_tokens
        pool, middle, length = self.checked(layer), self.middle, int(self.lengths[layer])
        self._served.add(fast)
        positions = self._with_ends(middle, self._checked(selection, middle), length)
        numbers = np.stack([row[pages] for row, pages in zip(self.table.table, positions // size, strict=True)])
        used = np.unique(numbers)
        # A page that is being filled changes in each step.
        filling = np.isin(used, self.table.table[:, length // size :])
        on_device = np.zeros(len(used), np.bool_)
        on_device[~filling] = fast.have(layer, used[~filling])
        chosen = numbers[:, :, middle.start * size :][:, :, : selection.count]
        on_gpu = np.isin(chosen, used[on_device])
        gpu, cpu = int(on_gpu.sum()), int(((pool.slot_of[chosen] != NOT_HERE) & ~on_gpu).sum())
        self.traffic.count(hits_gpu=gpu, hits_cpu=cpu, hits_ssd=chosen.size - cpu - gpu)
        self._send(layer, pool, used[~on_device], fast)
        keys, values = fast.rows(layer, numbers, positions % size)
        fast.drop(used[filling])
        return Gathered(keys, values, positions)

    def _send(self, layer: int, pool: Pool, numbers: Int64s, fast: FastTier) -> None:
        with pool.lock:
            resident = pool.slot_of[numbers] != NOT_HERE
            sides = [side[pool.slot_of[numbers[resident]]] for side in pool.sides]
        read = () if self._spill is None else self._spill.read(layer, numbers[~resident], "fetch")
        for found, (keys, values) in itertools.chain([(numbers[resident], sides)] if resident.any() else [], read):
            fast.put(layer, found, keys, values)
            self.traffic.add("cpu", "gpu", "attend", keys.nbytes + values.nbytes)

    # Moving pages

    def move_up(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Read pages of the middle into the cpu pool; ValueError if they exceed its limit, or one is not in the middle."""
        self._movable().up(layer, sequence, pages)

    def move_down(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Drop pages of the middle from the cpu pool; ValueError if one is pinned (sink, window)."""
        self._movable().down(layer, sequence, pages)

    def _movable(self) -> Spill:
        if self._spill is None:
            raise ValueError("path: the store has no spill file, so no ssd tier to move pages to")
        return self._spill

    # Changing sequences: full pages are shared, the page being filled is not

    def crop(self, tokens: int) -> None:
        """Cut every sequence to its first `tokens` tokens, and roll back a step in progress."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: must be from 0 to {self.length}, not {tokens}")
        if (self.lengths == tokens).all():
            return
        full, rest = divmod(tokens, self.shape.page_tokens)
        before = dict(self.table.ends)
        if self._spill is not None:
            # Sink, window and tail of the shorter context must be in memory.
            sink = range(min(full, self.config.sink_pages))
            last = range(max(sink.stop, full - self.config.window_pages), full + bool(rest))
            for layer in range(self.shape.layers):
                self._spill.bring(layer, self.table.table[:, [*sink, *last]].reshape(-1))
        self.tokens.length = tokens
        self.lengths[:] = tokens
        for recent in self._recent:
            recent.crop(tokens)
        self._forget(self.table.cut(self.shape.pages_of(tokens)))
        if rest:
            # The last page is partial now and will be overwritten, but may be shared.
            self._choose(np.arange(self.batch))
            self.table.unsettle(full)
            self._drop_served(self.table.table[:, full])
        if self._spill is not None:
            self._spill.shrink(before)
            for layer in range(self.shape.layers):
                self._spill.trim(layer, tokens)

    def select(self, index: Int64s) -> None:
        """Replace the batch by the sequences `index`, with repetition; between steps only.

        Full pages are shared, tails are copied, and unused pages are removed from the file.
        """
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0 or index.max() >= self.batch:
            raise ValueError(f"index: must name sequences from 0 to {self.batch - 1}, not {index.tolist()}")
        self.check_between_steps()
        if np.array_equal(index, np.arange(self.batch)):
            return
        before = dict(self.table.ends)
        self._choose(index)
        for recent in self._recent:
            recent.choose(index)
        self.tokens.choose(index)
        if self._spill is not None:
            self._spill.shrink(before)

    def _choose(self, index: Int64s) -> None:
        unused, copies = self.table.choose(index, bool(self.length % self.shape.page_tokens))
        for pool in self.pools:
            with pool.lock:
                pool.extend_to(self.table.numbers)
                for source, target in copies:
                    pool.copy(source, target)
        self.bound_pools()
        self._forget(unused)

    def _forget(self, numbers: Int64s) -> None:
        for pool in self.pools:
            with pool.lock:
                pool.forget(numbers)
        self._drop_served(numbers)

    # Saving and closing

    @property
    def sidecar(self) -> str:
        """The argument of the last `save`, also by a previous owner of the spill file; "" if there was none."""
        return "" if self._spill is None else self._spill.sidecar

    def tail(self) -> tuple[Int64s, Int64s, list[list[NDArray[Any]]]]:
        """Return ids and positions [batch, n] of the tokens in the incomplete page, and the rows of each layer."""
        self.check_between_steps()
        full, rest = divmod(self.length, self.shape.page_tokens)
        rows: list[list[NDArray[Any]]] = []
        for pool in self.pools if rest else ():
            with pool.lock:
                pages = [pool.rows(int(number)) for number in self.table.table[:, full]]
                rows.append([np.stack([side[:, :rest] for side in sides]) for sides in zip(*pages, strict=True)])
        return self.ids[:, self.length - rest :], self.positions[:, self.length - rest :], rows

    def save(self, sidecar: str = "") -> None:
        """Write everything, including the incomplete page, so that `restore` loses nothing. Between steps only.

        `sidecar`: a hexadecimal name for the caller's file that belongs to this save; stored atomically with it.
        """
        if self._spill is None:
            raise UsageError("path: the store has no spill file to save to", "create the store with a path")
        self.check_between_steps()
        self._spill.save(sidecar)

    def restart_device(self) -> None:
        """Restart the stopped *emulated* device, and write unacknowledged pages; DataError if others are missing."""
        if not isinstance(self.ssd, CsdTier):
            raise UsageError("ssd: the store has no device", "create the store with ssd='csd'")
        self.ssd.restart()
        self.spill()

    def close(self) -> None:
        """Flush and close the spill file; the incomplete page is lost unless `save` was called."""
        if self.ssd is not None:
            self.ssd.close()

    def discard(self) -> None:
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
        else:  # the original error is more useful than one that follows from it
            with contextlib.suppress(LlmcacheError):
                self.close()
