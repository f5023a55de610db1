"""Between the pools and the ssd tier: pages are written through in order, read back, and dropped where memory is full.

A page is written once it is full. Where that fails, it stays in the pool, beyond the bound if it must, and is written
before the next one, or when `write_all` is called: nothing that was appended is lost. Where writing *back* fails, much
later, the system may let go what the pool has let go before. The tier tells of that once, by a DataError, and is then
without these pages: what memory has of them is written again. What no sequence uses any more is taken away.

Source of the moves: hillinfer.txt, section 3.3 (bidirectional KV cache pools). Differs from the paper: the ssd tier is
inclusive, so a page that goes down is not written again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import DataError, LlmcacheError
from llmcache.kv.csd import ScoreBlock
from llmcache.kv.tiers.config import PING_PONG_STEPS, Arrays
from llmcache.kv.tiers.pool import NOT_HERE, Pool
from llmcache.kv.tiers.ssd import SsdTier
from llmcache.kv.tiers.table import NOWHERE, Sequences, Tables

Fresh = tuple[int, list[Arrays]]
"""First page that is new in a layer, and for each sequence the rows of all new full pages."""


class Spill:
    """What one store has on its ssd tier; `written`: the tables that are on the disk beside the spill file."""

    def __init__(self, state: Sequences, ssd: SsdTier, written: Tables | None) -> None:
        self._state, self.ssd = state, ssd
        assert state.config.path is not None
        self._path = state.config.path
        self._written = written
        self._cuts: dict[int, int] = {}
        self._takes_streams = False  # whole ones, which the tables on the disk may still name
        self._is_behind = False  # the file, as an error was in the way of taking away, or of the tables
        self._is_unsynced = False  # what was written, as an error was in the way of writing it back
        self._partial: list[tuple[int, int]] = []

    def adopt(self, full: int, is_partial: bool, streams: dict[int, int]) -> None:
        """Takes over what was found: a last page behind `full` ones, and pages of `streams` that no sequence uses."""
        table = self._state.table
        self._partial = self._places_of(full) if is_partial else []
        ends = {stream: table.ends.get(stream, 0) for stream in streams}
        self._cuts = {stream: end for stream, end in ends.items() if end < streams[stream]}

    def _places_of(self, page: int) -> list[tuple[int, int]]:
        """Where a page of each sequence lies: (stream, place)."""
        table = self._state.table
        return [(int(table.stream[number]), int(table.place[number])) for number in table.table[:, page]]

    def is_spilled(self, layer: int, numbers: Int64s) -> Flags:
        """Returns for each of `numbers` whether the page of a layer is on the ssd tier."""
        streams, places = self._state.table.stream[numbers], self._state.table.place[numbers]
        ends = np.zeros(int(streams.max(initial=NOWHERE)) + 2, np.int64)  # the last for pages that are nowhere
        for stream in np.unique(streams[streams != NOWHERE]).tolist():
            ends[stream] = self.ssd.pages(stream, layer)
        found: Flags = (places < ends[streams]) & (streams != NOWHERE)
        return found

    # Writing

    @property
    def is_saved(self) -> bool:
        """True if `save` has said that nothing is missing, or written pages that are not full: both go before more comes."""
        return bool(self._partial) or (self._written is not None and self._written.saved)

    def _settle(self, full: int) -> None:
        """Gives pages that are full their places, and brings the tables on the disk up to date before they are written."""
        self.uncut()
        first = self._settled(0)
        if first < full:
            self._state.table.settle(first, full)
        self.note()

    def add(self, layer: int, fresh: Fresh) -> None:
        """Writes pages that are full now; keeps them in memory where that fails."""
        try:
            self.write(layer, fresh)
        except LlmcacheError:
            self._keep(layer, fresh)
            raise

    def _keep(self, layer: int, fresh: Fresh) -> None:
        """Puts into the pool what could not be written and is not there yet."""
        size, (first, rows) = self._state.shape.page_tokens, fresh
        pool = self._state.pools[layer]
        with pool.lock:
            for b, arrays in enumerate(rows):
                for page in range(arrays[0].shape[1] // size):
                    number = self._state.table.table[b, first + page : first + page + 1]
                    if pool.slot_of[number[0]] == NOT_HERE:
                        pool.fill(number, [array[:, page * size : (page + 1) * size] for array in arrays])

    def write(self, layer: int, fresh: Fresh | None = None) -> None:
        """Writes the full pages of a layer that are not written yet: from `fresh`, else from the pool."""
        full = int(self._state.lengths[layer]) // self._state.shape.page_tokens
        self._write_out(layer, full, lambda b, stream, pages: self._write_run(layer, stream, b, pages, fresh))

    def write_tokens(self) -> None:
        """Writes the full pages of tokens that are not written yet."""
        tokens, size = self._state.tokens, self._state.shape.page_tokens

        def write_run(b: int, stream: int, pages: range) -> None:
            ids, positions = tokens.sides[:, b, pages.start * size : pages.stop * size]
            self.ssd.append_tokens(stream, ids, positions)

        self._write_out(self._state.shape.layers, tokens.length // size, write_run)

    def _write_out(self, layer: int, full: int, write_run: Callable[[int, int, range], None]) -> None:
        """Has `write_run` write what is missing of the `full` pages of each sequence: (sequence, stream, pages)."""
        self._settle(full)

        def write() -> None:
            for b in range(self._state.table.batch):
                end = 0
                for stream, pages in self._state.table.runs(b, full):
                    end += pages
                    left = pages - self.ssd.pages(stream, layer)  # at the end of the run: it was begun in order
                    if left > 0:
                        write_run(b, stream, range(end - left, end))

        _twice(write)

    def _write_run(self, layer: int, stream: int, b: int, pages: range, fresh: Fresh | None) -> None:
        size = self._state.shape.page_tokens
        border = pages.stop if fresh is None else max(pages.start, fresh[0])
        pool = self._state.pools[layer]
        for page in range(pages.start, border):
            with pool.lock:
                number = int(self._state.table.table[b, page])
                if pool.slot_of[number] == NOT_HERE:
                    told = f"{self._path}: page {page} of layer {layer} of sequence {b} is lost after an error of the disk"
                    raise DataError(told, f"crop the context to {page * size} tokens, or compute it again")
                arrays = pool.rows(number)
            self.ssd.append(stream, layer, arrays)
        if fresh is not None and border < pages.stop:
            part = slice((border - fresh[0]) * size, (pages.stop - fresh[0]) * size)
            self.ssd.append(stream, layer, [array[:, part] for array in fresh[1][b]])

    def write_all(self) -> None:
        """Writes everything that is full and not written yet."""
        for layer in range(self._state.shape.layers):
            self.write(layer)
        self.write_tokens()

    def resume(self) -> None:
        """As `write_all`, but leaves what `save` has written as it is while there is nothing to follow it."""
        full = int(self._state.lengths.max()) // self._state.shape.page_tokens
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
        after = self._state.table.ends
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
            now.write(self._path)
            self._written = now

    def _tables(self) -> Tables:
        table = self._state.table
        return Tables([table.runs(b, self._settled(b)) for b in range(table.batch)], sidecar=self.sidecar)

    def _settled(self, b: int) -> int:
        return int((self._state.table.stream[self._state.table.table[b]] != NOWHERE).sum())

    # Saving

    @property
    def sidecar(self) -> str:
        """What `save` has said last."""
        return "" if self._written is None else self._written.sidecar

    def save(self, sidecar: str) -> None:
        """Writes all, the pages that are not full included, so that nothing is lost when the process ends."""
        _twice(functools.partial(self._save, sidecar))

    def _save(self, sidecar: str) -> None:
        state, size = self._state, self._state.shape.page_tokens
        self.write_all()
        full, rest = divmod(state.tokens.length, size)
        if rest:
            state.table.settle(full, full + 1)
            self._partial = self._places_of(full)
        try:
            if not full:  # as long as no sequence has a whole page, only the tables tell how many there are
                self.note(needed=True)
            for b, (stream, _) in enumerate(self._partial):
                self._save_tail(b, stream, full * size, rest)
            self._flush()
            self._put(Tables(self._tables().sequences, True, sidecar))
        finally:
            if rest:
                state.table.unsettle(full)

    def _save_tail(self, b: int, stream: int, start: int, rest: int) -> None:
        state = self._state
        for layer, pool in enumerate(state.pools):
            with pool.lock:
                arrays = [array[:, :rest] for array in pool.rows(int(state.table.table[b, -1]))]
            self.ssd.append(stream, layer, arrays)
        ids, positions = state.tokens.sides[:, b, start : start + rest]
        self.ssd.append_tokens(stream, ids, positions)

    # Reading and moving

    def read(self, layer: int, numbers: Int64s, why: str) -> Iterator[tuple[Int64s, Arrays]]:
        """Yields pages with their numbers, stream by stream, as keys and values [pages, kv_heads, page_tokens, dim].

        They are valid until the next.
        """
        table = self._state.table
        for stream, found in table.by_stream(numbers):
            with self.ssd.read(stream, layer, table.places(found), why) as sides:
                yield found, sides

    def score(
        self, layer: int, sequence: int, pages: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        """Yields score blocks of `pages` of a sequence, ascending, stream after stream."""
        table = self._state.table
        numbers = table.table[sequence, pages]
        streams, places = table.stream[numbers], table.places(numbers)
        for stream in np.unique(streams).tolist():
            here = streams == stream
            shift = int(pages[here][0] - places[here][0]) * self._state.shape.page_tokens
            for block in self.ssd.score(stream, layer, places[here], queries, combine, block_tokens):
                yield ScoreBlock(block.head, block.positions + shift, block.scores)

    def up(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Reads pages of the middle into the pool; ValueError if it has no room for them."""
        state = self._state
        pool = state.checked(layer, sequence)
        pages, numbers = state.checked_pages(sequence, pages, state.middle)
        with pool.lock:
            numbers = np.unique(numbers[pool.slot_of[numbers] == NOT_HERE])
            self._check_room(pool, sequence, len(numbers))
        for found, arrays in self.read(layer, numbers, "move"):
            with pool.lock:
                fresh = pool.slot_of[found] == NOT_HERE
                self._check_room(pool, sequence, int(fresh.sum()))
                pool.put(found[fresh], [array[fresh] for array in arrays])
                again = state.step - pool.down_at[found[fresh]] <= PING_PONG_STEPS
            state.traffic.count(pages_up=int(fresh.sum()), ping_pong_pages=int(again.sum()))

    def _check_room(self, pool: Pool, sequence: int, more: int) -> None:
        bound = self._state.config.cpu_pages
        full = self._state.length // self._state.shape.page_tokens
        there = int((pool.slot_of[self._state.table.table[sequence, :full]] != NOT_HERE).sum())
        if bound is not None and there + more > bound:
            raise ValueError(
                f"pages: {more} more do not fit: the pool has {there} of at most {bound} pages of sequence {sequence}"
            )

    def bring(self, layer: int, numbers: Int64s) -> None:
        """Has pages in the pool, whatever its bound is."""
        pool = self._state.checked(layer)
        with pool.lock:
            missing = np.unique(numbers[pool.slot_of[numbers] == NOT_HERE])
        for found, arrays in self.read(layer, missing, "restore"):
            with pool.lock:
                pool.put(found, arrays)

    def down(self, layer: int, sequence: int, pages: Int64s) -> None:
        """Drops pages of the middle from the pool; those that are not in it stay where they are."""
        state = self._state
        pool = state.checked(layer, sequence)
        pages, numbers = state.checked_pages(sequence, pages, state.middle)
        spilled = self.is_spilled(layer, numbers)
        with pool.lock:
            here = pool.slot_of[numbers] != NOT_HERE
            if not spilled[here].all():
                raise ValueError(f"pages: not all of {pages.tolist()} are in the ssd tier yet, spill them first")
            self._drop(pool, np.unique(numbers[here]))

    def _drop(self, pool: Pool, numbers: Int64s) -> None:
        pool.drop(numbers)
        pool.down_at[numbers] = self._state.step
        self._state.traffic.count(pages_down=len(numbers))

    def trim(self, layer: int, tokens: int, more: int = 0, placing: bool = False) -> None:
        """Drops pages between sink and window, counted for `tokens` tokens, until each sequence has room for `more`.

        `placing`: they are those of a prompt, which finds its first places piece by piece; nothing has moved down then.
        """
        state, bound = self._state, self._state.config.cpu_pages
        if bound is None:
            return
        full = tokens // state.shape.page_tokens
        pool = state.checked(layer)
        middle = slice(state.config.sink_pages, max(0, full - state.config.window_pages))
        for b in range(state.table.batch):
            numbers = state.table.table[b, :full]
            spilled = self.is_spilled(layer, numbers)
            with pool.lock:
                here = pool.slot_of[numbers] != NOT_HERE
                excess = int(here.sum()) + more - bound
                pages = middle.start + np.flatnonzero((here & spilled)[middle])
                if excess > 0 and len(pages):
                    chosen = numbers[self._victims(pool, layer, b, pages, min(excess, len(pages)))]
                    if placing:
                        pool.drop(chosen)
                    else:
                        self._drop(pool, chosen)

    def _victims(self, pool: Pool, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        if self._state.victims is not None:
            chosen = np.unique(self._state.victims(layer, sequence, pages, count))
            if len(chosen) != count or not np.isin(chosen, pages).all():
                raise ValueError(f"victims: must be {count} of the pages {pages.tolist()}, not {chosen.tolist()}")
            return chosen
        since = pool.since[self._state.table.table[sequence, pages]]
        oldest: Int64s = pages[np.argsort(since, kind="stable")[:count]]
        return oldest


def _twice(call: Callable[[], None]) -> None:
    """Calls again where the tier has told of lost pages: if memory has them no more either, that says so."""
    try:
        call()
    except DataError:
        call()
