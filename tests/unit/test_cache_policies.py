"""Single policies: Algorithm 1 as printed, LeCaR against its authors' program, and the limits of Belady's exactness."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.arrays import Int64s
from llmcache.cache.plan import GAPS, why_not_exact
from llmcache.cache.policies import POLICIES, base, lru, policy_class, structures
from llmcache.cache.policies.base import kernel, report_compiling
from llmcache.errors import MissingRequirement
from llmcache.papers.algorithm1 import Algorithm1
from llmcache.trace.record import Provenance
from tests.conftest import examples
from tests.property.yardstick import below, hits

SEQ, LOOP, HOT = "SEQ", "LOOP", "HOT"


@dataclass(eq=False)
class Sequence:
    """A block sequence: its class, its creation and classification times, and the period of a LOOP."""

    kind: str
    made: int
    classified: int
    period: int = 0


class PlainAlgorithm1:
    """Access and Evict as printed, with our answers to the open questions G1-G7."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hot_limit = max(1, capacity // 10)  # G1
        self.sequence_of: dict[int, Sequence] = {}  # G3: never deleted; G4: one sequence per block
        self.last: dict[int, int] = {}
        self.resident: set[int] = set()
        self.previous: int | None = None
        self.time = 0

    def hits(self, ids: Iterable[int]) -> int:
        """Return how many of the references are hits."""
        return sum(self.get(block) for block in ids)

    def get(self, block: int) -> bool:
        """Return whether `block` was resident."""
        self.time += 1
        self._classify(block)
        self.last[block] = self.time
        self.previous = block
        if block in self.resident:
            return True
        if len(self.resident) == self.capacity:
            self.resident.remove(self._victim())  # G7
        self.resident.add(block)
        return False

    def _classify(self, block: int) -> None:
        own = self.sequence_of.get(block)
        if self.previous is not None and self.previous == block - 1:
            joined = self.sequence_of[self.previous]
            self.sequence_of[block] = joined
            if joined.kind == HOT:
                joined.kind, joined.classified = SEQ, self.time
        elif own is None:
            self.sequence_of[block] = Sequence(HOT, self.time, self.time)
        elif own.kind != HOT:
            self.sequence_of[block] = Sequence(LOOP, self.time, self.time, self.time - self.last[block])  # G2

    def _victim(self) -> int:
        held: dict[str, list[int]] = {SEQ: [], LOOP: [], HOT: []}
        for block in self.resident:
            held[self.sequence_of[block].kind].append(block)
        if held[SEQ]:
            return self._highest(
                held[SEQ], min((self.sequence_of[block] for block in held[SEQ]), key=lambda s: s.classified)
            )
        if len(held[HOT]) >= self.hot_limit or not held[LOOP]:  # G5
            return min(held[HOT], key=lambda block: self.last[block])
        longest = max((self.sequence_of[block] for block in held[LOOP]), key=lambda s: (s.period, -s.made))  # G6
        return self._highest(held[LOOP], longest)

    def _highest(self, blocks: list[int], sequence: Sequence) -> int:
        return max(block for block in blocks if self.sequence_of[block] is sequence)


RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=60)


def loop(first: int, blocks: int, passes: int = 1) -> Int64s:
    return np.tile(np.arange(first, first + blocks), passes)


@settings(max_examples=examples(150), deadline=None)
@given(RUNS, st.integers(1, 45))
def test_runs_have_the_hits_of_the_reference_implementation(runs: list[tuple[int, int]], capacity: int) -> None:
    first, count = np.array(runs, np.int64).T
    cache, plain = Algorithm1(capacity, 50), PlainAlgorithm1(capacity)
    expected = [plain.hits(range(start, start + length)) for start, length in runs]
    assert cache.replay(first, count).tolist() == expected
    assert set(cache.resident().tolist()) == plain.resident


