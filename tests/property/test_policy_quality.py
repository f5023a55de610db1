"""How good llmcache's policy is, on traces that are the same everywhere."""

from __future__ import annotations

import pytest

from llmcache.cache.plan import AUTO
from tools.bench.policies import OURS, Ratios, bars, groups, ratios_of

RIVALS = ("lru", "belady")


@pytest.fixture(scope="module")
def ratios() -> Ratios:
    """Over every other size of those that the benchmark has: the largest, the whole footprint, is everybody's."""
    return ratios_of((*RIVALS, OURS), sizes=AUTO[::2])


@pytest.mark.long
def test_every_bar_is_reached(ratios: Ratios) -> None:
    missed = [bar for bar in bars({"ratios": ratios, "groups": groups(ratios)}) if not bar.passed]
    assert not missed
