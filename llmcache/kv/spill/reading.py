"""Reading slots of a spill file: pages that lie side by side in one go, every page compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError
from llmcache.kv.kernels.threads import Job, run_all
from llmcache.kv.spill.chain import Chain, Run
from llmcache.kv.spill.checksum import checksums
from llmcache.kv.spill.layout import Layout
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.spill.shape import Bytes, KvPages, KvShape, aligned, view_slots

KEYS, VALUES = 0, 1
LARGEST_READ = 1 << 20
"""Beyond it a disk gets no faster, and threads have less to share."""


JOB_BYTES = 1 << 18
"""What one thread reads before it compares the checksums of it all: still in the processor's cache by then."""


@dataclass(frozen=True)
class KeyRange:
    """Keys of `pages` pages from `first_page` on, side by side from `offset` of the file on, with their checksums."""

    first_page: int
    pages: int
    offset: int
    crcs: tuple[int, ...]


def read_slots(raw: RawFile, layout: Layout, chain: Chain, pages: list[int], side: int) -> Bytes:
    """Returns the slots [pages, slot bytes] of `pages`, keys (`side` 0) or values (1), in the order asked for."""
    size = chain.plan.key_slot_bytes if side == KEYS else chain.plan.value_slot_bytes
    slots = aligned(len(pages) * size).reshape(len(pages), size)
    run_all(read_jobs(raw, layout, chain, pages, side, slots))
    return slots


def read_jobs(raw: RawFile, layout: Layout, chain: Chain, pages: list[int], side: int, slots: Bytes) -> list[Job]:
    """Returns what to do to have `pages` in `slots` [pages, slot bytes]: reads, each with its checksums, in any order."""
    plan = chain.plan
    place = plan.key_at if side == KEYS else plan.value_at
    crcs = chain.key_crcs if side == KEYS else chain.value_crcs

    def read(runs: list[Run], into: Bytes) -> None:
        done = 0
        for run in runs:
            part = into[done : done + run.pages].reshape(-1)
            raw.read_into(part, layout.at(run.extent) + place(run.slot), plan.direct)
            done += run.pages
        wanted = [crc for run in runs for crc in crcs[run.first : run.first + run.pages]]
        for index in np.flatnonzero(checksums(into) != np.array(wanted, np.uint32)):
            raise _damaged(raw.path, chain, [run.first + i for run in runs for i in range(run.pages)][index], side)

    done = 0
    jobs: list[Job] = []
    most = max(1, LARGEST_READ // slots.shape[1])
    for share in _shares(list(chain.runs(pages, most)), max(1, JOB_BYTES // slots.shape[1])):
        count = sum(run.pages for run in share)
        jobs.append(partial(read, share, slots[done : done + count]))
        done += count
    return jobs


def _shares(runs: list[Run], pages: int) -> Iterator[list[Run]]:
    """`runs` in lists of at least `pages` pages: checksums of many pages at once cost less."""
    share: list[Run] = []
    for run in runs:
        share.append(run)
        if sum(one.pages for one in share) >= pages:
            yield share
            share = []
    if share:
        yield share


def _damaged(path: Path, chain: Chain, page: int, side: int) -> DataError:
    kind = ("keys", "values")[side]
    where = f"page {page} of layer {chain.layer} of sequence {chain.sequence}"
    return DataError(f"{path}: {kind}: the checksum of {where} is wrong", "the disk lost it: compute the context again")


def rows(shape: KvShape, slots: Bytes, dim: int) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Returns what lies in `slots` [pages, slot bytes]: rows [pages, kv_heads, page_tokens, dim], scales (int8)."""
    return view_slots(shape, slots, dim)


def as_pages(shape: KvShape, keys: Bytes, values: Bytes, tokens: NDArray[np.int64]) -> KvPages:
    """Returns what lies in slots of keys and values [pages, slot bytes] as pages, of which `tokens` [pages] are filled."""
    key_rows, key_scales = rows(shape, keys, shape.head_dim)
    value_rows, value_scales = rows(shape, values, shape.value_dim)
    return KvPages(key_rows, value_rows, tokens, key_scales, value_scales)


def key_ranges(layout: Layout, chain: Chain, pages: list[int] | None = None) -> list[KeyRange]:
    """Returns where the keys of `chain` lie, of all its pages or of `pages` in their order."""
    ranges = []
    for run in chain.runs(list(range(chain.pages)) if pages is None else pages):
        crcs = tuple(chain.key_crcs[run.first : run.first + run.pages])
        ranges.append(KeyRange(run.first, run.pages, layout.at(run.extent) + chain.plan.key_at(run.slot), crcs))
    return ranges


def check_keys(path: Path, found: KeyRange, first: int, slots: Bytes) -> None:
    """DataError if a slot of `slots` [pages, slot bytes], keys of `found` from its page `first` on, is damaged."""
    for index, crc in enumerate(checksums(slots)):
        if crc != found.crcs[first + index]:
            page = found.first_page + first + index
            raise DataError(f"{path}: keys: the checksum of page {page} is wrong", "the disk lost it: compute it again")