PROMPTS = [np.concatenate([loop(10000 + 100 * turn, 100, 2), loop(0, 200)]) for turn in range(100)]
LONG_AND_SHORT = [np.concatenate([loop(0, 100, 5), loop(2000, 1000)]) for _ in range(30)]
HOT_AMONG_LOOP = [
    np.insert(loop(0, 1000), np.sort(below(1000, turn, 100)), 9000 + below(50, 20 + turn, 100)) for turn in range(20)
]
# Block ids, the capacity, and the hit ratios of Algorithm 1, LRU and Belady.
RATIOS: dict[str, tuple[Int64s, int, tuple[float, float, float]]] = {
    "a clean loop has nearly the optimal hit ratio": (loop(0, 1000, 20), 500, (0.474, 0, 0.475)),
    "a scan before the loop is evicted at once": (np.append(loop(5000, 2000), loop(0, 1000, 20)), 500, (0.431, 0, 0.432)),
    # A0 B0 A1 B1: no access follows its predecessor block, so nothing ever becomes SEQ or LOOP.
    "two loops read in lock step": (
        np.tile(np.stack([loop(0, 1000), loop(5000, 1000)], 1).ravel(), 20),
        1000,
        (0, 0, 0.475),
    ),
    # Adjacency means one block upwards.
    "a descending loop": (np.tile(np.arange(999, -1, -1), 20), 500, (0, 0, 0.475)),
    "a strided loop": (np.tile(np.arange(0, 2000, 2), 20), 500, (0, 0, 0.475)),
    # Model A loops over 400 blocks, then model B over 1000: A's shorter period keeps its dead blocks in the cache.
    "an old loop never expires": (np.append(loop(0, 400, 20), loop(5000, 1000, 40)), 450, (0.198, 0.158, 0.524)),
    # Prompts are written and read back once. The first three fill the cache as loops of period 100 and are never evicted.
    # Later blocks are SEQ when first touched, and evict each other.
    "one reread makes a permanent loop": (np.concatenate(PROMPTS), 320, (0.0085, 0.745, 0.745)),
    "short periods are evicted before long ones": (np.concatenate(LONG_AND_SHORT), 400, (0.524, 0.267, 0.524)),
    # Hot references split the loop, and each piece gets its own period, rank and eviction.
    "fragments of a loop get periods of their own": (np.concatenate(HOT_AMONG_LOOP), 500, (0.315, 0.054, 0.483)),
    # Blocks requested four times in a row (1 KiB requests) become loops of period 1, which are never evicted.
    "a repeated block turns a scan into a loop": (
        np.concatenate([np.repeat(np.arange(10000, 12000), 4), loop(0, 1000, 20)]),
        500,
        (0.214, 0.214, 0.554),
    ),
}


@pytest.mark.parametrize("case", RATIOS)
def test_hit_ratios_of_the_printed_algorithm(case: str) -> None:
    ids, capacity, expected = RATIOS[case]
    ratios = [hits(policy, ids, capacity) / len(ids) for policy in ("algorithm1", "lru", "belady")]
    assert ratios == pytest.approx(expected, abs=1e-3)


def test_belady_is_not_exact_on_incomplete_traces() -> None:
    assert why_not_exact(Provenance("synthetic")) is None
    assert why_not_exact(Provenance("mount", lost_events=3)) == "lost_events is 3: accesses are missing from the trace"
    unseen = Provenance("filemap", extra={"unseen": "touches of mapped pages"})
    assert why_not_exact(unseen) == "unseen: touches of mapped pages"
    for gap, meaning in GAPS.items():
        assert why_not_exact(Provenance("strace", extra={gap: "12"})) == f"{gap} is 12: {meaning}"


@pytest.mark.parametrize("name", POLICIES)
def test_memory_of_a_policy_does_not_grow_with_the_capacity(name: str) -> None:
    policy = policy_class(name)(1 << 45, 8)
    assert policy.replay(np.zeros(3, np.int64), np.full(3, 8, np.int64)).tolist() == [0, 8, 8]


# Compiled kernels


def test_cached_kernels_are_named_after_the_sources_that_they_share(tmp_path: Path) -> None:
    """numba compares only the file of the kernel itself: a change of `structures.py` must give another name."""
    shared = {os.path.normpath(Path(base.__file__).parent / name) for name in base._SHARED}
    for name in {"llmcache.cache.curves", *(place.partition(":")[0] for place in POLICIES.values())}:
        functions = [value for value in vars(importlib.import_module(name)).values() if inspect.isfunction(value)]
        imported = {inspect.getfile(one) for one in functions if one.__module__ != name}
        assert {file for file in imported if "/cache/" in file} <= shared, name
    assert lru._lru.py_func.__qualname__ == f"_lru-{base._VERSION}"  # type: ignore[attr-defined]
    changed = tmp_path / "structures.py"
    changed.write_bytes(Path(structures.__file__).read_bytes() + b"\n")
    assert base._version_of([str(changed)]) != base._version_of([structures.__file__])


def test_compilation_is_reported_at_start_and_end() -> None:
    part: Callable[[float], float] = numba.njit(lambda value: value + 1)
    whole: Callable[[int], int] = numba.njit(lambda value: 2 * part(value))
    reports: list[bool] = []
    with report_compiling(reports.append):
        assert whole(1) == whole(2) - 2 == 4
    part(1.0)
    assert reports == [True, False]


def test_a_kernel_without_a_cache_directory_hints_at_numba_cache_dir() -> None:
    known: dict[str, Callable[[], None]] = {}
    exec("def loop():\n    return", known)  # numba cannot cache a function that has no source file
    with pytest.raises(MissingRequirement) as raised:
        kernel(known["loop"])
    assert "NUMBA_CACHE_DIR" in str(raised.value.hint)
