"""tools/bench/kvanswers: its bars follow from the answers, and contexts that are asked apart give the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.task_parts import of_policies
from tools.bench import kvanswersbench as bench
from tools.bench import results

RECORDED = results.DIRECTORY / "kvanswers.json"


@pytest.mark.parametrize(("rival", "lead"), [(5, 0.5), (10, 0.0)])
def test_the_lead_is_over_the_best_rival(rival: int, lead: float) -> None:
    found = bench.rivals(of_policies(10, rival).document()["rows"])
    (bar,) = bench.bars({"parts": {"rivals": found}})
    assert found["figure"] == lead and bar.passed == (lead > 0)


def test_the_set_up_is_by_context() -> None:
    (passkey, recall) = bench.asked(quick=False)
    setups = recall.setups(Path("/x"))
    assert [setup.contexts for setup in setups] == [(1024,), (2048,), (4096,)]
    assert {(setup.cases, setup.budgets, setup.threads) for setup in setups} == {(16, bench.BUDGETS, 1)}
    assert set(bench.RIVALS) < set(recall.policies) and passkey.policies == ("icecache",)


def test_what_is_recorded_was_no_quick_look_and_names_no_place_of_the_machine() -> None:
    told = results.read(RECORDED)
    assert told["schema"] == bench.SCHEMA and told["quick"] is False
    assert [bar.to_json() for bar in bench.bars(told)] == told["bars"] and len(told["bars"]) == len(bench.BARS)
    for part in ("passkey", "recall"):
        conditions = told["parts"][part]["run"]["conditions"]
        assert conditions["model"] == "llmcache/kv/tasks/models/recall" and "spill files" not in conditions
        assert conditions["contexts"] == list(bench.CONTEXTS)
    assert bench.rivals(told["parts"]["recall"]["run"]["rows"]) == told["parts"]["rivals"]
