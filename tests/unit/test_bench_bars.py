"""A quick run of a benchmark, and what a bar says of a run that failed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import DataError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate, Told
from llmcache.units import BLOCK_BYTES
from tools.bench import (
    kvmodels,
    kvstore,
    mount,
    size,
    testtime,
)
from tools.bench.__main__ import main
from tools.bench.clients.spill_file import SHAPE
from tools.bench.harness import run
from tools.bench.size import LoopCase


def test_a_quick_run_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    code = run(kvstore, ["--quick", "--rounds", "2", "--dir", str(tmp_path), "--json", str(path)])
    told = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "the scratch directory is gone"
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1) and told["schema"] == kvstore.SCHEMA
    assert told["tokens"] == kvstore.TOKENS // 16
    assert told["prefill"]["kv_bytes"] == told["tokens"] * SHAPE.token_bytes
    fetch, memory = told["fetch"], told["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert [bar["value"] for bar in told["bars"]] == [fetch["figure"], memory["peak_bytes"] / 2**20]
    assert "GB/s" in capsys.readouterr().out


def losses(own: list[float], mass: list[float], product: list[float]) -> dict[Candidate, Told]:
    """Losses above those of the full cache, which has 3 for every text."""
    given = {kvmodels.OWN: own, "oracle": mass, "oracle-product": product}
    told = {Candidate(policy, 64): Told(losses=[3 + one for one in above]) for policy, above in given.items()}
    return told | {Candidate(STOCK, None): Told(losses=[3.0] * len(own))}


# mount


def comparison(times: dict[str, float], **changes: Any) -> dict[str, Any]:
    """What was measured of some sides: the time of each, and twice that once."""
    runs = [{"side": side, "seconds": [[each, 2 * each, each]], "storage_bytes_per_step": 1} for side, each in times.items()]
    about = {"case": "a", "name": "A loop", "loop_bytes": 10**9, "cache_bytes": 75 * 10**7, "read_bps": 10**9}
    about |= {"clients": 2, "compute_s": 0.1, "bound_s": 0.5, "sides": list(times), "runs": runs}
    return {**about, "problems": {side: ["hung"] if side == "kernel" else [] for side in times}, **changes}


def test_a_case_that_failed_over_the_mount_reaches_nothing() -> None:
    measured = {"kernel": 3.0, "kernel-128": 1.0, "mount": 0.4}
    assert all(bar.passed for bar in mount.bars({"results": [comparison(measured)]})), "the kernel's hang is not its fault"
    hung = {"problems": {"mount": ["hung", "1 MiB wrong"]}}
    failed = comparison({"kernel": 1.0}, sides=["kernel", "mount"], **hung)
    nothing, *others = mount.bars({"results": [failed]})
    assert nothing.value == 2 and len(others) == 2 and not any(bar.passed for bar in (nothing, *others))
    assert math.isnan(mount.storage_bytes(failed, "mount"))


@pytest.mark.parametrize(
    ("case", "mode", "compared", "failed"),
    [("a", "mount", "kernel", "kernel"), ("b", "mount", "plain", "kernel-128"), ("c", "inplace", "best", "kernel-128")],
)  # fmt: skip
def test_nothing_is_better_than_what_was_not_measured(case: str, mode: str, compared: str, failed: str) -> None:
    sides = ["direct", "kernel", "kernel-128", mode]
    measured = comparison({side: 0.4 if side == mode else 1.0 for side in sides if side != failed}, case=case, sides=sides)
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, mode)}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


# size

SMALL = LoopCase("small", 2000 * BLOCK_BYTES, 500 * BLOCK_BYTES * 10, 10**8)  # 500 blocks come in time: S = 1500


def test_the_command_says_whether_they_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(size, "CASES", (SMALL,))
    for policy, code, said in (("belady", 0, "pass"), ("lru", 1, "FAIL")):
        assert main(["size", "--policies", policy, "--modes", ""]) == code
        told = capsys.readouterr().out
        assert said in told and "modelled" in told


# papers, startup, demotime, testtime


@pytest.mark.parametrize(
    ("last", "seconds", "code"),
    [
        ("==== 6093 passed in 517.23s (0:08:37) ====", 517.23, 0),
        ("=== 1 failed, 6092 passed, 3 skipped in 500.00s (0:08:20) ===", 500.0, 1),
        ("6 passed, 1 error in 2.50s", 2.5, 1),
    ],
)
def test_times_of_finished_runs(tmp_path: Path, last: str, seconds: float, code: int) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"tests/unit/test_x.py .... [ 1%]\n==== 2 passed in 1.00s ====\n{last}\n")
    run = testtime.of_log(log)
    assert (run["seconds"], run["exit_code"], run["log"]) == (seconds, code, "run.log")
    suite_bar, flakes = testtime.bars({"runs": [run] * 5 + [{**run, "seconds": 900.0, "busy": 2}] * 5})
    assert suite_bar.passed and flakes.passed == (code == 0)
    assert not testtime.bars({"runs": [run] * 9})[1].passed, "ten runs are asked for"
    assert not testtime.bars({"runs": [{**run, "exit_code": 0}] * 10 + [{**run, "exit_code": 1}]})[1].passed
    log.write_text("collected 6093 items\n")
    with pytest.raises(DataError, match="--log"):
        testtime.of_log(log)
