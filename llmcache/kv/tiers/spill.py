"""Spill: writes full pages of the pools through to the ssd tier in order, reads them back, and drops them from memory.

If a write fails, the page stays in the pool, even above the limit, and is written before the next page or by
`write_all`. If a later write-back fails, the kernel may drop data that the pool has dropped already. The tier then raises
DataError once and no longer has these pages; those still in memory are written again.

Source: hillinfer.txt, section 3.3 (bidirectional KV cache pools). Differs from the paper: the ssd tier is inclusive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import DataError, LlmcacheError
from llmcache.kv.tiers.config import PING_PONG_STEPS, Arrays
from llmcache.kv.tiers.pool import NOT_HERE, Pool
from llmcache.kv.tiers.ssd import SsdTier
from llmcache.kv.tiers.table import NOWHERE, Sequences, Tables
from llmcache.papers.csd import ScoreBlock

Fresh = tuple[int, list[Arrays]]  # the first new page of a layer, and for each sequence the rows of all new full pages


class Spill:
    """The ssd tier of one store; `written` are the tables that are on disk next to the spill file."""

    def __init__(self, state: Sequences, ssd: SsdTier, written: Tables | None) -> None:
        self._state, self.ssd = state, ssd
        assert state.config.path is not None
        self._path = state.config.path
        self._written = written
        self._cuts: dict[int, int] = {}
        self._removes_streams = False  # whole streams are being removed, which the tables on disk may still name
        self._is_outdated = False  # an error interrupted a removal or an update of the tables
        self._is_unsynced = False  # an error interrupted the write-back
        self._partial: list[tuple[int, int]] = []

    def adopt(self, full: int, is_partial: bool, streams: dict[int, int]) -> None:
        """Take over a restored file: a partial page after `full` ones, and pages of `streams` that no sequence uses."""
        table = self._state.table
        self._partial = self._places_of(full) if is_partial else []
        ends = {stream: table.ends.get(stream, 0) for stream in streams}
        self._cuts = {stream: end for stream, end in ends.items() if end < streams[stream]}

    def _places_of(self, page: int) -> list[tuple[int, int]]:
        table = self._state.table
        return [(int(table.stream[number]), int(table.place[number])) for number in table.table[:, page]]

    def is_spilled(self, layer: int, numbers: Int64s) -> Flags:
        streams, places = self._state.table.stream[numbers], self._state.table.place[numbers]
        ends = np.zeros(int(streams.max(initial=NOWHERE)) + 2, np.int64)  # the last is for pages without a stream
        for stream in np.unique(streams[streams != NOWHERE]).tolist():
            ends[stream] = self.ssd.pages(stream, layer)
        found: Flags = (places < ends[streams]) & (streams != NOWHERE)
        return found

    # Writing

    @property
    def is_saved(self) -> bool:
        """True if `save` has marked the file as complete or written partial pages; `finish_changes` reverts both."""
        return bool(self._partial) or (self._written is not None and self._written.saved)

    def _settle(self, full: int) -> None:
        """Assign places to full pages, and update the tables on disk before the pages are written."""
        self.finish_changes()
        first = self._settled(0)
        if first < full:
            self._state.table.settle(first, full)
        self.update_tables()

    def add(self, layer: int, fresh: Fresh) -> None:
        try:
            self.write(layer, fresh)
        except LlmcacheError:
            self._keep_in_pool(layer, fresh)
            raise

    def _keep_in_pool(self, layer: int, fresh: Fresh) -> None:
        size, (first, rows) = self._state.shape.page_tokens, fresh
        pool = self._state.pools[layer]
        with pool.lock:
            for b, arrays in enumerate(rows):
                for page in range(arrays[0].shape[1] // size):
                    number = self._state.table.table[b, first + page : first + page + 1]
                    if pool.slot_of[number[0]] == NOT_HERE:
                        pool.fill(number, [array[:, page * size : (page + 1) * size] for array in arrays])

    def write(self, layer: int, fresh: Fresh | None = None) -> None:
        """Write the unwritten full pages of a layer: from `fresh`, else from the pool."""
        full = int(self._state.lengths[layer]) // self._state.shape.page_tokens
        self._write_out(layer, full, lambda b, stream, pages: self._write_run(layer, stream, b, pages, fresh))

    def write_tokens(self) -> None:
        tokens, size = self._state.tokens, self._state.shape.page_tokens

        def write_run(b: int, stream: int, pages: range) -> None:
            ids, positions = tokens.sides[:, b, pages.start * size : pages.stop * size]
            self.ssd.append_tokens(stream, ids, positions)

        self._write_out(self._state.shape.layers, tokens.length // size, write_run)

    def _write_out(self, layer: int, full: int, write_run: Callable[[int, int, range], None]) -> None:
        self._settle(full)

        def write() -> None:
            for b in range(self._state.table.batch):
                end = 0
                for stream, pages in self._state.table.runs(b, full):
                    end += pages
                    left = pages - self.ssd.pages(stream, layer)  # the missing pages are at the end of the run
                    if left > 0:
                        write_run(b, stream, range(end - left, end))

        _retry_once(write)

    def _write_run(self, layer: int, stream: int, b: int, pages: range, fresh: Fresh | None) -> None:
        size = self._state.shape.page_tokens
        border = pages.stop if fresh is None else max(pages.start, fresh[0])
        pool = self._state.pools[layer]
        for page in range(pages.start, border):
            with pool.lock:
                number = int(self._state.table.table[b, page])
                if pool.slot_of[number] == NOT_HERE:
                    lost = f"page {page} of layer {layer} of sequence {b} is lost after an error of the disk"
                    raise DataError(
                        f"{self._path}: {lost}", f"crop the context to {page * size} tokens, or compute it again"
                    )
                arrays = pool.rows(number)
            self.ssd.append(stream, layer, arrays)
        if fresh is not None and border < pages.stop:
            part = slice((border - fresh[0]) * size, (pages.stop - fresh[0]) * size)
            self.ssd.append(stream, layer, [array[:, part] for array in fresh[1][b]])

    def write_all(self) -> None:
        for layer in range(self._state.shape.layers):
            self.write(layer)
        self.write_tokens()

    def resume(self) -> None:
        """Like `write_all`, but keep the state that `save` has written if there is nothing new."""
        full = int(self._state.lengths.max()) // self._state.shape.page_tokens
        if self._is_outdated or not self.is_saved or self._settled(0) < full:
            self.write_all()
        if self._is_unsynced:
            _retry_once(self._write_back)

    def _write_back(self) -> None:
        self.write_all()
        self._flush()

    def _flush(self) -> None:
        self._is_unsynced = True
        self.ssd.flush()
        self._is_unsynced = False

    # Removing

    def shrink(self, before: dict[int, int]) -> None:
        """Update the tables, then remove the pages that became unused since the streams had the ends `before`."""
        after = self._state.table.ends
        for stream, end in before.items():
            if after.get(stream, 0) < end:
                self._cuts[stream] = min(after.get(stream, 0), self._cuts.get(stream, end))
        self._is_outdated = True
        if self._cuts:
            self._removes_streams |= bool(after) and any(stream not in after for stream in before)
            self.finish_changes()
        elif self._written is None or self._written.opened() != self._tables().opened():
            self.update_tables()
        self._is_outdated = False

    def finish_changes(self) -> None:
        """Complete pending removals, and revert the marks and partial pages of `save`."""
        self._is_outdated = True
        if self.is_saved:
            partial, self._partial = self._partial, []
            for stream, place in partial:
                self._cuts[stream] = min(place, self._cuts.get(stream, place))
            self.update_tables(closed=True)
        if self._cuts:
            # The tables are needed: a partly removed stream without a sequence would look like a short sequence.
            self.update_tables(closed=True, needed=self._removes_streams)
            for stream, pages in list(self._cuts.items()):
                _retry_once(functools.partial(self.ssd.truncate, stream, pages))
                del self._cuts[stream]
            self._removes_streams = False
        self._is_outdated = False

    def update_tables(self, closed: bool = False, needed: bool = False) -> None:
        """Write the tables if they differ from those on disk; without forks only if `needed`."""
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
        return "" if self._written is None else self._written.sidecar

    def save(self, sidecar: str) -> None:
        _retry_once(functools.partial(self._save, sidecar))

    def _save(self, sidecar: str) -> None:
        state, size = self._state, self._state.shape.page_tokens
        self.write_all()
        full, rest = divmod(state.tokens.length, size)
        if rest:
            state.table.settle(full, full + 1)
            self._partial = self._places_of(full)
        try:
            if not full:  # without a full page, only the tables record the number of sequences
                self.update_tables(needed=True)
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
        """Yield (numbers, keys and values [pages, kv_heads, page_tokens, dim]) by stream; valid until the next iteration."""
        table = self._state.table
        for stream, found in table.by_stream(numbers):
            with self.ssd.read(stream, layer, table.places(found), why) as sides:
                yield found, sides

    def score(
        self, layer: int, sequence: int, pages: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        table = self._state.table
        numbers = table.table[sequence, pages]
        streams, places = table.stream[numbers], table.places(numbers)
        for stream in np.unique(streams).tolist():
            in_stream = streams == stream
            shift = int(pages[in_stream][0] - places[in_stream][0]) * self._state.shape.page_tokens
            for block in self.ssd.score(stream, layer, places[in_stream], queries, combine, block_tokens):
                yield ScoreBlock(block.head, block.positions + shift, block.scores)

    def up(self, layer: int, sequence: int, pages: Int64s) -> None:
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
                is_ping_pong = state.step - pool.down_at[found[fresh]] <= PING_PONG_STEPS
            state.traffic.count(pages_up=int(fresh.sum()), ping_pong_pages=int(is_ping_pong.sum()))

    def _check_room(self, pool: Pool, sequence: int, more: int) -> None:
        bound = self._state.config.cpu_pages
        full = self._state.length // self._state.shape.page_tokens
        resident = int((pool.slot_of[self._state.table.table[sequence, :full]] != NOT_HERE).sum())
        if bound is not None and resident + more > bound:
            raise ValueError(
                f"pages: {more} more do not fit: the pool has {resident} of at most {bound} pages of sequence {sequence}"
            )

    def bring(self, layer: int, numbers: Int64s) -> None:
        pool = self._state.checked(layer)
        with pool.lock:
            missing = np.unique(numbers[pool.slot_of[numbers] == NOT_HERE])
        for found, arrays in self.read(layer, missing, "restore"):
            with pool.lock:
                pool.put(found, arrays)

    def down(self, layer: int, sequence: int, pages: Int64s) -> None:
        state = self._state
        pool = state.checked(layer, sequence)
        pages, numbers = state.checked_pages(sequence, pages, state.middle)
        spilled = self.is_spilled(layer, numbers)
        with pool.lock:
            resident = pool.slot_of[numbers] != NOT_HERE
            if not spilled[resident].all():
                raise ValueError(f"pages: not all of {pages.tolist()} are in the ssd tier yet, spill them first")
            self._drop(pool, np.unique(numbers[resident]))

    def _drop(self, pool: Pool, numbers: Int64s) -> None:
        pool.drop(numbers)
        pool.down_at[numbers] = self._state.step
        self._state.traffic.count(pages_down=len(numbers))

    def trim(self, layer: int, tokens: int, more: int = 0, placing: bool = False) -> None:
        """Drop pages between sink and window of `tokens` tokens until each sequence has room for `more`.

        `placing`: the pages are new, from a prompt that is appended in pieces, so they do not count as moved down.
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
                resident = pool.slot_of[numbers] != NOT_HERE
                excess = int(resident.sum()) + more - bound
                pages = middle.start + np.flatnonzero((resident & spilled)[middle])
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


def _retry_once(call: Callable[[], None]) -> None:
    """Call again if the tier reports lost pages: the second call writes them from memory, or raises."""
    try:
        call()
    except DataError:
        call()
