"""Reading slots of a spill file: pages that lie side by side in one go, every page compared with its checksum."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
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
Take = Callable[[int, int, Bytes], None]
"""Gets the side (KEYS, VALUES), where in the pages asked for a share begins, and its slots [n, slot bytes]."""
LARGEST_READ = 1 << 20
"""Beyond it a disk gets no faster, and threads have less to share."""
JOB_BYTES = 1 << 18
"""What one thread reads before it compares the checksums of it all: still in the processor's cache by then."""
TAKEN_BYTES = 1 << 20
"""What one thread reads before it hands it over: fewer and longer jobs, as each has more to do."""
HUGE_PAGE_BYTES = 1 << 21
_of_thread = threading.local()


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
    read = _reader(raw, layout, chain, side)
    shares = _shares(chain, pages, slots.shape[1], JOB_BYTES)
    return [partial(read, runs, slots[first : first + count]) for first, count, runs in shares]


def taking_jobs(
    raw: RawFile, layout: Layout, chain: Chain, pages: list[int], side: int, take: Take, threads: int
) -> list[Job]:
    """Returns what to do to have `pages` taken, in any order: each thread hands over what it has read and checked."""
    size = chain.plan.key_slot_bytes if side == KEYS else chain.plan.value_slot_bytes
    read = _reader(raw, layout, chain, side)

    def read_and_take(first: int, count: int, runs: list[Run]) -> None:
        slots = _own_memory(count * size).reshape(count, size)
        read(runs, slots)
        take(side, first, slots)

    # Of few pages every thread gets some.
    at_a_time = min(TAKEN_BYTES, len(pages) * size // (2 * threads))
    return [partial(read_and_take, *share) for share in _shares(chain, pages, size, at_a_time)]


def _own_memory(size_bytes: int) -> Bytes:
    """Returns memory of this thread, the same at every call: what was read last is still in the processor's cache.

    It lies in one huge page: the disk is told of one place in memory for each read, not of one for each 4 KiB.
    """
    memory: Bytes | None = getattr(_of_thread, "memory", None)
    if memory is None or memory.size < size_bytes:
        memory = _of_thread.memory = _huge_pages(max(size_bytes, HUGE_PAGE_BYTES))
    return memory[:size_bytes]


def _huge_pages(size_bytes: int) -> Bytes:
    """Returns memory in huge pages, where the kernel has some: fresh, as the allocator's may be in small ones already."""
    fresh = mmap.mmap(-1, size_bytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        fresh.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(fresh, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[skip : skip + size_bytes]


def _reader(raw: RawFile, layout: Layout, chain: Chain, side: int) -> Callable[[list[Run], Bytes], None]:
    """Returns what fills slots [pages, slot bytes] with runs and compares them with their checksums."""
    plan = chain.plan
    place = plan.key_at if side == KEYS else plan.value_at
    crcs = chain.key_crcs if side == KEYS else chain.value_crcs

    def read(runs: list[Run], into: Bytes) -> None:
        sizes = np.array([run.pages * into.shape[1] for run in runs], np.int64)
        offsets = np.array([layout.at(run.extent) + place(run.slot) for run in runs], np.int64)
        raw.read_runs(into.reshape(-1), sizes, offsets, plan.direct)
        wanted = [crc for run in runs for crc in crcs[run.first : run.first + run.pages]]
        for index in np.flatnonzero(checksums(into) != np.array(wanted, np.uint32)):
            raise _damaged(raw.path, chain, [run.first + i for run in runs for i in range(run.pages)][index], side)

    return read


def _shares(chain: Chain, pages: list[int], slot_bytes: int, at_a_time: int) -> Iterator[tuple[int, int, list[Run]]]:
    """Where in `pages` a share begins, how many it has and their runs, of at least `at_a_time` bytes each.

    Checksums of many pages at once cost less.
    """
    first = count = 0
    share: list[Run] = []
    for run in chain.runs(pages, max(1, LARGEST_READ // slot_bytes)):
        share.append(run)
        count += run.pages
        if count * slot_bytes >= at_a_time:
            yield first, count, share
            first, count, share = first + count, 0, []
    if share:
        yield first, count, share


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
