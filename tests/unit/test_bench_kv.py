"""The benchmarks of the KV manager: their bars follow from what was measured, and a quick run leaves its JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import DataError
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.results import STOCK, KvMemory, Row
from llmcache.kv.bench.synthetic import Setup, fixed
from llmcache.kv.bench.task import Candidate, Told
from llmcache.kv.workload import StreamSpec
from tests.unit.task_parts import of_policies, speed
from tools.bench import kv, kvanswers, kvindex, kvmodels, kvpipeline, kvstore, kvtransformers, results
from tools.bench.clients.spill_file import SHAPE
from tools.bench.harness import bars_of, run


def quick_run(bench: Any, path: Path, *words: str) -> Any:
    code = run(bench, ["--quick", *words, "--json", str(path)])
    told = json.loads(path.read_text())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "the scratch directory is gone"
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1) and told["schema"] == bench.SCHEMA
    return told


# kv, kvstore


def test_a_quick_run_of_kernels_and_spill_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = quick_run(kv, tmp_path / "kv.json", "--repeat", "2", "--dir", str(tmp_path))
    assert told["tokens"] == 4096 and all(len(row["seconds"]) == 2 for row in told["cases"])
    assert told["spill"]["device"]["emulated"]
    assert told["spill"]["device"]["scored_keys"] == 8 * told["spill"]["tokens"] == 8 << 16
    passed = {bar["name"]: bar["passed"] for bar in told["bars"]}
    assert len(passed) == 6 and passed["memory"] and passed["link"] and "top 20%" in capsys.readouterr().out


def test_a_quick_run_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = quick_run(kvstore, tmp_path / "store.json", "--rounds", "2", "--dir", str(tmp_path))
    assert told["tokens"] == kvstore.TOKENS // 16
    assert told["prefill"]["kv_bytes"] == told["tokens"] * SHAPE.token_bytes
    fetch, memory = told["fetch"], told["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert [bar["value"] for bar in told["bars"]] == [fetch["figure"], memory["peak_bytes"] / 2**20]
    assert "GB/s" in capsys.readouterr().out


# kvindex


def test_a_quick_run_of_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvindex, "SIZES", (8192, 65536))
    monkeypatch.setattr(kvindex, "QUERIES", 32)
    monkeypatch.setattr(kvindex, "PAGES", 4)
    told = quick_run(kvindex, tmp_path / "kvindex.json", "--rounds", "1")
    assert [(one["kind"], one["keys"]) for one in told["rows"]] == [
        ("clustered", 1024), ("clustered", 8192), ("gaussian", 1024), ("gaussian", 8192)
    ]  # fmt: skip
    for one in told["rows"]:
        assert {times["runs"] for times in one["times"].values()} == {32} and one["insert"]["runs"] == 4
        assert {one["recall"][name] for name in ("exact", "scan", "scan side by side")} == {1.0}
        assert sum(one["levels"]) == one["keys"]
        assert one["auto"]["why"].startswith(one["auto"]["uses"])
    assert 0 < told["grown"]["recall_grown"] <= 1


# kvpipeline

SETUP = Setup(StreamSpec(layers=4, kv_heads=1, heads=1, head_dim=16, context=64), fixed(1), Path("/"))


def stages(evaluate: float, fetch: float, compute: float) -> Row:
    taken = {"evaluate": evaluate, "fetch": fetch, "update": 0.0, "compute": compute}
    return Row("hillinfer", "HillInfer", sum(taken.values()), taken, 0, 0, {}, None)


def test_the_model_of_the_pipeline_lets_only_the_first_layer_wait_where_computing_takes_longer() -> None:
    hidden = stages(40, 20, 80)  # by layer: 15 to hide, 20 to compute
    assert kvpipeline.to_hide_ns(hidden, SETUP) == 15
    assert kvpipeline.modelled_idle(hidden, SETUP) == pytest.approx(1 - 80 / (15 + 80))
    longer = stages(100, 60, 80)  # 40 to hide
    assert kvpipeline.modelled_idle(longer, SETUP) == pytest.approx(1 - 80 / (40 + 20 + 3 * 40))


def test_an_idle_share_that_cannot_be_hidden_reaches_no_bar() -> None:
    told = results.read(results.DIRECTORY / "kvpipeline.json")
    (bar,) = kvpipeline.bars({"parts": {"idle": {**told["parts"]["idle"], "applies": False}}})
    assert not bar.passed and bar.to_json()["value"] is None


# kvanswers, kvtransformers


@pytest.mark.parametrize(("rival", "lead"), [(5, 0.5), (10, 0.0)])
def test_the_lead_is_over_the_best_rival(rival: int, lead: float) -> None:
    found = kvanswers.rivals(of_policies(10, rival).document()["rows"])
    (bar,) = bars_of(kvanswers, {"parts": {"rivals": found}})
    assert found["figure"] == lead and bar.passed == (lead > 0)


@pytest.mark.parametrize(
    ("own_ms", "kv_bytes", "passed"), [(9, 50, "mtf"), (14, 50, "mt"), (16, 50, "m"), (9, 51, "tf"), (16, 51, "")]
)
def test_memory_and_time_have_bars_of_their_own(own_ms: float, kv_bytes: int, passed: str) -> None:
    rows = [
        LengthRow(tokens, policy, policy, speed(10 if policy == STOCK else own_ms), memory, {})
        for tokens in (16384, 32768)
        for policy, memory in [
            (STOCK, KvMemory(1000, 0)),
            *((name, KvMemory(kv_bytes, 100)) for name in kvtransformers.TIMED),
        ]
    ]
    parts = kvtransformers.against_stock(rows)
    assert "".join(bar.name[0] for bar in bars_of(kvtransformers, {"parts": parts}) if bar.passed) == passed
    assert "icecache 15.0%" in parts["memory_with_index"]["what"] or kv_bytes != 50
    assert parts["faster"]["by_policy"]["quest"] == (16384 if own_ms < 10 else None)


# kvmodels


def losses(own: list[float], mass: list[float], product: list[float]) -> dict[Candidate, Told]:
    """Losses above those of the full cache, which has 3 for every text."""
    given = {kvmodels.OWN: own, "oracle": mass, "oracle-product": product}
    told = {Candidate(policy, 64): Told(losses=[3 + one for one in above]) for policy, above in given.items()}
    return told | {Candidate(STOCK, None): Told(losses=[3.0] * len(own))}


def test_the_loss_is_compared_with_the_better_oracle_beyond_its_error() -> None:
    assert kvmodels.excess(losses([0.11] * 3, [0.1] * 3, [0.2] * 3), 64) == pytest.approx(0)
    assert kvmodels.excess(losses([0.21] * 3, [0.4] * 3, [0.1] * 3), 64) == pytest.approx(0.1)
    noisy = kvmodels.excess(losses([0.0, 0.4], [0.1, 0.1], [0.2] * 2), 64)
    assert noisy == pytest.approx(0.2 - 0.11 - 0.2), "a mean of .2 with an error of .2"
    assert kvmodels.excess(losses([0.21], [0.1], [0.1]), 64) == pytest.approx(0.1), "of one text no error is known"


def answers(own: list[bool], full: list[bool]) -> dict[Candidate, Told]:
    told = {Candidate(kvmodels.OWN, 64): Told(), Candidate(STOCK, None): Told()}
    for one, seen in told.items():
        seen.add(np.array([own if one.budget else full]), np.array([full]), None)
    return told


def test_answers_count_where_the_full_cache_has_most_of_them() -> None:
    hard = answers([True, False, False, False], [True, False, False, False])
    easy = answers([True, True, False, True], [True, True, True, False])
    assert kvmodels.kept([hard, easy], 64) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="answers most of none"):
        kvmodels.kept([hard], 64)


def test_every_bar_of_real_models_is_of_a_part() -> None:
    assert {name.split(".")[0] for name in kvmodels.BARS} - {"bytes"} == set(kvmodels.PARTS)
    told = {"parts": {name: {"what": name, "figure": limit} for name, (_, limit) in kvmodels.BARS.items()}}
    missed = [bar.name for bar in bars_of(kvmodels, told) if not bar.passed]
    assert missed == ["time.long"], "it has to be faster, not as fast"
