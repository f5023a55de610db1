"""The loop detector on small traces, including some on which the printed Algorithm 1 fails."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from llmcache.cache.detector import LOOP, LOOP_PASSES, SEQ, Detector, Place
from llmcache.cache.streams import WINDOW

STEP_NS = 1_000_000

Access = tuple[int, int]
"""First block and number of blocks."""


def runs_of(blocks: Iterable[int]) -> list[Access]:
    """Return `blocks` as runs of adjacent blocks."""
    listed = list(blocks)
    starts = [0, *(at + 1 for at, (one, two) in enumerate(pairwise(listed)) if two != one + 1), len(listed)]
    return [(listed[start], end - start) for start, end in pairwise(starts)]


def detect(accesses: Iterable[Access], file: int = 0, write: bool = False, detector: Detector | None = None) -> Detector:
    """Return the detector after `accesses`, 1 ms apart, with its streams ended."""
    found = detector or Detector()
    begin = found.now.ns
    for number, (first, count) in enumerate(accesses):
        note(found, begin + number * STEP_NS, file, first, count, write)
    found.finish()
    return found


def note(detector: Detector, t_ns: int, file: int, first: int, count: int, write: bool = False) -> None:
    detector.record_run(t_ns, t_ns, file, first, count, count, write)


def places(detector: Detector, file: int = 0, write: bool = False) -> list[Place]:
    trail = detector.trails.get((file, write))
    return [] if trail is None else list(trail.places())


def loops(detector: Detector, file: int = 0, write: bool = False) -> list[Place]:
    """Return all loops, including expired ones."""
    return [place for place in places(detector, file, write) if place.kind == LOOP]


def live_loops(detector: Detector, file: int) -> list[Place]:
    """Return the loops that have not expired."""
    return [place for place in loops(detector, file) if not place.expired(detector.now)]


def test_a_retried_prompt_is_not_a_loop() -> None:
    """io_caching section 3.2, figure 2c: two consecutive accesses to the same file."""
    (place,) = places(detect([(block, 1) for block in range(1000)] * 2))
    assert (place.kind, place.passes) == (SEQ, 2)
    for passes in range(1, 6):
        assert len(loops(detect([(0, 500)] * passes))) == (1 if passes >= LOOP_PASSES else 0)
    assert loops(detect([(0, WINDOW // 2), (10_000, 1)] * 50)) == [], "runs shorter than a window are not sequences"
    assert len(loops(detect([(0, 2 * WINDOW), (10_000, 1)] * 50))) == 1
    detector = detect([(5, 1)] * 4096)  # one block, byte by byte
    assert [place.kind for place in places(detector)] == [SEQ] and detector.now.blocks == 1


@pytest.mark.parametrize(("row", "write"), [(1, False), (7, True), (1000, False), (-1, False)])
def test_row_size_and_direction_do_not_change_the_period_of_a_loop(row: int, write: bool) -> None:
    """Writes are separate from reads; rows of -1 descend."""
    one_pass = [(first, min(abs(row), 1000 - first)) for first in range(0, 1000, abs(row))][:: row // abs(row)]
    detector = detect(one_pass * 9, write=write)
    (place,) = loops(detector, write=write)
    assert loops(detector, write=not write) == []
    assert (place.first, place.end, place.blocks, place.passes, place.accesses) == (0, 1000, 1000, 9, 9000)
    assert place.period is not None and place.period.blocks == 1000
    assert place.period.ns == pytest.approx(len(one_pass) * STEP_NS, rel=0.01)
    assert place.descending == (row < 0)


@pytest.mark.parametrize("stride", [2, 33, 100_000])
def test_strided_reads_are_one_sequence(stride: int) -> None:
    (place,) = loops(detect(runs_of(list(range(7, 7 + 500 * stride, stride)) * 10)))
    assert (place.stride, place.blocks, place.passes) == (stride, 500, 10)
    assert (place.first, place.end) == (7, 7 + 499 * stride + 1)


def test_an_expired_loop_is_live_again_after_one_pass() -> None:
    first, second = [(0, 100), (100, 100), (200, 200)], [(5000, 500), (5500, 500)]
    detector = detect(first * 10)
    assert len(live_loops(detector, 0)) == 1
    detect(second * 10, file=1, detector=detector)
    assert live_loops(detector, 0) == []
    assert len(live_loops(detector, 1)) == 1
    note(detector, 10**12, 0, 0, 400)
    assert len(live_loops(detector, 0)) == 1, "the period of the expired loop is remembered"


@pytest.mark.parametrize(("wait_ns", "blocks", "left"), [(1.9e9, 1900, 1), (2.1e9, 2100, 0), (1e15, 1, 1)])
def test_a_loop_expires_after_two_missed_periods(wait_ns: float, blocks: int, left: int) -> None:
    """A period passes only while other files are read: an idle pause does not expire a loop."""
    detector = Detector()
    for turn in range(10):
        note(detector, turn * 10**9, 0, 0, 1000)
    note(detector, 9 * 10**9 + round(wait_ns), 1, 0, blocks)
    assert len(live_loops(detector, 0)) == left


def test_staggered_readers_of_a_file_make_one_pass() -> None:
    """Four processes load one file, each 100 blocks behind the next."""
    blocks = [step - 100 * reader for step in range(2300) for reader in range(4) if 0 <= step - 100 * reader < 2000]
    detector = detect(runs_of(blocks))
    assert loops(detector) == []
    assert max(place.passes for place in places(detector)) == 1


def test_two_readers_of_a_loop_do_not_halve_its_period() -> None:
    one = list(range(1000)) * 8
    other = one[600:] + one[:600]
    detector = detect(runs_of([block for pair in zip(one, other, strict=True) for block in pair]))
    for place in loops(detector):
        assert place.period is not None
        assert 1700 <= place.period.blocks <= 2100
    assert sum(place.blocks for place in loops(detector)) >= 990
