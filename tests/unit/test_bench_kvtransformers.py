"""The bars of tools/bench/kvtransformers follow from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.task_results import STOCK, Memory
from tests.unit.task_parts import of_policies, speed
from tools.bench import kvtransformersbench as bench

RECORDED = Path(__file__).resolve().parents[2] / "tools" / "bench" / "results" / "kvtransformers.json"


def rows(own_ms: float, kv: int) -> list[LengthRow]:
    return [
        LengthRow(tokens, policy, policy, speed(10 if policy == STOCK else own_ms), memory, {})
        for tokens in (16384, 32768)
        for policy, memory in [(STOCK, Memory(1000, 0)), *((name, Memory(kv, 100)) for name in bench.TIMED)]
    ]


@pytest.mark.parametrize(
    ("own_ms", "kv", "passed"), [(9, 50, "mtf"), (14, 50, "mt"), (16, 50, "m"), (9, 51, "tf"), (16, 51, "")]
)
def test_memory_and_time_have_bars_of_their_own(own_ms: float, kv: int, passed: str) -> None:
    parts = bench.against_stock(rows(own_ms, kv))
    assert "".join(name[0] for name, part in parts.items() if part["passed"]) == passed
    assert "with index: icecache" in parts["memory"]["what"]
    assert parts["faster"]["by_policy"]["quest"] == (16384 if own_ms < 10 else None)


@pytest.mark.parametrize(("rival", "lead"), [(5, 0.5), (10, 0.0)])
def test_the_lead_is_over_the_best_rival(rival: int, lead: float) -> None:
    found = bench.rivals({"run": of_policies(10, rival).document()})
    assert found["figure"] == lead and found["passed"] == (lead > 0)


def test_what_is_recorded_was_no_quick_look() -> None:
    told = json.loads(RECORDED.read_text())
    assert told["schema"] == bench.SCHEMA and told["quick"] is False and told["shape"]["head_dim"] == 128
    for part in told["parts"].values():
        holds = {">=": part["figure"] >= part["bar"], "<=": part["figure"] <= part["bar"], ">": part["figure"] > part["bar"]}
        assert part["passed"] == holds[part["sense"]]
