"""tools/bench/kv: its figures are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.kvbench import DIM, SCHEMA, SCORING_BAR, SPILLED, TOKENS, TOP_BAR, Case, bars, document, main

RESULTS = Path(__file__).parents[2] / "tools/bench/results/kv.json"


def test_figures_are_ratios_of_medians() -> None:
    cases = [
        Case("read float16", lambda: None, 8_000, None, [2.0, 1.0, 9.0]),
        Case("score float16, 1 a head", lambda: None, 8_000, 0.5, [3.0, 4.0, 5.0]),
        Case("top 256", lambda: None, 8_000, 0.2, [0.5, 0.6, 0.4]),
    ]
    spill = {"tokens": 64, "fetch": {"request_bytes": 1, "figure": 0.79}, "memory": {"peak_bytes": 1 << 30}}
    spill["device"] = {"figure": 0.02}

    def passed() -> dict[str, bool]:
        return {bar.name: bar.passed for bar in bars({**document(cases, 64, {}), "spill": spill})}

    read, scoring, choosing = document(cases, 64, {})["cases"]
    assert (read["figure"], read["bytes_per_s"]) == (1.0, 4_000.0)
    assert scoring["figure"] == 0.5 and choosing["figure"] == 0.125 and choosing["bytes_per_s"] is None
    of_spill = {"fetch": False, "memory": True, "link": True}
    assert passed() == {"score float16, 1 a head": True, "top 256": True, **of_spill}
    cases[1].seconds, cases[2].seconds = [4.1], [0.9]
    assert passed() == {"score float16, 1 a head": False, "top 256": False, **of_spill}


def test_a_quick_run_writes_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.json"
    code = main(["--quick", "--repeat", "2", "--json", str(path), "--dir", str(tmp_path)])
    told = json.loads(path.read_text())
    assert told["schema"] == SCHEMA and told["tokens"] == 4096
    assert all(len(row["seconds"]) == 2 for row in told["cases"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["kv.json"], "the scratch directory is gone"
    spilled = told["spill"]
    assert spilled["device"]["emulated"]
    assert spilled["device"]["scored_keys"] == 8 * spilled["tokens"] == 8 << 16
    passed = {bar["name"]: bar["passed"] for bar in told["bars"]}
    assert len(passed) == 6 and passed["memory"] and passed["link"] and code == (0 if all(passed.values()) else 1)
    assert "top 20%" in capsys.readouterr().out


def test_the_results_in_the_tree_are_of_this_benchmark() -> None:
    told = json.loads(RESULTS.read_text())
    assert (told["schema"], told["tokens"], told["dim"], told["spill"]["tokens"]) == (SCHEMA, TOKENS, DIM, SPILLED)
    barred = {row["case"]: row["bar"] for row in told["cases"] if "bar" in row}
    assert barred == {"score float16, 1 a head": SCORING_BAR, "top 256": TOP_BAR, "top 20%": TOP_BAR}
    assert [bar.to_json() for bar in bars(told)] == told["bars"]
