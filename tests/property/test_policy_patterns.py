"""Simulated llmcache reads hardly more than LRU of the same size, for generated access patterns and several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest

import numpy as np

from llmcache.arrays import Int64s
from llmcache.cache.policies import policy_class
from tests.conftest import examples
from tools.bench.patterns import PAGE, WARMUP, Pass, Pattern, Stage, generate

PATTERNS = 4000
MOST_BYTES = 4_000_000  # all files of a pattern
SHARES = (0.3, 0.6, 0.9, 1.1)
"""Cache sizes, as shares of the bytes that the pattern uses."""
TURN = 32  # blocks that a reader touches before the next reader of its stage continues
RATIO, PASS_SHARE = 1.05, 0.01

Runs = tuple[Int64s, Int64s]
"""First block and number of blocks of each run."""
Replay = Callable[[Int64s, Int64s], Int64s]
MakeCache = Callable[[int, int], Replay]
"""Creates a cache from a capacity and a number of ids, both in blocks; the cache returns the hits of each run."""


def passes_of(pattern: Pattern) -> tuple[list[Runs], int]:
    """Return the runs of each pass, with the files of the pattern concatenated, and the number of ids."""
    ends = [0] * len(pattern.files)
    for touch in chain.from_iterable(one for stage in pattern.stages for reader in stage.readers for one in reader.passes):
        ends[touch.file] = max(ends[touch.file], (touch.first_byte + touch.size_bytes) // PAGE)
    bases = np.cumsum([0, *ends])
    return [runs for stage in pattern.stages for runs in stage_runs(stage, bases)], int(bases[-1])


def stage_runs(stage: Stage, bases: Int64s) -> Iterator[Runs]:
    """Yield the runs of each pass; the readers alternate."""
    for passes in zip_longest(*(reader.passes for reader in stage.readers), fillvalue=()):
        turns = zip_longest(*(pass_runs(each, bases) for each in passes))
        runs = [run for turn in turns for run in turn if run is not None]
        first, count = np.array(runs, np.int64).reshape(-1, 2).T.copy()
        yield first, count


def pass_runs(touches: Pass, bases: Int64s) -> Iterator[tuple[int, int]]:
    for touch in touches:
        first = int(bases[touch.file]) + touch.first_byte // PAGE
        end = first + touch.size_bytes // PAGE
        yield from ((at, min(TURN, end - at)) for at in range(first, end, TURN))


def excesses(make: MakeCache, seeds: range) -> list[tuple[int, float, int, int]]:
    """Return seed, share, misses and allowed misses of each pattern and size where `make` exceeds what LRU allows."""
    found = []
    for seed in seeds:
        pattern = generate(seed, MOST_BYTES)
        passes, blocks = passes_of(pattern)
        for share in SHARES:
            capacity = max(1, int(share * pattern.used_bytes) // PAGE)
            ours, lru = (judged_misses(make_cache(capacity, blocks), passes) for make_cache in (make, policy("lru")))
            allowed = int(RATIO * lru + PASS_SHARE * pattern.loop_bytes / PAGE * (len(passes) - WARMUP))
            if ours > allowed:
                found.append((seed, share, ours, allowed))
    return found


def judged_misses(replay: Replay, passes: list[Runs]) -> int:
    """Return the misses after the first WARMUP passes."""
    misses = [int(count.sum() - replay(first, count).sum()) for first, count in passes]
    return sum(misses[WARMUP:])


def policy(name: str) -> MakeCache:
    return lambda capacity, blocks: policy_class(name)(capacity, blocks).replay


def test_llmcache_misses_hardly_more_than_lru_after_the_first_passes() -> None:
    assert excesses(policy("llmcache"), range(examples(PATTERNS))) == []
