"""SpillReader: a spill file open for reading, in any order and by any number of processes.

A page exists if its entry does; the entry is written after the page. Pages written after the last commit may have reached
the disk in any order, so they are verified when the file is opened; older pages are verified when they are read. A chain
ends before its first invalid page, so leftovers of a crash are never returned. Missing committed pages are damage:
DataError.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Int64s
from llmcache.errors import DataError, LlmcacheError
from llmcache.kv.kernels.threads import processors, run_all
from llmcache.kv.kernels.top import copy, first_from, sort
from llmcache.kv.spill.checksum import checksums, first_other
from llmcache.kv.spill.layout import (
    COMMITS_AT,
    KEYS,
    RECORD_BYTES,
    VALUES,
    Commit,
    ExtentEntry,
    KvShape,
    Layout,
    PageChain,
    PageEntry,
    aligned,
    check_identity,
    read_header,
    unpack,
    view_slots,
)
from llmcache.kv.spill.raw import LARGEST_READ, RawFile, huge_memory, read_queue
from llmcache.units import BLOCK_BYTES

SIDES = (KEYS, VALUES)
Pages = Int64s | Sequence[int]
TakeRows = Callable[[int, int, NDArray[Any]], None]
"""Called with the side (keys 0, values 1), the index of the first page, and rows [n, kv_heads, page_tokens, dim].

