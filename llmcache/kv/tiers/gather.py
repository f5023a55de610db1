"""Bringing what a layer attends to side by side: sink, chosen tokens, window and tail, wherever they are.

`stage` does the part that may have to wait for the disk ahead of time; `gather` completes it. One thread stages a layer
while another computes: memory is taken from `Buffers` under a lock, and each result has its own. `gather_fast` goes through
the memory of an accelerator, a `FastTier`: pages that attention used lately are not sent to it again.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Flags, Int64s
from llmcache.kv.csd import KvRows
from llmcache.kv.tiers.config import Arrays, Gathered, Selection, StoreConfig
from llmcache.kv.tiers.pool import NOT_HERE, Destination, Pool, copy_pages, mark_missing
from llmcache.kv.tiers.spill import Spill
from llmcache.kv.tiers.ssd import CsdTier, FileTier
from llmcache.kv.tiers.table import Sequences

Sides = tuple[NDArray[Any], NDArray[Any]]
Memory = tuple[Bytes, Bytes]
ASKED_ROWS = 1 << 20
"""What a device is asked for at a time: the numbers of the rows must fit its desk."""
KEPT_BUFFERS = 4
"""Free buffers that are kept: of one layer that computes and one that is staged, twice."""


class FastTier(Protocol):
    """Pages that were sent lately, kept where attention computes (gpu): `KvStore.gather_fast` sends only what is not there.

    To implement: keep pages of one shape in two arrays [slots, kv_heads, page_tokens, dim] on the device, a dict
    (layer, number) -> slot in the order of use, and an index_select for `rows`. Numbers are the store's: one for a page in
    all layers, shared by the sequences that share the page. The store calls, for each gather of a layer and in this order:
    `have` (touches the pages it finds), `put` with what was missing and with the page that is being filled, `rows`, `drop`
    of the page that is being filled, which will be another at the next step. Pages of a gather must survive until `rows`:
    what is evicted for them is older. The store also calls `drop` when pages are no more, as their numbers will be given to
    others. One thread at a time.
    """

    def have(self, layer: int, pages: Int64s) -> Flags:
        """Returns for each of `pages` [n] whether it is there, and counts it as used."""

    def put(self, layer: int, pages: Int64s, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Takes pages, [n, kv_heads, page_tokens, dim] (int8 as float32), in place of the longest unused; copies them.

        ValueError if more pages are used in one gather than there is room.
        """

    def rows(self, layer: int, pages: Int64s, offsets: Int64s) -> tuple[Any, Any]:
        """Returns keys and values [batch, kv_heads, k, dim] of head h's tokens `offsets` [.., k] in `pages` [.., k]."""

    def drop(self, pages: Int64s) -> None:
        """Forgets pages, in all layers."""


@dataclass
class Staged:
    """Chosen rows of one layer, fetched ahead of time, in memory that has room for sink, window and tail as well."""

    layer: int
    middle: range
    positions: Int64s
    memory: Memory
    tokens: int


