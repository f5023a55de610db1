"""What policies are made of: how much memory it takes, what the sketch counts, and what is compiled when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from llmcache.cache.policies import structures
from llmcache.cache.policies.base import kernel, told_compiling
from llmcache.cache.policies.structures import MOST, SAMPLE, estimate, new_sketch, note
from llmcache.errors import EnvironmentProblem


def test_links_take_eight_bytes_per_block() -> None:
    assert structures.new_links(1000, 1).nbytes == 8 * 1001


def test_timeset_takes_a_bit_per_time() -> None:
    words = structures.new_timeset(1_000_000).words
    assert words.nbytes < 1.04 * 1_000_000 / 8


def test_the_sketch_counts_up_to_sixteen() -> None:
    sketch = new_sketch(100)
    for times in range(1, 30):
        note(sketch, 5)
        assert estimate(sketch, 5) == min(times, MOST + 1)  # the doorkeeper knows one more
    assert estimate(sketch, 6) == 0


def test_the_sketch_is_never_too_low_and_seldom_too_high() -> None:
    sketch = new_sketch(1000)
    ids = (3000 * np.random.default_rng(3).random(SAMPLE * 1000 - 1) ** 2).astype(np.int64)
    for block in ids.tolist():
        note(sketch, block)
    true = Counter(ids.tolist())
    above = [estimate(sketch, block) - min(true[block], MOST + 1) for block in range(3000)]
    assert min(above) >= 0
    assert sum(value > 0 for value in above) < 0.05 * len(above)


def test_a_full_sample_halves_the_counts_and_empties_the_doorkeeper() -> None:
    sketch = new_sketch(10)
    for _ in range(9):
        note(sketch, 1)
    for _ in range(SAMPLE * 10 - 10):
        note(sketch, 2)
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (9, 16)
    note(sketch, 2)
    assert sketch.sample[0] == 0
    assert not sketch.door.any()
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (4, 7)


def test_parts_are_compiled_only_within_the_policies_that_call_them() -> None:
    compiled = [name for name, value in vars(structures).items() if isinstance(value, Dispatcher)]
    assert compiled == ["note", "estimate"]


def test_it_is_told_when_something_is_compiled_and_when_that_is_done() -> None:
    part: Callable[[float], float] = numba.njit(lambda value: value + 1)
    whole: Callable[[int], int] = numba.njit(lambda value: 2 * part(value))
    told: list[bool] = []
    with told_compiling(told.append):
        assert whole(1) == whole(2) - 2 == 4
    part(1.0)
    assert told == [True, False]


def test_a_kernel_that_can_be_kept_nowhere_names_the_cure() -> None:
    known: dict[str, Callable[[], None]] = {}
    exec("def loop():\n    return", known)  # has no file to be kept beside, nor one to be found again by
    with pytest.raises(EnvironmentProblem) as raised:
        kernel(known["loop"])
    assert "NUMBA_CACHE_DIR" in str(raised.value.hint)