The rows are valid until it returns. Several threads call it concurrently.
"""
JOB_BYTES = 1 << 19  # bytes that a thread reads before it verifies their checksums: few enough to be still in the CPU cache
TAKEN_BYTES = 1 << 21
"""Bytes that a thread reads before it passes them on: more than `JOB_BYTES`, because each job costs more."""
SCATTERED_ROWS = 2048  # rows whose parts are read together
ATTEMPTS = 5
LAST_EPOCH = (1 << 32) - 2  # largest epoch of a commit: epochs have 32 bits, and new pages have the next one
MOST_AHEAD = 1 << 31  # the largest valid epoch of a page, unless commits have larger ones: each failed commit uses up two
Self = TypeVar("Self", bound="SpillReader")
_of_thread = threading.local()


class Scan:
    """The contents of a file as of `commit`: chains of valid pages, free extents, and table ranges to wipe."""

    def __init__(self, raw: RawFile, layout: Layout, commit: Commit) -> None:
        self.commit = commit
        self.chains: dict[tuple[int, int], PageChain] = {}  # by sequence and layer
        self.free: list[int] = []
        self.wipe: list[tuple[int, int]] = []  # (offset, bytes) in tables
        self.extents = 0
        self.raw, self._layout, self._size = raw, layout, raw.size()
        committed = 0
        for key, extents in self._owners().items():
            self.chains[key] = chain = PageChain(*key, layout.plan(key[1]), array("q", extents))
            committed += self._read(chain)
        if committed < commit.pages:
            hint = "the file was damaged or truncated after it was written: spill the context again"
            missing = f"{commit.pages - committed} of {commit.pages} committed pages are missing"
            raise DataError(f"{raw.path}: table: {missing}", hint)

    @classmethod
    def latest(cls, raw: RawFile, layout: Layout) -> Scan:
        """Return the contents of a file, scanned again if a writer removed pages in the meantime."""
        for _ in range(ATTEMPTS - 1):
            commit = commit_of(raw)
            try:
                return cls(raw, layout, commit)
            except DataError:
                if commit == commit_of(raw):
                    raise
        return cls(raw, layout, commit_of(raw))

    def _owners(self) -> dict[tuple[int, int], list[int]]:
        owners: dict[tuple[int, int], dict[int, int]] = {}
        for extent in self._written():
            self.extents = extent + 1
            entry = unpack(ExtentEntry, self.raw.read(RECORD_BYTES, self._layout.at(extent)))
            if entry is None or entry.layer > self._layout.shape.layers or entry.ordinal in owners.get(entry[:2], {}):
                self._release(extent)
            else:
                owners.setdefault(entry[:2], {})[entry.ordinal] = extent
        chains: dict[tuple[int, int], list[int]] = {}
        for key, extents in owners.items():
            gap = next(ordinal for ordinal in range(len(extents) + 1) if ordinal not in extents)
            chains[key] = [extents.pop(ordinal) for ordinal in range(gap)]
            for extent in extents.values():  # unusable, because the extent before it is missing
                self._release(extent)
        return chains

    def _written(self) -> Iterator[int]:
        extent, layout = 0, self._layout
        while layout.at(extent) < self._size:
            data = self.raw.data_from(layout.at(extent))
            if data is None:
                return
            if data < layout.at(extent) + layout.table_bytes:
                yield extent
                extent += 1
            else:
                extent = max(extent + 1, (data - layout.at(0)) // layout.extent_bytes)

    def _release(self, extent: int) -> None:
        """Free an extent, and have its table wiped: old entries must not become valid under a new owner."""
        self.free.append(extent)
        table = self.raw.read(self._layout.table_bytes, self._layout.at(extent))
        if any(table):
            self.wipe.append((self._layout.at(extent), len(table)))

    def _read(self, chain: PageChain) -> int:
        committed, ended, plan, page_tokens = 0, False, chain.plan, self._layout.shape.page_tokens
        for extent in chain.extents:
            slot, at = 0, self._layout.at(extent)
            table = self.raw.read(plan.entry_at(plan.slots), at)
            while not ended and slot < plan.slots:
                entry = unpack(PageEntry, table[plan.entry_at(slot) : plan.entry_at(slot + 1)], sum(plan.parts))
                own = (chain.sequence, chain.layer, chain.pages)
                if entry is None or entry[:3] != own or not self._is_whole(entry, chain, at, slot):
                    ended = True
                else:
                    chain.add(entry)
                    committed += entry.epoch <= self.commit.epoch
                    slot += 1
                    ended = entry.tokens < page_tokens
            # Entries after the last valid page would become valid again when the pages before them are rewritten.
            rest = table[plan.entry_at(slot) :]
            if any(rest):
                self.wipe.append((at + plan.entry_at(slot), len(rest)))
        return committed

    def _is_whole(self, entry: PageEntry, chain: PageChain, at: int, slot: int) -> bool:
        plan = chain.plan
        if not 1 <= entry.tokens <= self._layout.shape.page_tokens or at + plan.end_at(slot) > self._size:
            return False
        if entry.epoch <= self.commit.epoch:
            return True
        if entry.epoch > max(self.commit.epoch + 1, MOST_AHEAD):
            return False
        found: list[int] = []
        for side in SIDES:
            buffer, size = aligned(plan.sizes[side]), plan.part_bytes(side)
            first, step = at + plan.slot_at(side, slot), plan.step_bytes(side)
            wanted = [(first + i * step, buffer.ctypes.data + i * size, size) for i in range(plan.parts[side])]
            self.raw.read_runs(np.array(wanted), plan.direct)
            found += checksums(buffer[None], plan.parts[side])[0].tolist()
        return tuple(found) == entry.crcs


def commit_of(raw: RawFile) -> Commit:
    """Return the newest commit; DataError if both records are damaged, or its epoch is the largest possible."""
    records = [unpack(Commit, raw.read(RECORD_BYTES, at)) for at in COMMITS_AT]
    # Ignore a record in the wrong place: the next commit would overwrite it instead of the older one.
    whole = [record for turn, record in enumerate(records) if record is not None and record.epoch % 2 == turn]
    if not whole:
        raise DataError(f"{raw.path}: commit: both commit records are damaged", "spill the context again")
    newest = max(whole)
    if newest.epoch >= LAST_EPOCH:
        raise DataError(f"{raw.path}: commit: epoch {newest.epoch} is the largest possible", "spill the context again")
    return newest


class SpillReader:
    """A spill file open for reading; a context manager. Any number of threads may use it.

    `torn`: the file had torn or incomplete entries, as a crash leaves them.
    """

    _flags = os.O_RDONLY

    def __init__(self, raw: RawFile, layout: Layout, found: Scan) -> None:
        self.raw = raw
        self._layout = layout
        self._chains = found.chains
        self._free = found.free
        self._extents = found.extents
        self.torn = bool(found.wipe)

    @classmethod
    def open(
        cls: type[Self],
        path: str | Path,
        shape: KvShape | None = None,
        *,
        direct: bool | None = None,
        keep_unfinished: bool = False,
    ) -> Self:
        """Open a file. Pages that not all layers have are dropped unless `keep_unfinished`, to resume an interrupted step.

        `shape`: accept only a file of this model. DataError: no spill file, of another model, too new, or damaged.
        MissingRequirement: the file does not exist, or another process has it open for writing.
        """
        raw = RawFile(Path(path), cls._flags, direct)
        try:
            if raw.writable:
                raw.lock()
                raw.refresh()
            layout = read_header(raw.read(BLOCK_BYTES, 0), raw.path)
            if shape is not None:
                check_identity(layout.shape, shape, raw.path)
            raw.open_direct()
            found = Scan.latest(raw, layout)
            file = cls(raw, layout, found)
            cuts = [] if keep_unfinished else file._unfinished()
            if cuts or found.wipe:
                file._cut(cuts, found.wipe)
        except BaseException:
            with contextlib.suppress(LlmcacheError):
                raw.close()
            raise
        return file

    def _cut(self, cuts: list[tuple[PageChain, int]], wipe: list[tuple[int, int]]) -> None:
        for chain, pages in cuts:
            chain.cut(pages, self.shape.page_tokens)

    @property
    def path(self) -> Path:
        return self.raw.path

    @property
    def shape(self) -> KvShape:
        return self._layout.shape

    @property
    def direct(self) -> bool:
        return self.raw.direct

    @property
    def interleaved(self) -> bool:
        return self._layout.of_layer.interleaved

    @property
    def sequences(self) -> list[int]:
        return sorted({key[0] for key, chain in self._chains.items() if chain.pages})

    def pages(self, sequence: int, layer: int | None = None) -> int:
        if layer is None:
            return self._common_pages(self._chains_of(sequence))
        chain = self._chains.get((sequence, self._checked_layer(layer)))
        return chain.pages if chain else 0

    def length(self, sequence: int, layer: int | None = None) -> int:
        chain = self._chains.get((sequence, self.shape.layers if layer is None else self._checked_layer(layer)))
        if chain is None:
            return 0
        pages = self.pages(sequence, layer)
        partial = self.shape.page_tokens - chain.last_tokens if pages == chain.pages and pages else 0
        return pages * self.shape.page_tokens - partial

    def tokens(self, sequence: int) -> tuple[Int64s, Int64s]:
        count = self.length(sequence)
        if not count:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        chain, pages = self._chains[sequence, self.shape.layers], list(range(self.pages(sequence)))
        ids, positions = (side.view(np.int64).reshape(-1)[:count] for side in self._read_sides(chain, pages, SIDES))
        return ids, positions

    def read(
        self, sequence: int, layer: int, pages: Pages, room: Sequence[Bytes] | None = None, threads: int | None = None
    ) -> list[NDArray[Any]]:
        """Return keys and values [pages, kv_heads, page_tokens, dim] of `pages` of a layer, in the given order.

        The rest of a partial page is zero. `room`: aligned memory for keys and values, or None for new memory. `threads`:
        None for two per CPU. DataError: a page is damaged, or the file ends before it. ValueError: a page does not exist.
        """
        chain, wanted = self._chain_with(sequence, layer, pages)
        slots = self._read_sides(chain, wanted, SIDES, room, threads or 2 * processors())
        return [view_slots(self.shape, slots[side], side) for side in SIDES]

    def read_through(self, sequence: int, layer: int, pages: Pages, take: TakeRows, threads: int | None = None) -> None:
        """Like `read`, but pass the pages to `take` in batches, on the threads that read them, until an error."""
        chain, wanted = self._chain_with(sequence, layer, pages)
        # Four threads per CPU, because most of them wait for the disk while some take.
        threads = threads or 4 * processors()
        sizes = chain.plan.sizes
        least = min(TAKEN_BYTES // sum(sizes), len(wanted) // (2 * threads))  # every thread gets a share of few pages

        def read_and_take(first: int, end: int) -> None:
            memory, slots, count = thread_memory((end - first) * sum(sizes)), {}, end - first
            for side in SIDES:
                at = side * count * sizes[KEYS]
                slots[side] = memory[at : at + count * sizes[side]].reshape(count, -1)
            self._read_pages(chain, wanted[first:end], slots)
            for side in SIDES:
                take(side, first, view_slots(self.shape, slots[side], side))

        run_all([partial(read_and_take, *share) for share in _shares(chain, wanted, least)], threads)

    def read_rows(self, sequence: int, layer: int, pages: Int64s, rows: Int64s) -> tuple[list[NDArray[Any]], int]:
        """Return keys and values of rows [n, dim], and the number of bytes read. Errors as `read`.

        `rows` [n] are rows in `pages` [n], numbered head x page_tokens + token. Only the parts with these rows are read.
        """
        chain = self._chain_of(sequence, layer, int(pages.min(initial=0)), int(pages.max(initial=-1)))
        found, size_bytes = [np.empty(*form) for form in self.shape.forms(len(rows))], 0
        for first in range(0, len(rows), SCATTERED_ROWS):
            some = slice(first, first + SCATTERED_ROWS)
            size_bytes += self._read_some(chain, pages[some], rows[some], [side[some] for side in found])
        return found, size_bytes

    def _read_some(self, chain: PageChain, pages: Int64s, rows: Int64s, outs: list[NDArray[Any]]) -> int:
        plan, row_bytes = chain.plan, np.array([out.shape[1] * out.itemsize for out in outs])
        found = _scattered(pages, rows, row_bytes, plan.geometry, plan.slots, self._begins(chain))
        parts, of_keys, places, reads, size_bytes = found
        key_bytes = of_keys * plan.part_bytes(KEYS)
        with read_queue() as queue:
            memory = queue.memory(size_bytes)
            reads[:, 1] += memory.ctypes.data
            self.raw.read_runs(reads, plan.direct, queue)
            self._compare(chain, KEYS, parts[:of_keys], memory[:key_bytes])
            self._compare(chain, VALUES, parts[of_keys:], memory[key_bytes:])
            for own, out in zip(places, outs, strict=True):
                _take(memory, own, out.view(np.uint8))
        return int(size_bytes)

    def _begins(self, chain: PageChain) -> Int64s:
        begins: Int64s = self._layout.at(0) + self._layout.extent_bytes * np.array(chain.extents, np.int64)
        return begins

    def read_slots(
        self, sequence: int, layer: int, pages: Pages, side: int, into: Bytes | None = None, threads: int | None = None
    ) -> Bytes:
        """Return the slots [pages, slot bytes] of keys (`side` 0) or values (1), as they are on disk; errors as `read`."""
        chain, wanted = self._chain_with(sequence, layer, pages)
        return self._read_sides(chain, wanted, [side], None if into is None else [into], threads)[0]

    def pages_by_layer(self, sequence: int) -> list[int]:
        """Return the number of pages of each layer, and last that of the tokens."""
        chains = (self._chains.get((sequence, layer)) for layer in range(self.shape.layers + 1))
        return [chain.pages if chain else 0 for chain in chains]

    def key_ranges(self, sequence: int, layer: int, pages: Pages | None = None) -> list[tuple[range, int]]:
        """Return runs of pages (None: all) with adjacent keys in a layer, and the offset of each run in the file."""
        chain, wanted = self._chain_with(sequence, layer, range(self.pages(sequence, layer)) if pages is None else pages)
        return [
            (range(run.first, run.first + run.pages), self._layout.at(run.extent) + chain.plan.slot_at(KEYS, run.slot))
            for run in chain.runs(wanted)
        ]

    def _read_sides(
        self,
        chain: PageChain,
        pages: list[int],
        sides: Sequence[int],
        into: Sequence[Bytes] | None = None,
        threads: int | None = None,
    ) -> list[Bytes]:
        plan, least = chain.plan, JOB_BYTES // sum(chain.plan.sizes)
        memory = [aligned(len(pages) * plan.sizes[side]) for side in sides] if into is None else into
        slots = [
            some[: len(pages) * plan.sizes[side]].reshape(len(pages), plan.sizes[side])
            for side, some in zip(sides, memory, strict=True)
        ]

        def read(first: int, end: int) -> None:
            some = {side: of_side[first:end] for side, of_side in zip(sides, slots, strict=True)}
            self._read_pages(chain, pages[first:end], some)

        run_all([partial(read, *share) for share in _shares(chain, pages, least)], threads)
        return slots

    def _read_pages(self, chain: PageChain, pages: list[int], slots: dict[int, Bytes]) -> None:
        first, wanted = np.array(pages)[:, None], {}
        for side, memory in slots.items():
            each = chain.plan.parts[side]
            wanted[side] = (first * each + np.arange(each)).reshape(-1), memory.reshape(-1)
        self._read_parts(chain, wanted)

    def _read_parts(self, chain: PageChain, wanted: dict[int, tuple[Int64s, Bytes]]) -> None:
        """Read and verify parts [n], numbered through all pages, of each side into memory [n x part bytes].

        In an interleaved file, the other side is read too, because gaps would split the read.
        """
        plan = chain.plan
        into = {side: (parts, memory, plan.part_bytes(side)) for side, (parts, memory) in wanted.items()}
        if plan.interleaved and len(wanted) == 1:
            ((requested, (parts, _)),) = wanted.items()
            other = VALUES if requested == KEYS else KEYS
            into[other] = parts, aligned(plan.part_bytes(other)), 0  # all parts to the same address
        reads, done = np.empty((sum(len(parts) for parts, _, _ in into.values()), 3), np.int64), 0
        begins = self._begins(chain)
        for side, (parts, memory, step_bytes) in into.items():
            own = reads[done : done + len(parts)]
            _place(parts, begins, plan.slots, plan.geometry[side], memory.ctypes.data, step_bytes, own)
            done += len(parts)
        self.raw.read_runs(reads, plan.direct)
        for side, (parts, memory) in wanted.items():
            self._compare(chain, side, parts, memory)

    def _compare(self, chain: PageChain, side: int, parts: Int64s, memory: Bytes) -> None:
        if not len(parts):
            return
        first = int(parts.min())
        # A copy, because the array cannot grow during an append while there is a view of it.
        written = np.frombuffer(chain.crcs[side][first : int(parts.max()) + 1], np.uint32)
        wrong = first_other(memory.reshape(len(parts), -1), written, parts - first)
        if wrong >= 0:
            page = parts[wrong] // chain.plan.parts[side]
            where = f"page {page} of layer {chain.layer} of sequence {chain.sequence}"
            message = f"{self.path}: {('keys', 'values')[side]}: wrong checksum of {where}"
            raise DataError(message, "the disk returned other data than was written: compute the context again")

    def _chain_with(self, sequence: int, layer: int, pages: Pages) -> tuple[PageChain, list[int]]:
        wanted = pages.tolist() if isinstance(pages, np.ndarray) else [int(page) for page in pages]
        return self._chain_of(sequence, layer, min(wanted, default=0), max(wanted, default=-1)), wanted

    def _chain_of(self, sequence: int, layer: int, least: int, most: int) -> PageChain:
        key = (sequence, self._checked_layer(layer))
        chain = self._chains.get(key) or PageChain(*key, self._layout.plan(layer))
        if least < 0 or most >= max(chain.pages, chain.lost):
            found = f"has {chain.pages} pages, which do not include {least} to {most}"
            raise ValueError(f"pages: layer {layer} of sequence {sequence} {found}")
        if most >= chain.pages:
            where = f"page {most} of layer {layer} of sequence {sequence}"
            raise DataError(
                f"{self.path}: {where} is lost, because it could not be written to the disk", "compute the context again"
            )
        return chain

    def _checked_layer(self, layer: int) -> int:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer: must be from 0 to {self.shape.layers - 1}, not {layer}")
        return layer

    def _chains_of(self, sequence: int) -> list[PageChain]:
        return [chain for (owner, _), chain in self._chains.items() if owner == sequence]

    def _unfinished(self) -> list[tuple[PageChain, int]]:
        sequences: dict[int, list[PageChain]] = {}
        for chain in self._chains.values():
            sequences.setdefault(chain.sequence, []).append(chain)
        pages = {sequence: self._common_pages(own) for sequence, own in sequences.items()}
        return [(chain, pages[chain.sequence]) for chain in self._chains.values() if chain.pages > pages[chain.sequence]]

    def _common_pages(self, own: list[PageChain]) -> int:
        if len(own) <= self.shape.layers:  # the number of layers in a damaged header may be huge
            return 0
        pages = min(chain.pages for chain in own)
        if pages and len({chain.tokens_of(pages - 1, self.shape.page_tokens) for chain in own}) > 1:
            pages -= 1
        return pages

    def close(self) -> None:
        self.raw.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _shares(chain: PageChain, pages: list[int], least: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of `pages` of whole runs, at least `least` pages each, because large batches of checksums cost less."""
    first = end = 0
    for run in chain.runs(pages, max(1, LARGEST_READ // sum(chain.plan.sizes))):
        end += run.pages
        if end - first >= least:
            yield first, end
            first = end
    if first < end:
        yield first, end


@numba.njit(nogil=True, cache=True)
def _scattered(pages, rows, row_bytes, geometry, slots, begins):  # type: ignore[no-untyped-def]
    """Return which parts to read for `rows` [n] of `pages` [n], and where the rows are in memory filled without gaps.

    Returns the parts [m], ascending, keys first; the number of parts of keys; the offsets of the rows of keys and values in
    memory [2, n]; the reads for `RawFile.read_runs` [m, 3], with addresses from 0 on; all bytes.
    """
    most = 0
    for side in range(2):
        most += rows.size * ((row_bytes[side] + geometry[side, 1] - 2) // geometry[side, 1] + 1)
    parts, reads, places = np.empty(most, np.int64), np.empty((most, 3), np.int64), np.empty((2, rows.size), np.int64)
    count = of_keys = at = 0
    for side in range(2):
        each, size = geometry[side, 0], geometry[side, 1]
        found, wanted = np.empty(most, np.int64), 0
        for i in range(rows.size):
            first, last = rows[i] * row_bytes[side], (rows[i] + 1) * row_bytes[side] - 1
            for part in range(first // size, last // size + 1):
                found[wanted] = pages[i] * each + part
                wanted += 1
        sort(found[:wanted])
        end = count
        for i in range(wanted):
            if i == 0 or found[i] != found[i - 1]:
                parts[end] = found[i]
                end += 1
        own = parts[count:end]
        for i in range(rows.size):
            part, rest = divmod(rows[i] * row_bytes[side], size)
            places[side, i] = at + first_from(own, pages[i] * each + part) * size + rest
        _place(own, begins, slots, geometry[side], at, size, reads[count:end])
        count, at = end, at + own.size * size
        of_keys = of_keys if side else count
    return parts[:count], of_keys, places, reads[:count], at


@numba.njit(nogil=True, cache=True)
def _place(parts, begins, slots, geometry, address, step_bytes, out):  # type: ignore[no-untyped-def]
    each, size, at, step = geometry[0], geometry[1], geometry[2], geometry[3]
    for i in range(parts.size):
        extent, part = divmod(parts[i], each * slots)
        out[i, 0], out[i, 1], out[i, 2] = begins[extent] + at + part * step, address + i * step_bytes, size


@numba.njit(nogil=True, cache=True)
def _take(memory, places, out):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        copy(memory[places[i] : places[i] + out.shape[1]], out[i])


def thread_memory(size_bytes: int) -> Bytes:
    """Return memory of this thread, the same for each call, so that it stays in the CPU cache."""
    memory: Bytes | None = getattr(_of_thread, "memory", None)
    if memory is None or memory.size < size_bytes:
        memory = _of_thread.memory = huge_memory(size_bytes)
    return memory[:size_bytes]
