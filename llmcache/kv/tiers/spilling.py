"""Writing pages through to the ssd tier, in order, and taking away those that no sequence uses any more.

A page is written once it is full. Where that fails, it stays in the pool, beyond the bound if it must, and is written
before the next one, or when `write_all` is called: nothing that was appended is lost. Where writing *back* fails, much
later, the system may let go what the pool has let go before. The tier tells of that once, by a DataError, and is then
without these pages: what memory has of them is written again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError
from llmcache.kv.tiers import tables
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.pool import NOT_HERE
from llmcache.kv.tiers.ssd import SsdTier
from llmcache.kv.tiers.table import NOWHERE
from llmcache.kv.tiers.tables import Tables

Numbers = NDArray[np.int64]
Arrays = list[NDArray[Any]]
Fresh = tuple[int, list[Arrays]]
"""First page that is new in a layer, and for each sequence the rows of all new full pages."""


class Spiller:
    """Writes for one store; `path` is that of the spill file, `written` the tables that are on the disk beside it."""

    def __init__(self, core: Core, ssd: SsdTier, written: Tables | None) -> None:
        self._core, self.ssd = core, ssd
        assert core.config.path is not None
        self._path = core.config.path
        self._written = written
        self._cuts: dict[int, int] = {}
        self._takes_streams = False  # whole ones, which the tables on the disk may still name
        self._is_behind = False  # the file, as an error was in the way of taking away, or of the tables
        self._is_unsynced = False  # what was written, as an error was in the way of writing it back
        self._partial: list[tuple[int, int]] = []

    def is_spilled(self, layer: int, numbers: Numbers) -> NDArray[np.bool_]:
        """Returns for each of `numbers` whether the page of a layer is on the ssd tier."""
        streams, places = self._core.table.stream[numbers], self._core.table.place[numbers]
        ends = np.zeros(int(streams.max(initial=NOWHERE)) + 2, np.int64)  # the last for pages that are nowhere
        for stream in np.unique(streams[streams != NOWHERE]).tolist():
            ends[stream] = self.ssd.pages(stream, layer)
        found: NDArray[np.bool_] = (places < ends[streams]) & (streams != NOWHERE)
        return found

    # Pages

    @property
    def is_saved(self) -> bool:
        """True if `save` has said that nothing is missing, or written pages that are not full: both go before more comes."""
        return bool(self._partial) or (self._written is not None and self._written.saved)

    def _settle(self, full: int) -> None:
        """Gives pages that are full their places, and brings the tables on the disk up to date before they are written."""
        self.uncut()
        first = self._settled(0)
        if first < full:
            self._core.table.settle(first, full)
        self.note()

    def write(self, layer: int, fresh: Fresh | None = None) -> None:
        """Writes the full pages of a layer that are not written yet: from `fresh`, else from the pool."""
        full = int(self._core.lengths[layer]) // self._core.shape.page_tokens
        self._settle(full)

        def write_layer() -> None:
            for b in range(self._core.table.batch):
                for stream, first, end in self._unwritten(b, full, layer):
                    self._write_run(layer, stream, b, range(first, end), fresh)

        _twice(write_layer)

    def _unwritten(self, b: int, full: int, layer: int) -> list[tuple[int, int, int]]:
        """Pages of a sequence that are not written, as (stream, first page, end): a run's are at its end."""
        found, end = [], 0
        for stream, pages in self._core.table.runs(b, full):
            end += pages
            left = pages - self.ssd.pages(stream, layer)
            if left > 0:
                found.append((stream, end - left, end))
        return found

    def _write_run(self, layer: int, stream: int, b: int, pages: range, fresh: Fresh | None) -> None:
        size = self._core.shape.page_tokens
        border = pages.stop if fresh is None else max(pages.start, fresh[0])
        pool = self._core.pools[layer]
        for page in range(pages.start, border):
            with pool.lock:
                number = int(self._core.table.table[b, page])
                if pool.slot_of[number] == NOT_HERE:
                    told = f"{self._path}: page {page} of layer {layer} of sequence {b} is lost: the disk failed behind it"
                    raise DataError(told, f"crop it to {page * size} tokens, or compute the context again")
                arrays = pool.rows(number)
            self.ssd.append(stream, layer, arrays)
        if fresh is not None and border < pages.stop:
            part = slice((border - fresh[0]) * size, (pages.stop - fresh[0]) * size)
            self.ssd.append(stream, layer, [array[:, part] for array in fresh[1][b]])

    def write_tokens(self) -> None:
        """Writes the full pages of tokens that are not written yet."""
        core, size = self._core, self._core.shape.page_tokens
        full = core.tokens.length // size
        self._settle(full)

        def write_ids() -> None:
            for b in range(core.table.batch):
                for stream, first, end in self._unwritten(b, full, core.shape.layers):
                    part = slice(first * size, end * size)
                    self.ssd.append_tokens(stream, core.tokens.ids[b, part], core.tokens.positions[b, part])

        _twice(write_ids)

    def write_all(self) -> None:
        """Writes everything that is full and not written yet."""
        for layer in range(self._core.shape.layers):
            self.write(layer)
        self.write_tokens()

    def resume(self) -> None:
        """As `write_all`, but leaves what `save` has written as it is while there is nothing to follow it."""
        full = int(self._core.lengths.max()) // self._core.shape.page_tokens
        if self._is_behind or not self.is_saved or self._settled(0) < full:
            self.write_all()
        if self._is_unsynced:
            _twice(self._write_back)

    def _write_back(self) -> None:
        self.write_all()
        self._flush()

    def _flush(self) -> None:
        self._is_unsynced = True
        self.ssd.flush()
        self._is_unsynced = False

    # Taking away

    def shrink(self, before: dict[int, int]) -> None:
        """Takes away what was given up since the streams had the ends `before`. Tables that do not name it come first."""
        after = self._core.table.ends
        for stream, end in before.items():
            if after.get(stream, 0) < end:
                self._cuts[stream] = min(after.get(stream, 0), self._cuts.get(stream, end))
        self._is_behind = True
        if self._cuts:
            self._takes_streams |= bool(after) and any(stream not in after for stream in before)
            self.uncut()
        elif self._written is None or self._written.opened() != self._tables().opened():
            self.note()
        self._is_behind = False

    def uncut(self) -> None:
        """Does what is left of taking away, and takes back what `save` has said and written."""
        self._is_behind = True
        if self.is_saved:
            partial, self._partial = self._partial, []
            for stream, place in partial:
                self._cuts[stream] = min(place, self._cuts.get(stream, place))
            self.note(closed=True)
        if self._cuts:
            # Half taken away, a stream that is no sequence any more must not be taken for a short one.
            self.note(closed=True, needed=self._takes_streams)
            for stream, pages in list(self._cuts.items()):
                _twice(functools.partial(self.ssd.truncate, stream, pages))
                del self._cuts[stream]
            self._takes_streams = False
        self._is_behind = False

    def note(self, closed: bool = False, needed: bool = False) -> None:
        """Writes the tables if those on the disk are others; sequences that were never forked need none, unless `needed`."""
        now = self._tables() if closed else self._tables().opened()
        if needed or not (now.is_plain and self._written is None):
            self._put(now)

    def _put(self, now: Tables) -> None:
        if now != self._written:
            tables.write(self._path, now)
            self._written = now

    def _tables(self) -> Tables:
        table = self._core.table
        return Tables([table.runs(b, self._settled(b)) for b in range(table.batch)], beside=self.beside)

    def _settled(self, b: int) -> int:
        return int((self._core.table.stream[self._core.table.table[b]] != NOWHERE).sum())

    # Saving

    @property
    def beside(self) -> str:
        """What `save` has said last."""
        return "" if self._written is None else self._written.beside

    def save(self, beside: str) -> None:
        """Writes all, the pages that are not full included, so that nothing is lost when the process ends."""
        _twice(functools.partial(self._save, beside))

    def _save(self, beside: str) -> None:
        core, size = self._core, self._core.shape.page_tokens
        self.write_all()
        full, rest = divmod(core.tokens.length, size)
        if rest:
            core.table.settle(full, full + 1)
            numbers = core.table.table[:, full]
            self._partial = [(int(core.table.stream[n]), int(core.table.place[n])) for n in numbers]
        try:
            if not full:  # as long as no sequence has a whole page, only the tables tell how many there are
                self.note(needed=True)
            for b, (stream, _) in enumerate(self._partial):
                self._save_tail(b, stream, full * size, rest)
            self._flush()
            self._put(Tables(self._tables().sequences, True, beside))
        finally:
            if rest:
                core.table.unsettle(full)

    def _save_tail(self, b: int, stream: int, start: int, rest: int) -> None:
        core = self._core
        for layer, pool in enumerate(core.pools):
            with pool.lock:
                arrays = [array[:, :rest] for array in pool.rows(int(core.table.table[b, -1]))]
            self.ssd.append(stream, layer, arrays)
        part = slice(start, start + rest)
        self.ssd.append_tokens(stream, core.tokens.ids[b, part], core.tokens.positions[b, part])

    def adopt(self, partial: list[tuple[int, int]], cuts: dict[int, int]) -> None:
        """Takes over what restoring has found: partial pages, and what no sequence uses."""
        self._partial, self._cuts = partial, cuts


def _twice(call: Callable[[], None]) -> None:
    """Calls again where the tier has told of lost pages: if memory has them no more either, that says so."""
    try:
        call()
    except DataError:
        call()


def keep_all(core: Core, layer: int, fresh: Fresh) -> None:
    """Puts into the pool what could not be written and is not there yet."""
    size, (first, rows) = core.shape.page_tokens, fresh
    pool = core.pools[layer]
    with pool.lock:
        for b, arrays in enumerate(rows):
            pages = arrays[0].shape[1] // size
            for page in range(pages):
                number = core.table.table[b, first + page : first + page + 1]
                if pool.slot_of[number[0]] == NOT_HERE:
                    pool.fill(number, [array[:, page * size : (page + 1) * size] for array in arrays])
