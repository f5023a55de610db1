"""Reading slots of a spill file: pages that lie side by side in one go, every page compared with its checksum."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError
from llmcache.kv.spill.chain import Chain
from llmcache.kv.spill.layout import Layout
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.spill.shape import Bytes, KvShape, aligned, view_slots

KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class KeyRange:
    """Keys of `pages` pages from `first_page` on, side by side from `offset` of the file on, with their checksums."""

    first_page: int
    pages: int
    offset: int
    crcs: tuple[int, ...]


def read_slots(raw: RawFile, layout: Layout, chain: Chain, pages: list[int], side: int) -> Bytes:
    """Returns the slots [pages, slot bytes] of `pages`, keys (`side` 0) or values (1), in the order asked for."""
    plan = chain.plan
    size, at = (plan.key_slot_bytes, plan.key_at) if side == KEYS else (plan.value_slot_bytes, plan.value_at)
    buffer = aligned(len(pages) * size)
    done = 0
    for run in chain.runs(pages):
        part = buffer[done * size : (done + run.pages) * size]
        raw.read_into(part, layout.at(run.extent) + at(run.slot), plan.direct)
        done += run.pages
    slots = buffer.reshape(len(pages), size)
    crcs = chain.key_crcs if side == KEYS else chain.value_crcs
    for slot, page in zip(slots, pages, strict=True):
        if zlib.crc32(slot.data) != crcs[page]:
            raise _damaged(raw.path, chain, page, side)
    return slots


def _damaged(path: Path, chain: Chain, page: int, side: int) -> DataError:
    kind = ("keys", "values")[side]
    where = f"page {page} of layer {chain.layer} of sequence {chain.sequence}"
    return DataError(f"{path}: {kind}: the checksum of {where} is wrong", "the disk lost it: compute the context again")


def rows(shape: KvShape, slots: Bytes, dim: int) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Returns what lies in `slots` [pages, slot bytes]: rows [pages, kv_heads, page_tokens, dim], scales (int8)."""
    return view_slots(shape, slots, dim)


def key_ranges(layout: Layout, chain: Chain) -> list[KeyRange]:
    """Returns where the keys of `chain` lie."""
    ranges = []
    for run in chain.runs(list(range(chain.pages))):
        crcs = tuple(chain.key_crcs[run.first : run.first + run.pages])
        ranges.append(KeyRange(run.first, run.pages, layout.at(run.extent) + chain.plan.key_at(run.slot), crcs))
    return ranges


def check_keys(path: Path, found: KeyRange, first: int, slots: Bytes) -> None:
    """DataError if a slot of `slots` [pages, slot bytes], keys of `found` from its page `first` on, is damaged."""
    for index, slot in enumerate(slots):
        if zlib.crc32(slot.data) != found.crcs[first + index]:
            page = found.first_page + first + index
            raise DataError(f"{path}: keys: the checksum of page {page} is wrong", "the disk lost it: compute it again")
