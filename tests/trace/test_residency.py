"""Hits and misses inferred from fills and evictions, compared with a plain model; records of buffers sorted by time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmcache.arrays import Records
from llmcache.trace.kernel import Copies
from llmcache.trace.record import HIT, MISS, READ, UNKNOWN, WRITE
from llmcache.trace.records import (
    ACCESS,
    BLOCK,
    COPIED,
    DIRECT,
    EVICT,
    FILL,
    RECORD,
    Residency,
    TimeOrder,
    no_records,
    unknown,
)


def rows(*events: tuple[int, int, int, int], op: int = READ) -> Records:
    """Return records of (kind, inode, first, count), one nanosecond apart."""
    records = no_records(len(events))
    for index, (kind, inode, first, count) in enumerate(events):
        records[index] = (index, first, inode, 1, count, 7, 1, op, UNKNOWN, kind, 0)
    return records


def verdicts(records: Records) -> list[tuple[int, int, int]]:
    """Return (inode, block, miss) of every access, block by block."""
    return [
        (int(row["inode"]), block, int(row["miss"]))
        for row in records
        if row["kind"] == ACCESS
        for block in range(int(row["first"]), int(row["first"] + row["count"]))
    ]


def plain(records: Records) -> list[tuple[int, int, int]]:
    """Return the same, computed block by block."""
    filled: set[tuple[int, int]] = set()
    found = []
    for row in records:
        for block in range(int(row["first"]), int(row["first"] + row["count"])):
            key = (int(row["inode"]), block)
            if row["kind"] == FILL:
                filled.add(key)
            elif row["kind"] == EVICT:
                filled.discard(key)
            elif row["kind"] == ACCESS:
                found.append((*key, MISS if key in filled else HIT))
                filled.discard(key)
    return found


events = st.tuples(st.sampled_from([ACCESS, FILL, EVICT]), st.integers(1, 2), st.integers(0, 12), st.integers(1, 6))


@given(st.lists(st.lists(events, max_size=12), min_size=1, max_size=4))
def test_results_equal_those_of_the_plain_model(batches: list[list[Any]]) -> None:
    residency = Residency()
    marked = [residency.mark(rows(*batch)) for batch in batches]
    expected = plain(np.concatenate([rows(*batch) for batch in batches]))
    assert [verdict for part in marked for verdict in verdicts(part)] == expected


@given(st.lists(events, max_size=12))
def test_splitting_keeps_blocks_requests_and_order(batch: list[Any]) -> None:
    before = rows(*batch)
    after = Residency().mark(before.copy())
    assert (np.diff(after["t_ns"].astype(np.int64)) >= 0).all()
    assert after["aux"].sum() == before["aux"].sum()
    assert after["count"].sum() == before["count"].sum()


def test_a_run_partly_read_from_storage_is_split() -> None:
    marked = Residency().mark(rows((FILL, 1, 4, 2), (ACCESS, 1, 0, 10), (ACCESS, 1, 0, 10)))
    parts = [(int(row["first"]), int(row["count"]), int(row["miss"]), int(row["aux"])) for row in marked[1:]]
    assert parts == [(0, 4, HIT, 1), (4, 2, MISS, 0), (6, 4, HIT, 0), (0, 10, HIT, 1)]


def test_accesses_around_the_page_cache_do_not_change_it() -> None:
    """Direct reads are misses, writes are hits, and block requests have no result."""
    records = rows((FILL, 1, 0, 1), (ACCESS, 1, 0, 1), (ACCESS, 1, 0, 1), (ACCESS, 1, 5, 1))
    records["flags"][[1, 3]] = DIRECT
    assert list(Residency().mark(records)["miss"][1:]) == [MISS, MISS, MISS]
    assert list(unknown(records)["miss"][1:]) == [MISS, UNKNOWN, MISS]
    written = rows((ACCESS, 1, 0, 3), op=WRITE)
    written["flags"] = DIRECT
    assert list(Residency().mark(written)["miss"]) == [HIT]
    assert list(Residency().mark(rows((BLOCK, 1, 0, 3)))["miss"]) == [UNKNOWN]


def at(*times: int, kind: int = ACCESS) -> Records:
    records = no_records(len(times))
    records["t_ns"], records["kind"] = times, kind
    return records


def test_records_wait_until_no_older_one_can_arrive() -> None:
    order = TimeOrder()
    assert list(order.put(at(30, 10, 50), 20)["t_ns"]) == [10]
    assert list(order.put(at(40, 25), 45)["t_ns"]) == [25, 30, 40]
    assert list(order.put(at(), None)["t_ns"]) == [50]


def test_late_records_get_the_time_of_the_horizon_and_fills_precede_accesses() -> None:
    order = TimeOrder()
    order.put(at(10, 30), 20)
    assert list(order.put(at(5), 25)["t_ns"]) == [20]
    assert list(order.put(at(), 30)["t_ns"]) == [30]
    merged = TimeOrder().put(np.concatenate((at(5), at(5, kind=FILL))), None)
    assert list(merged["kind"]) == [FILL, ACCESS]


runs = st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.booleans())
"""Blocks in the copy of a run, further blocks when it is sent, whether it is copied, and whether it is sent at all."""


@given(st.lists(runs, max_size=12), st.lists(st.integers(0, 30), max_size=4))
def test_blocks_of_copied_runs_count_once(made: list[tuple[int, int, bool, bool]], cuts: list[int]) -> None:
    sent, copied = [], []
    for number, (count, more, is_copied, is_sent) in enumerate(made):
        run = (number // 2, 100 * number, 5, 1, count + more, 7, 1 + more, READ, UNKNOWN, ACCESS)
        if is_copied:
            copied.append((*run[:4], count, 7, 1, *run[7:], COPIED))
        if is_sent or not is_copied:
            sent.append((*run, 0))
    ring = np.array(copied + sent, RECORD)  # a copy precedes the run
    settled, known = [], Copies()
    for part in np.split(ring, sorted(min(cut, len(ring)) for cut in cuts)):
        settled.append(known.settle(part.copy()))
    found = np.concatenate(settled)
    assert not (found["flags"] & COPIED).any()
    blocks = sorted(block for row in found for block in range(int(row["first"]), int(row["first"] + row["count"])))
    whole = [(100 * n, count + more if sent or not copied else count) for n, (count, more, copied, sent) in enumerate(made)]
    assert blocks == [block for first, count in whole for block in range(first, first + count)]
    assert found["aux"].sum() == sum(1 + more if sent or not copied else 1 for _, more, copied, sent in made)
