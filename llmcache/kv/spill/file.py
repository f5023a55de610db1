"""SpillFile: a spill file that is written, by one process at a time (it holds a lock on the file).

Within that process one lock orders what changes the file. Reading needs none: a page that has been handed out is never
moved, and an append only adds.

A sync that fails leaves all in doubt that was written since the last one: the system may have dropped it, calls it clean,
and the next sync would say nothing. So before that, pages are read back, compared with their checksums and written once
more, and so are the tables, which memory has. A page that cannot be read back whole is lost, with those behind it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Int64s
from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError, UsageError
from llmcache.kv.spill.checksum import checksums
from llmcache.kv.spill.layout import (
    COMMITS_AT,
    EXTENT_TOKENS,
    KEYS,
    RECORD_BYTES,
    VALUES,
    Commit,
    ExtentEntry,
    ExtentPlan,
    KvShape,
    Layout,
    PageChain,
    PageEntry,
    aligned,
    check_rows,
    pack,
    slots_of,
)
from llmcache.kv.spill.raw import RawFile, there_already
from llmcache.kv.spill.reader import SIDES, Scan, SpillReader
from llmcache.units import BLOCK_BYTES

Fill = Callable[[slice], tuple[Bytes, Bytes]]
"""Returns the slots of keys and values [pages, slot bytes] of some of the tokens that are appended."""


class SpillFile(SpillReader):
    """An open spill file; make one with `create` or `open`, and close it (it is a context manager).

    What `append` has written survives the end of the process, after `flush` also that of the machine. A page counts
    after a restart once all layers and the tokens have it. Whatever changes the file raises DataError once if pages have
    been lost to a sync that failed: it is whole without them, and nothing else has been done; `pages` tells what is left.
    """

    _flags = os.O_RDWR

    def __init__(self, raw: RawFile, layout: Layout, found: Scan) -> None:
        super().__init__(raw, layout, found)
        self._lock = threading.Lock()
        self._unwiped: list[tuple[int, int]] = []  # (offset, bytes) in tables, of pages that are no more
        self._undone: PageChain | None = None  # may have extents to give back
        self._cutting = False  # what was cut may still be on the disk, where pages to come will lie
        self._doubtful = False  # a sync has failed
        self._synced = found.commit.epoch  # pages up to this epoch are on the disk
        latest = max((chain.epochs[-1] for chain in found.chains.values() if chain.pages), default=0)
        # Of pages, and of the next commit: not before any page, and in the place of the older commit.
        self._epoch = found.commit.epoch + 1 + max(0, latest - found.commit.epoch) // 2 * 2
        self._lost = 0  # pages, not told yet
        self.written_bytes = 0

    @classmethod
    def create(
        cls,
        path: str | Path,
        shape: KvShape,
        *,
        extent_pages: int = 0,
        interleaved: bool = False,
        direct: bool | None = None,
    ) -> SpillFile:
        """Makes an empty file, under a temporary name that ends like its own (--spill globs), and opens it.

        `extent_pages` pages of a layer lie side by side (0: 1024 tokens). `interleaved`: for who reads rows, and never keys
        alone. UsageError if the file is there, or its directory is not.
        """
        path = Path(path)
        extent_pages = extent_pages or max(1, EXTENT_TOKENS // shape.page_tokens)
        layout = Layout(shape, extent_pages, interleaved=interleaved)
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent}: not a directory", "create it first")
        if path.exists():
            raise there_already(path)
        temporary = path.with_name(f"new-{secrets.token_hex(8)}-{path.name}")
        raw: RawFile | None = None
        try:
            raw = RawFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct)
            raw.lock()
            raw.write(layout.header(), 0)
            raw.write(pack(Commit(0, 0)).ljust(BLOCK_BYTES, b"\0"), COMMITS_AT[0])
            raw.sync()
            raw.open_direct()
            raw.rename(path)
        except BaseException:
            with contextlib.suppress(LlmcacheError):
                if raw is not None:
                    raw.close()
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return cls(raw, layout, Scan(raw, layout, Commit(0, 0)))

    def append(self, sequence: int, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> int:
        """Adds pages of keys and values [kv_heads, tokens, dim] to a layer; returns the bytes written.

        The last page may be partial: nothing can follow it until `truncate` has taken it away. EnvironmentProblem (no
        space, an error of the disk): all is as it was before the call.
        """
        check_rows(self.shape, keys, values)

        def fill(part: slice) -> tuple[Bytes, Bytes]:
            return slots_of(self.shape, keys[:, part], KEYS), slots_of(self.shape, values[:, part], VALUES)

        return self._append(sequence, self._checked_layer(layer), keys.shape[1], fill)

    def append_tokens(self, sequence: int, ids: Int64s, positions: Int64s) -> int:
        """Adds the ids and positions of tokens, in pages as those of the layers; returns the bytes written."""
        if ids.ndim != 1 or ids.shape != positions.shape or not len(ids):
            raise ValueError(
                f"ids, positions: must have one axis of the same length, not shapes {ids.shape} and {positions.shape}"
            )

        def fill(part: slice) -> tuple[Bytes, Bytes]:
            pages = self.shape.pages_of(part.stop - part.start)
            slots = np.zeros((2, pages * self.shape.page_tokens), np.int64)
            slots[0, : part.stop - part.start], slots[1, : part.stop - part.start] = ids[part], positions[part]
            keys, values = slots.view(np.uint8).reshape(2, pages, -1)
            return keys, values

        return self._append(sequence, self.shape.layers, len(ids), fill)

    def _append(self, sequence: int, layer: int, tokens: int, fill: Fill) -> int:
        """Appends `tokens` to a chain, an extent at a time."""
        if not 0 <= sequence < 1 << 32:
            raise ValueError(f"sequence: must be from 0 to {(1 << 32) - 1}, not {sequence}")
        page_tokens, before, done = self.shape.page_tokens, self.written_bytes, 0
        with self._lock:
            self._make_whole()
            self._tell_lost()
            plan = self._layout.plan(layer)
            chain = self._chains.setdefault((sequence, layer), PageChain(sequence, layer, plan))
            if chain.pages and chain.last_tokens < page_tokens:
                raise ValueError(f"layer: layer {layer} of sequence {sequence} ends with a partial page, truncate it first")
            first = chain.pages
            try:
                while done < tokens:
                    room = (plan.slots - chain.pages % plan.slots) * page_tokens
                    part = slice(done, min(tokens, done + room))
                    self._append_run(chain, part.stop - part.start, fill(part))
                    done = part.stop
            except LlmcacheError:
                self._undo(chain, first)
                raise
            return self.written_bytes - before

    def _append_run(self, chain: PageChain, tokens: int, sides: tuple[Bytes, Bytes]) -> None:
        """Writes pages that lie side by side: first what is in them, then their entries."""
        ordinal, slot = divmod(chain.pages, chain.plan.slots)
        if ordinal == len(chain.extents):
            self._claim(chain)
        at, size = self._layout.at(chain.extents[ordinal]), self.shape.page_tokens
        self._write_pages(chain.plan, at, slot, sides)
        crcs = np.concatenate([checksums(*pair) for pair in zip(sides, chain.plan.parts, strict=True)], axis=1)
        entries = [
            PageEntry(chain.sequence, chain.layer, chain.pages + index, min(size, tokens - index * size), self._epoch, own)
            for index, own in enumerate(map(tuple, crcs.tolist()))
        ]
        self._write(_table(chain.plan, entries), at + chain.plan.entry_at(slot))
        for entry in entries:
            chain.add(entry)

    def _undo(self, chain: PageChain, pages: int) -> None:
        """Takes back what an append has done before an error: entries, from the end, and then the extents it claimed."""
        chain.cut(pages, self.shape.page_tokens)
        ordinal, slot = divmod(pages, chain.plan.slots)
        for index in range(ordinal, len(chain.extents)):
            first = slot if index == ordinal else 0
            offset = self._layout.at(chain.extents[index]) + chain.plan.entry_at(first)
            self._unwiped.append((offset, (chain.plan.slots - first) * chain.plan.entry_bytes))
        self._undone = chain
        self._make_whole()

    def _make_whole(self) -> None:
        """Takes away in the file what is no more in memory; before every change, as an error may have been in the way.

        An entry left behind would come alive with a later page before it. From the end, so that what a crash leaves is a
        beginning.
        """
        while self._unwiped:
            offset, size = self._unwiped[-1]
            self._write(bytes(size), offset)
            self._unwiped.pop()
        if self._undone is not None:
            while len(self._undone.extents) > -(-self._undone.pages // self._undone.plan.slots):
                self._give_back(self._undone)
            self._undone = None
        if self._cutting:
            self._sync()
            self._cutting = False

    def _write_pages(self, plan: ExtentPlan, at: int, slot: int, sides: Sequence[Bytes]) -> None:
        if plan.interleaved:
            parts = [slots.reshape(len(slots), plan.parts[side], plan.part_bytes(side)) for side, slots in enumerate(sides)]
            joined = aligned(sum(slots.size for slots in sides))
            np.concatenate(parts, axis=2, out=joined.reshape(*parts[KEYS].shape[:2], plan.step_bytes(KEYS)))
            self._write(joined, at + plan.slot_at(KEYS, slot), plan.direct)
            return
        for side, slots in enumerate(sides):
            self._write(slots.reshape(-1), at + plan.slot_at(side, slot), plan.direct)

    def _claim(self, chain: PageChain) -> None:
        """Gives `chain` one more extent: a free one (its table is empty), or a new one at the end of the file."""
        owner = pack(ExtentEntry(chain.sequence, chain.layer, len(chain.extents)))
        if self._free:
            self._write(owner, self._layout.at(self._free[-1]))
            chain.extents.append(self._free.pop())
            return
        start = self._layout.at(self._extents)
        self.raw.grow(start, self._layout.at(self._extents + 1))
        try:
            self._write(owner, start)
        except LlmcacheError:
            self.raw.cut(start)
            raise
        chain.extents.append(self._extents)
        self._extents += 1

    def _give_back(self, chain: PageChain) -> None:
        """Takes the last extent of `chain` back; its table is empty."""
        extent = chain.extents[-1]
        if extent == self._extents - 1:
            self.raw.cut(self._layout.at(extent))
            self._extents -= 1
        else:
            self._write(bytes(RECORD_BYTES), self._layout.at(extent))
            self._free.append(extent)
        chain.extents.pop()

    def truncate(self, sequence: int, pages: int) -> None:
        """Takes away all pages of `sequence` from number `pages` on, in all layers; on the disk when it returns."""
        if pages < 0:
            raise ValueError(f"pages: must be at least 0, not {pages}")
        with self._lock:
            self._make_whole()
            self._cut([(chain, pages) for chain in self._chains_of(sequence) if chain.pages > pages], [])

    def _cut(self, cuts: list[tuple[PageChain, int]], wipe: list[tuple[int, int]]) -> None:
        """Cuts chains in the file. The commit comes first: were it last, a crash before it would look like damage."""
        self._sync()
        self._tell_lost()
        self._write_commit(sum(chain.pages - pages for chain, pages in cuts))
        self._cutting = True
        self._unwiped += wipe
        for chain, pages in cuts:
            for run in chain.runs(list(range(pages, chain.pages))):
                offset = self._layout.at(run.extent) + chain.plan.entry_at(run.slot)
                self._unwiped.append((offset, run.pages * chain.plan.entry_bytes))
            chain.cut(pages, self.shape.page_tokens)
        self._make_whole()

    def flush(self) -> None:
        """Returns when everything appended is on the disk and will be there after a crash of the machine.

        EnvironmentProblem: it could not be written back; a later flush does so, or raises DataError for what is lost.
        """
        with self._lock:
            self._make_whole()
            self._sync()
            self._tell_lost()
            self._write_commit()

    def _write_commit(self, gone: int = 0) -> None:
        """Commits what is synced, less `gone` pages. It may be on the disk even where it fails: its epoch is used up."""
        commit = Commit(self._epoch, sum(chain.pages for chain in self._chains.values()) - gone)
        # Two on: the next one must take the place of this, and not of the last good one.
        self._synced, self._epoch = commit.epoch, commit.epoch + 2
        self._write(pack(commit), COMMITS_AT[commit.epoch % 2])
        self._sync()
        self._epoch = commit.epoch + 1

    def _sync(self) -> None:
        """Returns when all that was written is on the disk; what a sync that failed has left in doubt is written again."""
        if self._doubtful:
            self._write_again()
        self._doubtful = True
        self.raw.sync()
        self._doubtful = False

    def _write_again(self) -> None:
        """Writes all pages that are not known to be on the disk, and all tables. What cannot be read back is cut off."""
        with contextlib.suppress(EnvironmentProblem):
            self.raw.sync()  # what is dirty cannot be forgotten
        for chain in self._chains.values():
            first, slots = bisect_right(chain.epochs, self._synced), chain.plan.slots
            for ordinal, extent in enumerate(chain.extents):
                pages = range(max(first, ordinal * slots), min(chain.pages, (ordinal + 1) * slots))
                sides = self._whole(chain, list(pages))
                if len(sides[0]) < len(pages):
                    chain.lost = chain.pages
                    chain.cut(pages.start + len(sides[0]), self.shape.page_tokens)
                    self._lost += chain.lost - chain.pages
                self._forget(extent)
                self._write_pages(chain.plan, self._layout.at(extent), pages.start - ordinal * slots, sides)
                self._write_table(chain, ordinal)
        for extent in self._free:
            self._forget(extent)
            self._write(bytes(self._layout.table_bytes), self._layout.at(extent))

    def _whole(self, chain: PageChain, pages: list[int]) -> list[Bytes]:
        """Keys and values of `pages` [pages, slot bytes], those before the first that cannot be read whole."""
        try:
            return self._read_sides(chain, pages, SIDES)
        except DataError:
            for index, page in enumerate(pages):
                try:
                    self._read_sides(chain, [page], SIDES)
                except DataError:
                    return self._read_sides(chain, pages[:index], SIDES)
            raise

    def _forget(self, extent: int) -> None:
        """Has the file system map an extent anew: ext4 forgets, if writing back failed, that a block was never written."""
        self.raw.forget(self._layout.at(extent), self._layout.extent_bytes)

    def _write_table(self, chain: PageChain, ordinal: int) -> None:
        slots, extent = chain.plan.slots, chain.extents[ordinal]
        pages = range(ordinal * slots, min(chain.pages, (ordinal + 1) * slots))
        owner = pack(ExtentEntry(chain.sequence, chain.layer, ordinal)).ljust(chain.plan.entry_bytes, b"\0")
        table = owner + _table(chain.plan, [chain.entry(page, self.shape.page_tokens) for page in pages])
        self._write(table.ljust(chain.plan.table_bytes, b"\0"), self._layout.at(extent))

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            told = f"{self.path}: {lost} pages are lost, because the kernel could not write them to the disk"
            raise DataError(told, "append them again, or compute the context again")

    def _write(self, data: bytes | Bytes, offset: int, direct: bool = False) -> None:
        self.raw.write(data, offset, direct)
        self.written_bytes += len(data)

    def close(self) -> None:
        """Flushes and closes the file."""
        if self.raw.fd < 0:
            return
        try:
            self.flush()
        finally:
            self.raw.close()


def _table(plan: ExtentPlan, entries: list[PageEntry]) -> bytes:
    return b"".join(pack(entry, plan.entry_bytes) for entry in entries)
