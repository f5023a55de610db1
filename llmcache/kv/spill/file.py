"""SpillFile: a spill file open for writing, by one process at a time (it locks the file).

A lock orders the changes within the process. Reads need no lock: a page never moves, and appends only add pages.

After a failed sync, the kernel may have dropped the data written since the previous sync, and the next sync would report
success. So before the next sync, these pages are verified and written again, and so are the tables. A page that fails
verification is lost, and so are the pages after it.
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
from llmcache.errors import DataError, LlmcacheError, MissingRequirement, UsageError
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
"""Returns the slots of keys and values [pages, slot bytes] for a slice of the appended tokens."""


class SpillFile(SpillReader):
    """A spill file open for writing; a context manager.

    Appended pages survive the end of the process, and after `flush` a crash of the machine. After a restart, only pages that
    all layers and the tokens have are kept. If a failed sync has lost pages, the next call that changes the file raises
    DataError once, without any other effect; `pages` returns what remains.
    """

    _flags = os.O_RDWR

    def __init__(self, raw: RawFile, layout: Layout, found: Scan) -> None:
        super().__init__(raw, layout, found)
        self._lock = threading.Lock()
        self._unwiped: list[tuple[int, int]] = []  # (offset, bytes) in tables of the entries of removed pages
        self._undone: PageChain | None = None  # its surplus extents have to be released
        self._cutting = False  # the entries of removed pages may still be on disk
        self._doubtful = False  # a sync has failed
        self._synced = found.commit.epoch  # pages up to this epoch are on disk
        latest = max((chain.epochs[-1] for chain in found.chains.values() if chain.pages), default=0)
        # Epoch of new pages and the next commit: at least that of any page; its parity selects the older commit.
        self._epoch = found.commit.epoch + 1 + max(0, latest - found.commit.epoch) // 2 * 2
        self._lost = 0  # lost pages that were not reported yet
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
        """Create an empty file and open it. UsageError: the file exists, or its directory does not.

        `extent_pages`: pages of a layer in an extent (0: 1024 tokens). `interleaved`: keys are never read alone.
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
        """Append pages of keys and values [kv_heads, tokens, dim] to a layer; return the bytes written.

        The last page may be partial; `truncate` must remove it before the next append. MissingRequirement, without effect:
        the disk is full or failed.
        """
        check_rows(self.shape, keys, values)

        def fill(part: slice) -> tuple[Bytes, Bytes]:
            return slots_of(self.shape, keys[:, part], KEYS), slots_of(self.shape, values[:, part], VALUES)

        return self._append(sequence, self._checked_layer(layer), keys.shape[1], fill)

    def append_tokens(self, sequence: int, ids: Int64s, positions: Int64s) -> int:
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
        if not 0 <= sequence < 1 << 32:
            raise ValueError(f"sequence: must be from 0 to {(1 << 32) - 1}, not {sequence}")
        page_tokens, before, done = self.shape.page_tokens, self.written_bytes, 0
        with self._lock:
            self._finish_removals()
            self._raise_lost()
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
        """Write adjacent pages: first the contents, then the entries."""
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
        chain.cut(pages, self.shape.page_tokens)
        ordinal, slot = divmod(pages, chain.plan.slots)
        for index in range(ordinal, len(chain.extents)):
            first = slot if index == ordinal else 0
            offset = self._layout.at(chain.extents[index]) + chain.plan.entry_at(first)
            self._unwiped.append((offset, (chain.plan.slots - first) * chain.plan.entry_bytes))
        self._undone = chain
        self._finish_removals()

    def _finish_removals(self) -> None:
        """Complete removals that an error interrupted, before every change.

        A leftover entry would become valid again when an append writes the page before it.
        """
        while self._unwiped:
            offset, size = self._unwiped[-1]
            self._write(bytes(size), offset)
            self._unwiped.pop()
        if self._undone is not None:
            while len(self._undone.extents) > -(-self._undone.pages // self._undone.plan.slots):
                self._release_extent(self._undone)
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

    def _release_extent(self, chain: PageChain) -> None:
        extent = chain.extents[-1]
        if extent == self._extents - 1:
            self.raw.cut(self._layout.at(extent))
            self._extents -= 1
        else:
            self._write(bytes(RECORD_BYTES), self._layout.at(extent))
            self._free.append(extent)
        chain.extents.pop()

    def truncate(self, sequence: int, pages: int) -> None:
        """Remove the pages of `sequence` from number `pages` on in all layers, durably."""
        if pages < 0:
            raise ValueError(f"pages: must be at least 0, not {pages}")
        with self._lock:
            self._finish_removals()
            self._cut([(chain, pages) for chain in self._chains_of(sequence) if chain.pages > pages], [])

    def _cut(self, cuts: list[tuple[PageChain, int]], wipe: list[tuple[int, int]]) -> None:
        """Write the commit first: with the old commit, a crash during the removal would look like damage."""
        self._sync()
        self._raise_lost()
        self._write_commit(sum(chain.pages - pages for chain, pages in cuts))
        self._cutting = True
        self._unwiped += wipe
        for chain, pages in cuts:
            for run in chain.runs(list(range(pages, chain.pages))):
                offset = self._layout.at(run.extent) + chain.plan.entry_at(run.slot)
                self._unwiped.append((offset, run.pages * chain.plan.entry_bytes))
            chain.cut(pages, self.shape.page_tokens)
        self._finish_removals()

    def flush(self) -> None:
        """Write everything to disk, so that it survives a crash of the machine.

        MissingRequirement: the write-back failed; a later flush repeats it, or raises DataError for lost pages.
        """
        with self._lock:
            self._finish_removals()
            self._sync()
            self._raise_lost()
            self._write_commit()

    def _write_commit(self, removed: int = 0) -> None:
        """Commit the synced pages except `removed` ones; a failed one may be on disk, so its epoch is never used again."""
        commit = Commit(self._epoch, sum(chain.pages for chain in self._chains.values()) - removed)
        # Skip an epoch, in case the commit fails: the next one must overwrite this one, and not the last good one.
        self._synced, self._epoch = commit.epoch, commit.epoch + 2
        self._write(pack(commit), COMMITS_AT[commit.epoch % 2])
        self._sync()
        self._epoch = commit.epoch + 1

    def _sync(self) -> None:
        if self._doubtful:
            self._write_again()
        self._doubtful = True
        self.raw.sync()
        self._doubtful = False

    def _write_again(self) -> None:
        with contextlib.suppress(MissingRequirement):
            self.raw.sync()  # the kernel drops only clean pages from its cache
        for chain in self._chains.values():
            first, slots = bisect_right(chain.epochs, self._synced), chain.plan.slots
            for ordinal, extent in enumerate(chain.extents):
                pages = range(max(first, ordinal * slots), min(chain.pages, (ordinal + 1) * slots))
                sides = self._verified_prefix(chain, list(pages))
                if len(sides[0]) < len(pages):
                    chain.lost = chain.pages
                    chain.cut(pages.start + len(sides[0]), self.shape.page_tokens)
                    self._lost += chain.lost - chain.pages
                self._drop_cached(extent)
                self._write_pages(chain.plan, self._layout.at(extent), pages.start - ordinal * slots, sides)
                self._write_table(chain, ordinal)
        for extent in self._free:
            self._drop_cached(extent)
            self._write(bytes(self._layout.table_bytes), self._layout.at(extent))

    def _verified_prefix(self, chain: PageChain, pages: list[int]) -> list[Bytes]:
        try:
            return self._read_sides(chain, pages, SIDES)
        except DataError:
            for index, page in enumerate(pages):
                try:
                    self._read_sides(chain, [page], SIDES)
                except DataError:
                    return self._read_sides(chain, pages[:index], SIDES)
            raise

    def _drop_cached(self, extent: int) -> None:
        """After a failed write-back, ext4 must look up its unwritten blocks again."""
        self.raw.forget(self._layout.at(extent), self._layout.extent_bytes)

    def _write_table(self, chain: PageChain, ordinal: int) -> None:
        slots, extent = chain.plan.slots, chain.extents[ordinal]
        pages = range(ordinal * slots, min(chain.pages, (ordinal + 1) * slots))
        owner = pack(ExtentEntry(chain.sequence, chain.layer, ordinal)).ljust(chain.plan.entry_bytes, b"\0")
        table = owner + _table(chain.plan, [chain.entry(page, self.shape.page_tokens) for page in pages])
        self._write(table.ljust(chain.plan.table_bytes, b"\0"), self._layout.at(extent))

    def _raise_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            message = f"{self.path}: {lost} pages are lost, because the kernel could not write them to the disk"
            raise DataError(message, "append them again, or compute the context again")

    def _write(self, data: bytes | Bytes, offset: int, direct: bool = False) -> None:
        self.raw.write(data, offset, direct)
        self.written_bytes += len(data)

    def close(self) -> None:
        if self.raw.fd < 0:
            return
        try:
            self.flush()
        finally:
            self.raw.close()


def _table(plan: ExtentPlan, entries: list[PageEntry]) -> bytes:
    return b"".join(pack(entry, plan.entry_bytes) for entry in entries)
