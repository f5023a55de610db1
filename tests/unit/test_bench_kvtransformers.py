"""The bars of tools/bench/kvtransformers follow from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.results import STOCK, Memory
from tests.unit.task_parts import speed
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
    assert "".join(bar.name[0] for bar in bench.bars({"parts": parts}) if bar.passed) == passed
    assert "icecache 15.0%" in parts["memory_with_index"]["what"] or kv != 50
    assert parts["faster"]["by_policy"]["quest"] == (16384 if own_ms < 10 else None)


def test_what_is_recorded_was_no_quick_look() -> None:
    told = json.loads(RECORDED.read_text())
    assert told["schema"] == bench.SCHEMA and told["quick"] is False and told["shape"]["head_dim"] == 128
    assert [bar.to_json() for bar in bench.bars(told)] == told["bars"] and len(told["bars"]) == len(bench.BARS)
