"""tools/bench/kvpipeline: its figures are what they are called, and those in the tree are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmcache.kv.bench.results import Row, read_bench
from llmcache.kv.bench.synthetic import Setup, fixed
from llmcache.kv.workload import StreamSpec
from tools.bench.kvpipelinebench import (
    FACTORS,
    IDLE_BAR,
    LIMITS,
    PARTS,
    SCHEMA,
    bars,
    modelled_idle,
    relative_times,
    table,
    to_hide_ns,
)

RESULTS = Path(__file__).parents[2] / "tools/bench/results/kvpipeline.json"
SETUP = Setup(StreamSpec(layers=4, kv_heads=1, heads=1, head_dim=16, context=64), fixed(1), Path("/"))


def row(evaluate: float, fetch: float, compute: float) -> Row:
    stages = {"evaluate": evaluate, "fetch": fetch, "update": 0.0, "compute": compute}
    return Row("hillinfer", "HillInfer", sum(stages.values()), stages, 0, 0, {}, None)


def test_the_model_of_the_pipeline_lets_only_the_first_layer_wait_where_computing_takes_longer() -> None:
    hidden = row(40, 20, 80)  # by layer: 15 to hide, 20 to compute
    assert to_hide_ns(hidden, SETUP) == 15
    assert modelled_idle(hidden, SETUP) == pytest.approx(1 - 80 / (15 + 80))
    longer = row(100, 60, 80)  # 40 to hide
    assert modelled_idle(longer, SETUP) == pytest.approx(1 - 80 / (40 + 20 + 3 * 40))


def test_what_slows_one_step_of_all_runs_does_not_count() -> None:
    quiet = relative_times([[10, 10, 10], [20, 20, 20]])
    assert quiet == pytest.approx([2 / 3, 4 / 3]) == relative_times([[10, 90, 10], [20, 180, 20]])


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def test_the_results_in_the_tree_are_of_this_benchmark(told: dict[str, Any]) -> None:
    assert told["schema"] == SCHEMA and not told["quick"] and told["machine"]["cpus"]
    assert list(told["parts"]) == list(PARTS)
    assert [bar.to_json() for bar in bars(told)] == told["bars"]
    for bar in told["bars"]:
        assert bar["limit"] == LIMITS[bar["name"]] and bar["kind"] == "emulated", bar
    assert table(told["parts"]).row_count == len(PARTS)


def test_an_idle_share_that_cannot_be_hidden_reaches_no_bar(told: dict[str, Any]) -> None:
    idle = {**told["parts"]["idle"], "applies": False}
    (bar,) = bars({"parts": {"idle": idle}})
    assert not bar.passed and bar.to_json()["value"] is None


def test_the_figures_in_the_tree_follow_from_the_runs_beside_them(told: dict[str, Any]) -> None:
    idle, ping_pong, link, beta = (told["parts"][name] for name in ("idle", "ping_pong", "link", "beta"))
    ahead, without = read_bench(idle["run"], "idle").rows
    assert (idle["figure"], idle["without"]) == (ahead.idle_share, without.idle_share)
    assert idle["applies"] == (idle["modelled"] <= IDLE_BAR), "whether the model says that it can be hidden"
    shares = [row["observed"]["ping_pong_share"] for row in ping_pong["run"]["rows"]]
    assert shares == [ping_pong["figure"], ping_pong["without"]] and min(ping_pong["pages_up"]) > 0
    assert link["figure"] == link["device_bytes"] / link["host_bytes"]
    relative = relative_times([row["observed"]["steps_ns"] for row in beta["run"]["rows"]])
    assert relative == pytest.approx(beta["relative"], rel=1e-4)
    assert abs(relative.index(min(relative)) - FACTORS.index(1)) == beta["figure"]
    assert beta["betas"] == pytest.approx([beta["rule"] * factor for factor in FACTORS], rel=0.05)
    for part in (idle, ping_pong, beta):
        assert part["run"]["kind"] == "measured" and part["run"]["conditions"]["stream"]["synthetic"]
