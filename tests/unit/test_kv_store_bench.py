"""tools/bench/kvstore: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.kv_store import FETCH_BAR, MEMORY_BAR, SCHEMA, SHAPE, TOKENS, bars, main

RESULTS = Path(__file__).parents[2] / "tools/bench/results/kvstore.json"


def test_a_quick_run_writes_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    code = main(["--quick", "--rounds", "2", "--json", str(path), "--dir", str(tmp_path)])
    told = json.loads(path.read_text())
    assert told["schema"] == SCHEMA and told["tokens"] == TOKENS // 16 and told["machine"]
    assert told["prefill"]["kv_bytes"] == told["tokens"] * SHAPE.token_bytes
    fetch, memory = told["fetch"], told["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert [(bar["value"], bar["limit"]) for bar in told["bars"]] == [
        (fetch["figure"], FETCH_BAR), (memory["peak_bytes"] / 2**20, MEMORY_BAR / 2**20)
    ]  # fmt: skip
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["store.json"], "the scratch directory is gone"
    assert "GB/s" in capsys.readouterr().out


def test_the_results_in_the_tree_are_of_this_benchmark() -> None:
    told = json.loads(RESULTS.read_text())
    assert (told["schema"], told["tokens"]) == (SCHEMA, TOKENS)
    assert [bar.to_json() for bar in bars(told)] == told["bars"]