class Buffers:
    """Memory that results are gathered in, used again once they are released: fresh memory is slow to get."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, key_bytes: int, value_bytes: int) -> Memory:
        """Returns memory for at least so many bytes of keys and of values."""
        with self._lock:
            for index, (keys, values) in enumerate(self._free):
                if keys.size >= key_bytes and values.size >= value_bytes:
                    return self._free.pop(index)
        # An eighth more: the next step needs a little more than this one.
        return np.empty(key_bytes + key_bytes // 8, np.uint8), np.empty(value_bytes + value_bytes // 8, np.uint8)

    def give_back(self, memory: Memory) -> None:
        """Takes memory that nobody uses any more."""
        with self._lock:
            self._free = [memory, *self._free][:KEPT_BUFFERS]


class Gatherer(Sequences):
    """The part of a store that brings what a layer attends to side by side."""

    _spill: Spill | None
    """Where the pages are that are not in memory."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self._buffers = Buffers()
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()

    def stage(self, layer: int, selection: Selection, length: int | None = None) -> Staged:
        """Fetches what is chosen ahead of time, for a later `gather`; ValueError if it is not all in the middle.

        `length`: tokens the layer will have then; None: one more than now, as in a decode step.
        """
        self.checked(layer)
        middle = self.middle
        positions = self._checked(selection, middle)
        expected = self._total(middle, selection.count, self.length + 1 if length is None else length)
        staged = Staged(layer, middle, positions, self._memory(expected), expected)
        self._copy_in(staged, positions, middle.start * self.shape.page_tokens, True)
        return staged

    def gather(self, layer: int, selection: Selection | None = None, *, staged: Staged | None = None) -> Gathered:
        """Returns sink, chosen tokens, window and tail of a layer, as far as it was appended.

        Either a `selection` or what `stage` made of one. Staged rows keep: what has left the window meanwhile comes along.
        """
        if (selection is None) == (staged is None):
            raise ValueError("selection: either a selection or what was staged is needed")
        self.checked(layer)
        length = int(self.lengths[layer])
        if selection is not None:
            staged = self.stage(layer, selection, length)
        assert staged is not None
        if staged.layer != layer:
            raise ValueError(f"staged: it is of layer {staged.layer}, not of {layer}")
        lead, count = staged.middle.start * self.shape.page_tokens, staged.positions.shape[2]
        total = self._total(staged.middle, count, length)
        if total != staged.tokens:
            self._resize(staged, lead, count, total)
        positions = self._with_ends(staged.middle, staged.positions, length)
        self._copy_in(staged, positions[:, :, :lead], 0, False)
        self._copy_in(staged, positions[:, :, lead + count :], lead + count, False)
        keys, values = self._views(staged)
        return Gathered(keys, values, positions, partial(self._buffers.give_back, staged.memory))

    def attended_positions(self, layer: int, selection: Selection) -> Int64s:
        """Returns the positions [batch, kv_heads, k] of all that a layer attends to now: what `gather` would give."""
        self.checked(layer)
        return self._with_ends(self.middle, selection.positions, int(self.lengths[layer]))

    def _checked(self, selection: Selection, middle: range) -> Int64s:
        found = selection.positions
        if found.shape[:2] != (self.batch, self.shape.kv_heads):
            raise ValueError(f"positions: shape {found.shape}, [{self.batch}, {self.shape.kv_heads}, k] is needed")
        first, end = (page * self.shape.page_tokens for page in (middle.start, middle.stop))
        if found.size and (found[..., 0].min() < first or found[..., -1].max() >= end):
            raise ValueError(f"positions: only tokens {first} to {end - 1} can be chosen")
        # The compiled loops are made for one kind of array.
        plain = found.flags.writeable and found.strides[2] == found.itemsize
        return found if plain else found.copy()

    def _total(self, middle: range, count: int, length: int) -> int:
        return length - len(middle) * self.shape.page_tokens + count

    def _with_ends(self, middle: range, chosen: Int64s, length: int) -> Int64s:
        """Returns the positions of sink, `chosen` (of the middle), window and tail, [batch, kv_heads, all]."""
        size = self.shape.page_tokens
        sink, recent = (
            np.broadcast_to(np.arange(start, stop, dtype=np.int64), (*chosen.shape[:2], stop - start))
            for start, stop in ((0, middle.start * size), (middle.stop * size, length))
        )
        return np.concatenate([sink, chosen, recent], axis=2)

    def _memory(self, tokens: int) -> Memory:
        shape = self.shape
        rows = self.batch * shape.kv_heads * tokens * self._dtype().itemsize
        return self._buffers.take(rows * shape.head_dim, rows * shape.value_dim)

    def _dtype(self) -> np.dtype[Any]:
        shape = self.shape
        return np.dtype(np.float32) if shape.dtype == "int8" else shape.numpy_dtype

    def _views(self, staged: Staged) -> Sides:
        shape, dtype = self.shape, self._dtype()
        forms = ((self.batch, shape.kv_heads, staged.tokens, dim) for dim in (shape.head_dim, shape.value_dim))
        keys, values = (
            memory[: int(np.prod(form)) * dtype.itemsize].view(dtype).reshape(form)
            for memory, form in zip(staged.memory, forms, strict=True)
        )
        return keys, values

    def _resize(self, staged: Staged, lead: int, count: int, total: int) -> None:
        """Moves the chosen rows to memory for `total` tokens: more were appended meanwhile than one, or none."""
        old, memory = self._views(staged), staged.memory
        staged.memory, staged.tokens = self._memory(total), total
        for into, rows in zip(self._views(staged), old, strict=True):
            into[:, :, lead : lead + count] = rows[:, :, lead : lead + count]
        self._buffers.give_back(memory)

    def _copy_in(self, staged: Staged, positions: Int64s, first: int, chosen: bool) -> None:
        """Copies the rows at `positions` [batch, kv_heads, k] to `first` and behind it."""
        if not positions.size:
            return
        outs = [side[:, :, first : first + positions.shape[2]] for side in self._views(staged)]
        pool, table = self.checked(staged.layer), self.table.table
        with pool.lock:
            pool.know(self.table.numbers)  # another layer may have got pages since it was checked
            index = pool.slot_of[table]
            marked = [mark_missing(*pair, self.shape.page_tokens) for pair in zip(index, positions, strict=True)]
            missing = sum(count for count, _ in marked)
            if missing < positions.size:
                copy_pages((pool.keys, pool.values), index, positions, outs, self.config.threads)
        if missing and self._spill is not None:
            # Not under the lock: who waits for the disk must not keep others from the pool.
            pages = [of_sequence for _, of_sequence in marked]
            if isinstance(self._spill.ssd, CsdTier):
                self._fetch_rows(self._spill.ssd, staged.layer, pages, positions, outs)
            else:
                self._fetch_pages(self._spill.ssd, staged.layer, pages, positions, outs)
        if chosen:
            self.traffic.count(hits_cpu=positions.size - missing, hits_ssd=missing)

    # From the ssd tier: pages of a file, each once for all heads; single rows of a device

    def _fetch_pages(self, ssd: FileTier, layer: int, missing: list[Int64s], positions: Int64s, outs: Arrays) -> None:
        """Reads the pages `missing` of each sequence; the threads that read them copy their rows, so the disk is never idle.

        `positions` [batch, kv_heads, k]; `outs`: keys and values [batch, kv_heads, k, dim].
        """
        # As it is now: while pages are read, another layer may get pages with numbers that are not known here.
        table = self.table.table
        numbers = np.unique(np.concatenate([table[b, pages] for b, pages in enumerate(missing)]))
        for stream, found in self.table.by_stream(numbers):
            known = np.full(self.table.numbers, NOT_HERE, np.int64)
            known[found] = np.arange(len(found))
            target = Destination(known[table], positions, outs, self.shape.page_tokens)
            ssd.read_through(stream, layer, self.table.places(found), target.take, "fetch")

    def _fetch_rows(self, ssd: CsdTier, layer: int, missing: list[Int64s], positions: Int64s, outs: Arrays) -> None:
        """As `_fetch_pages`; asks a device for the rows alone, those of some pages at a time."""
        size = self.shape.page_tokens
        most = max(1, ASKED_ROWS // (self.shape.kv_heads * size))
        for b, of_sequence in enumerate(missing):
            streams = self.table.stream[self.table.table[b]]
            for pages in (of_sequence[first : first + most] for first in range(0, len(of_sequence), most)):
                wanted = np.zeros(len(streams), np.bool_)
                wanted[pages] = True
                for stream in np.unique(streams[pages]).tolist():
                    # Pages of one stream that a sequence has follow each other, from the beginning of the stream on.
                    first = int(np.flatnonzero(streams == stream)[0]) * size
                    of_pages = wanted & (streams == stream)
                    here = [of_pages[of_head // size] for of_head in positions[b]]
                    local = [of_head[mask] - first for of_head, mask in zip(positions[b], here, strict=True)]
                    _lay_out(ssd.gather(stream, layer, local, "fetch"), here, [out[b] for out in outs])

    # Through a fast tier

    def _drop_served(self, numbers: Int64s) -> None:
        """Has all fast tiers that were served forget pages."""
        if len(numbers):
            for fast in list(self._served):
                fast.drop(numbers)

    def gather_fast(self, layer: int, selection: Selection, fast: FastTier) -> Gathered:
        """As `gather`, but keys and values come from `fast`, to which only pages are sent that are not there yet.

        They are what its `rows` returns, for instance tensors on a gpu; int8 as float32. Bytes are counted as "attend".
        """
        size = self.shape.page_tokens
        pool, middle, length = self.checked(layer), self.middle, int(self.lengths[layer])
        self._served.add(fast)
        positions = self._with_ends(middle, self._checked(selection, middle), length)
        numbers = np.stack([row[pages] for row, pages in zip(self.table.table, positions // size, strict=True)])
        used = np.unique(numbers)
        # A page that is being filled is another at every step.
        filling = np.isin(used, self.table.table[:, length // size :])
        there = np.zeros(len(used), np.bool_)
        there[~filling] = fast.have(layer, used[~filling])
        chosen = numbers[:, :, middle.start * size :][:, :, : selection.count]
        on_gpu = np.isin(chosen, used[there])
        gpu, cpu = int(on_gpu.sum()), int(((pool.slot_of[chosen] != NOT_HERE) & ~on_gpu).sum())
        self.traffic.count(hits_gpu=gpu, hits_cpu=cpu, hits_ssd=chosen.size - cpu - gpu)
        self._send(layer, pool, used[~there], fast)
        keys, values = fast.rows(layer, numbers, positions % size)
        fast.drop(used[filling])
        return Gathered(keys, values, positions)

    def _send(self, layer: int, pool: Pool, numbers: Int64s, fast: FastTier) -> None:
        with pool.lock:
            here = pool.slot_of[numbers] != NOT_HERE
            held = pool.take(pool.slot_of[numbers[here]])
        self._put(layer, numbers[here], held, fast)
        if self._spill is not None:
            for found, arrays in self._spill.read(layer, numbers[~here], "fetch"):
                self._put(layer, found, arrays, fast)

    def _put(self, layer: int, numbers: Int64s, arrays: Arrays, fast: FastTier) -> None:
        if not len(numbers):
            return
        keys, values = arrays[:2]
        if len(arrays) > 2:
            with np.errstate(all="ignore"):  # behind the last token of a page that is being filled there is anything
                keys, values = (arrays[side].astype(np.float32) * arrays[side + 2][..., None] for side in (0, 1))
        fast.put(layer, numbers, keys, values)
        self.traffic.add("cpu", "gpu", "attend", keys.nbytes + values.nbytes)


def _lay_out(rows: KvRows, here: list[Flags], outs: Arrays) -> None:
    """Puts rows, head after head, where `here` [k] of each head says; int8 becomes float32, times its scales."""
    done = 0
    for head, mask in enumerate(here):
        part = slice(done, done + int(mask.sum()))
        for out, side, scales in ((outs[0], rows.keys, rows.key_scales), (outs[1], rows.values, rows.value_scales)):
            out[head][mask] = side[part] if scales is None else side[part].astype(np.float32) * scales[part, None]
        done = part.stop
