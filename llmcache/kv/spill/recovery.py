"""What a spill file holds when it is opened: whole pages, and what a crash left behind them, which is never served.

A page exists once its entry does, and its entry is written after it. What was written since the last commit may have
reached the disk in any order, so its checksums are compared here; the pages before are compared when they are read. A
chain ends before its first page that is not whole. Pages lost behind a commit are damage, not a crash: DataError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmcache.errors import DataError
from llmcache.kv.spill.chain import Chain
from llmcache.kv.spill.checksum import checksums
from llmcache.kv.spill.layout import (
    COMMITS_AT,
    RECORD_BYTES,
    Commit,
    ExtentEntry,
    Layout,
    PageEntry,
    unpack_commit,
    unpack_extent,
    unpack_page,
)
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.spill.shape import KvShape, aligned

ChainKey = tuple[int, int]


@dataclass(frozen=True)
class Recovery:
    """What opening a file dropped: pages without their other layers, torn or half-written entries."""

    unfinished_pages: int = 0
    torn_entries: int = 0

    @property
    def clean(self) -> bool:
        """True if the file was as its last writer left it."""
        return not (self.unfinished_pages or self.torn_entries)


@dataclass
class Found:
    """The contents of a file: chains cut to whole pages, free extents, and entries to be wiped before it is written."""

    commit: Commit
    chains: dict[ChainKey, Chain] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    wipe: list[tuple[int, int]] = field(default_factory=list)  # (offset, bytes) in tables
    extents: int = 0
    torn_entries: int = 0


ATTEMPTS = 5
LAST_EPOCH = (1 << 32) - 2
"""A record has 32 bits for an epoch, and pages are those of the next."""
MOST_AHEAD = 1 << 31
"""No page is of a later epoch than this, unless commits are: each that fails uses up two."""


def scan(raw: RawFile, layout: Layout) -> Found:
    """Returns what the file holds; it is not changed. DataError if pages are missing that were committed.

    Somebody may be writing it: where pages were taken away between the commit and their entries, it is read again.
    """
    for _ in range(ATTEMPTS - 1):
        commit = _commit_of(raw)
        try:
            return _scan(raw, layout, commit)
        except DataError:
            if commit == _commit_of(raw):
                raise
    return _scan(raw, layout, _commit_of(raw))


def _scan(raw: RawFile, layout: Layout, commit: Commit) -> Found:
    found = Found(commit)
    size, committed = raw.size(), 0
    for key, extents in _owners(raw, layout, found).items():
        chain = Chain(*key, layout.plan(key[1]))
        found.chains[key] = chain
        committed += _ChainReader(raw, layout, found, size).read(chain, extents)
    if committed < found.commit.pages:
        lost = found.commit.pages - committed
        hint = "the file was damaged or cut after it was written: spill the context again"
        raise DataError(f"{raw.path}: table: {lost} of {found.commit.pages} committed pages are missing", hint)
    return found


def _commit_of(raw: RawFile) -> Commit:
    records = [unpack_commit(raw.read(RECORD_BYTES, at)) for at in COMMITS_AT]
    # One in the other's place would be overwritten by the next, instead of the older one.
    whole = [record for turn, record in enumerate(records) if record is not None and record.epoch % 2 == turn]
    if not whole:
        raise DataError(f"{raw.path}: commit: both records are damaged", "spill the context again")
    newest = max(whole)
    if newest.epoch >= LAST_EPOCH:
        raise DataError(f"{raw.path}: commit: epoch {newest.epoch} is the last there can be", "spill the context again")
    return newest


def _owners(raw: RawFile, layout: Layout, found: Found) -> dict[ChainKey, list[int]]:
    """Extents of each chain in their order; those that belong to none, or lie behind a gap, become free."""
    owners: dict[ChainKey, dict[int, int]] = {}
    for extent in _written(raw, layout):
        found.extents = extent + 1
        entry = unpack_extent(raw.read(RECORD_BYTES, layout.at(extent)))
        if entry is None or not _is_possible(entry, layout) or entry.ordinal in owners.get(entry[:2], {}):
            _free(raw, layout, found, extent)
        else:
            owners.setdefault(entry[:2], {})[entry.ordinal] = extent
    chains: dict[ChainKey, list[int]] = {}
    for key, extents in owners.items():
        gap = next(ordinal for ordinal in range(len(extents) + 1) if ordinal not in extents)
        chains[key] = [extents.pop(ordinal) for ordinal in range(gap)]
        for extent in extents.values():
            # The extent before it is missing, so what it holds can be of no use.
            _free(raw, layout, found, extent)
    return chains


def _written(raw: RawFile, layout: Layout) -> Iterator[int]:
    """Yields the extents whose tables were ever written: a file of holes takes no longer than what is there of it."""
    end, extent = raw.size(), 0
    while layout.at(extent) < end:
        data = raw.data_from(layout.at(extent))
        if data is None:
            return
        if data < layout.at(extent) + layout.table_bytes:
            yield extent
            extent += 1
        else:
            extent = max(extent + 1, (data - layout.at(0)) // layout.extent_bytes)


def _free(raw: RawFile, layout: Layout, found: Found, extent: int) -> None:
    """Notes an extent that may be used again, without what is in its table: it must not come alive under a new owner."""
    found.free.append(extent)
    table = raw.read(layout.table_bytes, layout.at(extent))
    if any(table):
        found.wipe.append((layout.at(extent), len(table)))
        found.torn_entries += 1


def _is_possible(entry: ExtentEntry, layout: Layout) -> bool:
    return entry.layer <= layout.shape.layers


class _ChainReader:
    """Reads the entries of one chain after the other."""

    def __init__(self, raw: RawFile, layout: Layout, found: Found, size: int) -> None:
        self.raw, self.layout, self.found, self.size = raw, layout, found, size

    def read(self, chain: Chain, extents: list[int]) -> int:
        """Adds the whole pages to `chain`; returns how many of them are committed."""
        chain.extents = extents
        committed, ended = 0, False
        for ordinal, extent in enumerate(extents):
            first, slot = ordinal * chain.plan.slots, 0
            table = self.raw.read(chain.plan.entry_at(chain.plan.slots), self.layout.at(extent))
            for entry in () if ended else _entries(table, chain, first):
                if not self._is_whole(entry, chain, extent, slot):
                    break
                chain.add(entry)
                committed += entry.epoch <= self.found.commit.epoch
                slot += 1
                if entry.tokens < self.layout.shape.page_tokens:
                    break
            ended = ended or slot < chain.plan.slots or chain.last_tokens < self.layout.shape.page_tokens
            self._note_rest(table, chain, extent, slot)
        return committed

    def _is_whole(self, entry: PageEntry, chain: Chain, extent: int, slot: int) -> bool:
        plan, at = chain.plan, self.layout.at(extent)
        if not 1 <= entry.tokens <= self.layout.shape.page_tokens or at + plan.value_at(slot + 1) > self.size:
            return False
        if entry.epoch <= self.found.commit.epoch:
            return True
        if entry.epoch > max(self.found.commit.epoch + 1, MOST_AHEAD):
            return False
        places = ((plan.key_at(slot), plan.key_slot_bytes), (plan.value_at(slot), plan.value_slot_bytes))
        for (offset, length), crc in zip(places, (entry.key_crc, entry.value_crc), strict=True):
            buffer = aligned(length)
            self.raw.read_into(buffer, at + offset, plan.direct)
            if checksums(buffer[None])[0] != crc:
                return False
        return True

    def _note_rest(self, table: bytes, chain: Chain, extent: int, slot: int) -> None:
        """Entries behind the last whole page would come alive again once the pages before them are rewritten."""
        offset = chain.plan.entry_at(slot)
        rest = table[offset:]
        if any(rest):
            self.found.torn_entries += sum(any(rest[i : i + RECORD_BYTES]) for i in range(0, len(rest), RECORD_BYTES))
            self.found.wipe.append((self.layout.at(extent) + offset, len(rest)))


def _entries(table: bytes, chain: Chain, first: int) -> Iterator[PageEntry]:
    """Entries of `chain` from page `first` on, until one is not what it must be."""
    for slot in range(chain.plan.slots):
        offset = chain.plan.entry_at(slot)
        entry = unpack_page(table[offset : offset + RECORD_BYTES])
        if entry is None or entry[:3] != (chain.sequence, chain.layer, first + slot):
            return
        yield entry


def unfinished(chains: dict[ChainKey, Chain], shape: KvShape) -> list[tuple[Chain, int]]:
    """Returns the chains that have more pages than all layers of their sequence, and how many those have."""
    sequences: dict[int, list[Chain]] = {}
    for chain in chains.values():
        sequences.setdefault(chain.sequence, []).append(chain)
    pages = {sequence: _common_pages(own, shape) for sequence, own in sequences.items()}
    return [(chain, pages[chain.sequence]) for chain in chains.values() if chain.pages > pages[chain.sequence]]


def whole_pages(chains: dict[ChainKey, Chain], sequence: int, shape: KvShape) -> int:
    """Returns how many pages of `sequence` all layers and the tokens have, the last with equally many tokens in each."""
    own: list[Chain] = []
    for layer in range(shape.layers + 1):
        chain = chains.get((sequence, layer))
        if chain is None:
            return 0
        own.append(chain)
    return _common_pages(own, shape)


def _common_pages(own: list[Chain], shape: KvShape) -> int:
    """As `whole_pages`, of the chains of one sequence. A damaged header may tell of more layers than memory holds."""
    if len(own) <= shape.layers:
        return 0
    pages = min(chain.pages for chain in own)
    if pages and len({chain.tokens_of(pages - 1, shape.page_tokens) for chain in own}) > 1:
        pages -= 1
    return pages
