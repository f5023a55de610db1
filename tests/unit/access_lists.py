"""Accesses for tests of the detector: blocks in order, as the paper's Algorithm 1 sees them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from llmcache.cache.detector import HOT, LOOP, Detector, Place

STEP_NS = 1_000_000

Access = tuple[int, int]
"""First block and number of blocks."""


def runs_of(blocks: Iterable[int]) -> list[Access]:
    """Returns `blocks` as runs of adjacent ones."""
    listed = list(blocks)
    starts = [0, *(at + 1 for at, (one, two) in enumerate(pairwise(listed)) if two != one + 1), len(listed)]
    return [(listed[start], end - start) for start, end in pairwise(starts)]


def detect(accesses: Iterable[Access], file: int = 0, write: bool = False, detector: Detector | None = None) -> Detector:
    """Returns the detector after `accesses`, a millisecond apart, with its streams ended."""
    found = detector or Detector()
    begin = found.now.ns
    for number, (first, count) in enumerate(accesses):
        found.note(begin + number * STEP_NS, file, first, count, write)
    found.finish()
    return found


def loops(detector: Detector, file: int = 0, write: bool = False) -> list[Place]:
    """Returns all loops, expired ones too."""
    return [place for place in detector.places(file, write) if place.kind == LOOP]


def live_loops(detector: Detector, file: int) -> list[Place]:
    """Returns the loops that have not expired."""
    return [place for place in loops(detector, file) if not place.expired(detector.now)]


def spans(detector: Detector, file: int = 0) -> list[tuple[int, int]]:
    """Returns first and last block + 1 of all loops."""
    return [(place.first, place.end) for place in loops(detector, file)]


def hot_blocks(detector: Detector, file: int = 0) -> int:
    """Returns how many blocks are hot."""
    return sum(place.blocks for place in detector.places(file) if place.kind == HOT)
