"""SpillReader: what a spill file holds, read in any order and by any number of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError, LlmcacheError
from llmcache.kv.kernels.threads import processors, run_all
from llmcache.kv.spill import reading
from llmcache.kv.spill.chain import Chain
from llmcache.kv.spill.layout import EXTENTS_AT, Layout, check_identity, read_header
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.spill.recovery import Found, Recovery, scan, unfinished, whole_pages
from llmcache.kv.spill.shape import BLOCK_BYTES, Bytes, KvPages, KvShape, Room

Pages = NDArray[np.int64] | list[int]
TakeRows = Callable[[int, int, NDArray[Any], NDArray[np.float32] | None], None]
"""Gets keys (0) or values (1), where in the pages asked for they begin, rows [n, kv_heads, page_tokens, dim], scales (int8).

They are valid until it returns. It is called by several threads at a time.
"""
SIDES = (reading.KEYS, reading.VALUES)
Self = TypeVar("Self", bound="SpillReader")


class SpillReader:
    """A spill file, open for reading (a context manager). Safe to use from many threads at a time."""

    def __init__(self, raw: RawFile, layout: Layout, found: Found) -> None:
        self._raw = raw
        self._layout = layout
        self._chains = found.chains
        self._free = found.free
        self._extents = found.extents
        self.recovery = Recovery(0, found.torn_entries)
        self.read_bytes = 0

    @classmethod
    def open(
        cls: type[Self],
        path: str | Path,
        shape: KvShape | None = None,
        *,
        direct: bool | None = None,
        keep_unfinished: bool = False,
    ) -> Self:
        """Opens a file with all that it held; `recovery` tells what of it was not whole and therefore dropped.

        `shape`: refuse the file of another model. `direct`: as `RawFile`. DataError: not a spill file, another model's, a
        newer version's, damaged. `keep_unfinished`: also pages that not all layers have, for who goes on where it ended in
        the middle of a step. EnvironmentProblem: not there; or it is to be written, and another process does that.
        """
        raw = RawFile(Path(path), cls._flags(), direct)
        try:
            if raw.writable:
                raw.lock()
                raw.refresh()
            layout = read_header(raw.read(BLOCK_BYTES, 0), raw.path)
            if shape is not None:
                check_identity(layout.shape, shape, raw.path)
            raw.open_direct()
            found = scan(raw, layout)
            file = cls(raw, layout, found)
            file._drop_unfinished(found, [] if keep_unfinished else unfinished(file._chains, layout.shape))
        except BaseException:
            with contextlib.suppress(LlmcacheError):
                raw.close()
            raise
        return file

    @classmethod
    def _flags(cls) -> int:
        return os.O_RDONLY

    def _drop_unfinished(self, found: Found, cuts: list[tuple[Chain, int]]) -> None:
        """Cuts chains to the pages that all layers of their sequence have."""
        self.recovery = Recovery(sum(chain.pages - pages for chain, pages in cuts), found.torn_entries)
        for chain, pages in cuts:
            chain.cut(pages, self.shape.page_tokens)

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._raw.path

    @property
    def shape(self) -> KvShape:
        """Whose keys and values it holds."""
        return self._layout.shape

    @property
    def direct(self) -> bool:
        """True if pages go around the page cache (O_DIRECT)."""
        return self._raw.direct

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return EXTENTS_AT + self._extents * self._layout.extent_bytes

    @property
    def sequences(self) -> list[int]:
        """Numbers of the sequences that have pages, ascending."""
        return sorted({key[0] for key, chain in self._chains.items() if chain.pages})

    def pages(self, sequence: int, layer: int | None = None) -> int:
        """Returns how many pages `sequence` has: those that all layers and the tokens have, or those of one layer."""
        if layer is None:
            return whole_pages(self._chains, sequence, self.shape)
        chain = self._chains.get((sequence, self._checked_layer(layer)))
        return chain.pages if chain else 0

    def length(self, sequence: int, layer: int | None = None) -> int:
        """Returns how many tokens `sequence` has: in pages that all layers have, or in those of one layer."""
        chain = self._chains.get((sequence, self.shape.layers if layer is None else self._checked_layer(layer)))
        if chain is None:
            return 0
        pages = self.pages(sequence, layer)
        partial = self.shape.page_tokens - chain.last_tokens if pages == chain.pages and pages else 0
        return pages * self.shape.page_tokens - partial

    def tokens(self, sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids and the positions of the tokens of `sequence` that all layers have."""
        count = self.length(sequence)
        chain = self._chains.get((sequence, self.shape.layers))
        if not count or chain is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        pages = list(range(self.pages(sequence)))
        ids, positions = (self._read_side(chain, pages, side).view(np.int64).reshape(-1)[:count] for side in (0, 1))
        return ids, positions

    def read(self, sequence: int, layer: int, pages: Pages, room: Room | None = None, threads: int | None = None) -> KvPages:
        """Returns `pages` of a layer, in the order asked for, joined into few reads and compared with their checksums.

        `room` is read into (else fresh memory): the result is valid until it is read into again. `threads` read at a time
        (None: two a processor, as most of them wait for the disk). DataError: a page is damaged, or the file ends before
        it. ValueError: there is no such page, or too little room.
        """
        chain, wanted = self._chain_with(sequence, layer, pages)
        room = Room(self.shape, len(wanted)) if room is None else room
        if len(room) < len(wanted):
            raise ValueError(f"room: for {len(room)} pages, {len(wanted)} are to be read")
        keys, values = (side[: len(wanted)] for side in room.sides)
        jobs = reading.read_jobs(self._raw, self._layout, chain, wanted, reading.KEYS, keys)
        jobs += reading.read_jobs(self._raw, self._layout, chain, wanted, reading.VALUES, values)
        run_all(jobs, threads or 2 * processors())
        self.read_bytes += keys.size + values.size
        return reading.as_pages(self.shape, keys, values, self._filled(chain, wanted))

    def read_through(self, sequence: int, layer: int, pages: Pages, take: TakeRows, threads: int | None = None) -> None:
        """Reads `pages` as `read`, but hands them to `take` some at a time, by the threads that read them.

        What is taken is in the processor's cache, and while one thread takes, others read. Errors as `read`; some pages may
        have been taken by then, and none is any more.
        """
        chain, wanted = self._chain_with(sequence, layer, pages)
        # None: four a processor, as most of them wait for the disk while some take.
        threads, dims = threads or 4 * processors(), (self.shape.head_dim, self.shape.value_dim)

        def take_slots(side: int, first: int, slots: Bytes) -> None:
            take(side, first, *reading.rows(self.shape, slots, dims[side]))

        place = (self._raw, self._layout, chain, wanted)
        run_all([job for side in SIDES for job in reading.taking_jobs(*place, side, take_slots, threads)], threads)
        self.read_bytes += len(wanted) * (self.shape.key_slot_bytes + self.shape.value_slot_bytes)

    def read_keys(self, sequence: int, layer: int, pages: Pages) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Returns the keys alone, [pages, kv_heads, page_tokens, head_dim], and their scales (int8); errors as `read`."""
        chain, wanted = self._chain_with(sequence, layer, pages)
        return reading.rows(self.shape, self._read_side(chain, wanted, 0), self.shape.head_dim)

    def read_slots(self, sequence: int, layer: int, pages: Pages, side: int) -> Bytes:
        """Returns the slots [pages, slot bytes] of keys (`side` 0) or values (1), as they are on disk; errors as `read`."""
        return self._read_side(*self._chain_with(sequence, layer, pages), side)

    def pages_by_layer(self, sequence: int) -> list[int]:
        """Returns how many pages each layer of `sequence` has, and last how many its tokens have."""
        chains = (self._chains.get((sequence, layer)) for layer in range(self.shape.layers + 1))
        return [chain.pages if chain else 0 for chain in chains]

    def _filled(self, chain: Chain, pages: list[int]) -> NDArray[np.int64]:
        return np.array([chain.tokens_of(page, self.shape.page_tokens) for page in pages], np.int64)

    def _read_side(self, chain: Chain, pages: list[int], side: int) -> Bytes:
        buffer = reading.read_slots(self._raw, self._layout, chain, pages, side)
        self.read_bytes += buffer.size
        return buffer

    def _chain_with(self, sequence: int, layer: int, pages: Pages) -> tuple[Chain, list[int]]:
        key = (sequence, self._checked_layer(layer))
        chain = self._chains.get(key) or Chain(*key, self._layout.plan(layer))
        wanted = [int(page) for page in pages]
        if not all(0 <= page < max(chain.pages, chain.lost) for page in wanted):
            raise ValueError(f"pages: layer {layer} of sequence {sequence} has {chain.pages} pages, not all of {wanted}")
        if max(wanted, default=-1) >= chain.pages:
            where = f"page {max(wanted)} of layer {layer} of sequence {sequence}"
            raise DataError(f"{self.path}: {where} is lost: it could not be written back", "compute the context again")
        return chain, wanted

    def _checked_layer(self, layer: int) -> int:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer: {layer}, the model has {self.shape.layers}")
        return layer

    def _chains_of(self, sequence: int) -> list[Chain]:
        return [chain for (owner, _), chain in self._chains.items() if owner == sequence]

    def key_ranges(self, sequence: int, layer: int, pages: Pages | None = None) -> list[reading.KeyRange]:
        """Returns where the keys of a layer lie in the file, in the order of their pages: one range for each extent.

        `pages`: of these alone, in their order; ValueError if there is no such page.
        """
        if pages is not None:
            return reading.key_ranges(self._layout, *self._chain_with(sequence, layer, pages))
        chain = self._chains.get((sequence, self._checked_layer(layer)))
        return reading.key_ranges(self._layout, chain) if chain else []

    def read_range(self, buffer: Bytes, offset: int) -> None:
        """Fills `buffer` (aligned) with pages at `offset`, not compared with checksums: see `reading.check_keys`."""
        self._raw.read_into(buffer, offset, True)
        self.read_bytes += buffer.size

    def close(self) -> None:
        """Closes the file."""
        self._raw.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
