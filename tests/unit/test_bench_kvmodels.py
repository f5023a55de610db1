"""tools/bench/kvmodels: what its bars are made of, from made-up answers and losses; every part of it has a bar."""

from __future__ import annotations

import numpy as np
import pytest

from llmcache.errors import DataError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate, Told
from tools.bench import kvmodelsbench as bench


def losses(own: list[float], mass: list[float], product: list[float]) -> dict[Candidate, Told]:
    """Return losses above those of the full cache, which has 3 for every text."""
    given = {bench.OWN: own, "oracle": mass, "oracle-product": product}
    told = {Candidate(policy, 64): Told(losses=[3 + one for one in above]) for policy, above in given.items()}
    return told | {Candidate(STOCK, None): Told(losses=[3.0] * len(own))}


def test_the_loss_is_compared_with_the_better_oracle_beyond_its_error() -> None:
    assert bench.excess(losses([0.11] * 3, [0.1] * 3, [0.2] * 3), 64) == pytest.approx(0)
    assert bench.excess(losses([0.21] * 3, [0.4] * 3, [0.1] * 3), 64) == pytest.approx(0.1)
    noisy = bench.excess(losses([0.0, 0.4], [0.1, 0.1], [0.2] * 2), 64)
    assert noisy == pytest.approx(0.2 - 0.11 - 0.2), "a mean of .2 with an error of .2"
    assert bench.excess(losses([0.21], [0.1], [0.1]), 64) == pytest.approx(0.1), "of one text no error is known"


def answers(own: list[bool], full: list[bool]) -> dict[Candidate, Told]:
    told = {Candidate(bench.OWN, 64): Told(), Candidate(STOCK, None): Told()}
    right = {one: np.array([own if one.budget else full]) for one in told}
    for one, seen in told.items():
        seen.add(right[one], np.array([full]), None)
    return told


def test_answers_count_where_the_full_cache_has_most_of_them() -> None:
    hard = answers([True, False, False, False], [True, False, False, False])
    easy = answers([True, True, False, True], [True, True, True, False])
    assert bench.kept([hard, easy], 64) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="answers most of none"):
        bench.kept([hard], 64)


def test_every_bar_is_of_a_part() -> None:
    assert {name.split(".")[0] for name in bench.BARS} - {"bytes"} == set(bench.PARTS)
    told = {"parts": {name: {"what": name, "figure": limit} for name, (_, limit) in bench.BARS.items()}}
    assert [bar.name for bar in bench.bars(told) if not bar.passed] == ["time.long"], "it has to be faster, not as fast"
