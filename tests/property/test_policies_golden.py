"""Hit counts stay what they were, trace by trace and size by size, also where libCacheSim is not to be had."""

from __future__ import annotations

import json

import pytest

from tests.property.golden import PATH, POLICIES, hits
from tests.property.yardstick import traces

GOLDEN: dict[str, dict[str, dict[str, int]]] = json.loads(PATH.read_text())


def test_every_policy_and_trace_has_golden_counts() -> None:
    assert set(GOLDEN) == set(POLICIES)
    assert all(set(counts) == set(traces()) for counts in GOLDEN.values())


@pytest.mark.parametrize(("name", "trace"), [(name, trace) for name in GOLDEN for trace in GOLDEN[name]])
def test_hits_are_the_golden_ones(name: str, trace: str) -> None:
    assert hits(name, trace) == GOLDEN[name][trace]
