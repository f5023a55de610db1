"""tools/bench/kvindex: its figures are what they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench import kvindexbench as bench
from tools.bench.bars import Bar
from tools.bench.kvindexkeys import CLUSTERS, DIM, clustered, gaussian

RESULTS = Path(__file__).parents[2] / "tools/bench/results/kvindex.json"


def row(kind: str, keys: int, **changes: Any) -> dict[str, Any]:
    seconds = {"scan": [8.0, 9.0, 99.0], "tree": [1.0, 2.0, 0.1], "exact": [9.0] * 2, "dci": [2.0] * 2, "auto": [2.2] * 2}
    times = {name: bench.spread(each) for name, each in seconds.items()}
    recall = {"tree": 0.95, "exact": 1.0, "dci": 0.95, "auto": 0.95}
    found = {"kind": kind, "keys": keys, "times": times, "recall": recall, "touched": 0.04}
    insert = bench.spread([1e-4, 5e-4, 9.0])
    return {**found, "build_cpu_s": [keys / 1e5, keys / 2e5, 1e9], "insert": insert, **changes}


def bars(one: dict[str, Any]) -> dict[str, Bar]:
    return {bar.name.rpartition(".")[2]: bar for bar in bench.bars({"rows": [one]})}


def test_bars_are_of_medians_and_in_turns() -> None:
    values = {name: (round(bar.value, 6), bar.passed) for name, bar in bars(row("clustered", 65536)).items()}
    assert values == {
        "auto": (1.1, True),
        "recall": (0.95, True),
        "touched": (0.04, True),
        "build": (200000.0, True),
        "faster": (9.0, True),
    }
    largest = bars(row("clustered", 262144))
    assert not largest["faster"].passed and largest["insert"].value == 0.5


def test_auto_is_compared_with_those_that_find_enough() -> None:
    poor = row("gaussian", 65536, recall={"tree": 0.1, "exact": 1.0, "dci": 0.1, "auto": 1.0})
    (only,) = bars(poor).values()
    assert only.value == pytest.approx(2.2 / 9.0) and only.passed
    (slow,) = bars({**poor, "times": {**poor["times"], "auto": bench.spread([11.0] * 2)}}).values()
    assert not slow.passed


def test_keys_are_what_they_are_called() -> None:
    found = clustered(4096, 32, 16, 1)
    assert [one.shape for one in found] == [(4096, DIM), (32, DIM), (16, DIM)]
    assert (clustered(64, 0, 2, 1).keys == clustered(64, 0, 2, 1).keys).all()
    near = np.sort(((found.keys[:64, None] - found.keys[None]) ** 2).sum(-1), axis=1)[:, 1]
    apart = np.sort(((gaussian(4096, 0, 0, 1).keys[:64, None] - gaussian(4096, 0, 0, 2).keys[None]) ** 2).sum(-1), axis=1)
    assert np.median(near) < 0.5 * np.median(apart[:, 0]) and CLUSTERS == 256


def test_a_quick_run_writes_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SIZES", (8192, 65536))
    monkeypatch.setattr(bench, "QUERIES", 32)
    monkeypatch.setattr(bench, "PAGES", 4)
    path = tmp_path / "kvindex.json"
    code = bench.main(["--quick", "--rounds", "1", "--json", str(path)])
    told = json.loads(path.read_text())
    assert told["schema"] == bench.SCHEMA and told["settings"]["seed"] == 0
    assert [(one["kind"], one["keys"]) for one in told["rows"]] == [
        ("clustered", 1024), ("clustered", 8192), ("gaussian", 1024), ("gaussian", 8192)
    ]  # fmt: skip
    for one in told["rows"]:
        assert {times["runs"] for times in one["times"].values()} == {32} and one["insert"]["runs"] == 4
        assert {one["recall"][name] for name in ("exact", "scan", "scan side by side")} == {1.0}
        assert sum(one["levels"]) == one["keys"]
        assert one["auto"]["why"].startswith(one["auto"]["uses"])
    assert 0 < told["grown"]["recall_grown"] <= 1
    assert [bar.to_json() for bar in bench.bars(told)] == told["bars"]
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1)
    assert "bars" in capsys.readouterr().out


def test_the_results_in_the_tree_are_of_this_benchmark() -> None:
    told = json.loads(RESULTS.read_text())
    assert (told["schema"], told["dim"], told["k"], told["heads"]) == (bench.SCHEMA, DIM, bench.K, bench.HEADS)
    kinds = [(one["kind"], one["keys"]) for one in told["rows"]]
    assert kinds == [(kind, size) for kind in ("clustered", "gaussian") for size in bench.SIZES]
    assert [bar.to_json() for bar in bench.bars(told)] == told["bars"]
    assert min(one["recall"]["dci"] for one in told["rows"] if one["kind"] == "clustered") >= bench.RECALL
    assert max(one["recall"]["dci"] for one in told["rows"] if one["kind"] == "gaussian") < 0.5, "where it loses"
