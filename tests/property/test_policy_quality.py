"""How good llmcache's policy is, on traces that are the same everywhere."""

from __future__ import annotations

import pytest

from tools.bench.policies import OURS, Ratios, bars, groups, ratios_of

RIVALS = ("lru", "belady")


@pytest.fixture(scope="module")
def ratios() -> Ratios:
    return ratios_of((*RIVALS, OURS))


def test_every_bar_is_reached(ratios: Ratios) -> None:
    missed = [bar for bar in bars({"ratios": ratios, "groups": groups(ratios)}) if not bar.passed]
    assert not missed
