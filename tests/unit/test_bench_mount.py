"""The bars of the mount benchmark, its sides and its table, from made-up results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tools.bench import mount
from tools.bench.cgroup import Usage
from tools.bench.demo import same_answers
from tools.bench.experiment import Comparison, Experiment, SideRun
from tools.bench.results import Bar
from tools.bench.runner import ClientRun, ClientStep


def result(case: str, times: dict[str, float], cost: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What was measured in a case: the time of each side; `cost`: what each mount took."""
    times = {"direct": 1.0, **times}
    runs = [{"side": side, "seconds": [[each, 2 * each, each]], "storage_bytes_per_step": 1} for side, each in times.items()]
    if cost is not None:
        plain = ("direct", "kernel", "kernel-128")
        runs = [{**run, "mount": None if run["side"] in plain else cost} for run in runs]
    about = {"case": case, "name": f"Case {case}", "loop_bytes": 10**9, "cache_bytes": 75 * 10**7, "read_bps": 10**9}
    about |= {"clients": 2, "compute_s": 0.1, "bound_s": 0.5, "sides": list(times), "runs": runs}
    return {**about, "problems": {side: ["hung"] if side == "kernel" else [] for side in times}, **changes}


def bars_of(*measured: dict[str, Any]) -> list[Bar]:
    return mount.bars({"results": list(measured)})


def judged(*measured: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """The bars but the first, by name: value, and whether it is reached."""
    return {one.name: (round(one.value, 9), one.passed) for one in bars_of(*measured)[1:]}


@pytest.mark.parametrize(
    ("case", "side", "seconds", "values"),
    [
        ("a", "mount", 0.6, {"bound": (1.2, False), "kernel": (0.6, False)}),
        ("a", "inplace", 0.51, {"bound": (1.02, True), "kernel": (0.51, False)}),
        ("b", "mount", 1.25, {"plain": (0.8, False)}),
        ("c", "mount", 1.25, {"direct": (0.8, True)}),
        ("c", "inplace", 1.25, {"best": (0.8, False)}),
        ("d", "mount", 1.1, {"bound": (1.1, True), "kernel": (1.1, False)}),
        ("e", "mount", 0.72, {"bound": (1.2, False)}),
        ("e", "inplace", 0.6, {"bound": (1.0, True), "kernel": (0.6, True)}),
        ("f", "mount", 0.7, {}),
        ("f", "inplace", 0.7, {"kernel": (0.7, False)}),
    ],
)
def test_bars_are_of_the_better_page_cache_and_of_the_mode(
    case: str, side: str, seconds: float, values: dict[str, tuple[float, bool]]
) -> None:
    measured = result(case, {"kernel": 3.0, "kernel-128": 1.0, side: seconds})
    nothing, *bars = bars_of(measured)
    assert nothing.name == "problems" and nothing.passed, "what goes wrong without the mount is not its fault"
    slug = f"case-{case}" if side == "mount" else f"case-{case}.{side}"
    assert judged(measured) == {f"{slug}.{key}": value for key, value in values.items()}
    for one in bars:
        assert f"--only {case}" in one.command and one.command.endswith("--mode inplace") == (side == "inplace")


@pytest.mark.parametrize(("read_bps", "limit"), [(5 * 10**8, 0.65), (None, 0.5)])
def test_of_mixtures_means_count_and_what_the_kernel_misses(read_bps: int | None, limit: float) -> None:
    times = {"kernel": 3.0, "kernel-128": 1.0, "inplace": limit, "steer": 0.9}
    missing = result("g", times, read_bps=read_bps, routed={"token_bytes": 9.0, "lru_bytes": 0.5})
    bars = judged(missing)
    assert bars["case-g.inplace.kernel"] == (limit, True) and bars["case-g.inplace.p99"] == (2.0, True)
    assert bars["case-g.inplace.bytes"] == (1.0, False) and bars["case-g.inplace.lru"] == (2.0, False)
    assert ("case-g.steer.kernel" in bars) == (read_bps is not None) and not bars.get("case-g.steer.kernel", (0, False))[1]
    fits = judged(result("g", times, read_bps=read_bps, routed={"token_bytes": 11.0, "lru_bytes": None}))
    assert "case-g.inplace.bytes" not in fits and "case-g.inplace.lru" not in fits
    assert fits["case-g.inplace.kernel"][1] and all(reached for _, reached in fits.values())


@pytest.mark.parametrize(("mode", "cpu"), [("inplace", [True, False]), ("steer", [True, True]), ("arena", [])])
def test_what_a_mount_costs_is_judged(mode: str, cpu: list[bool]) -> None:
    def cost(seconds: float | None, beyond: int) -> dict[str, Any]:
        memory = {"resident_bytes": 750 << 20, "beyond_bytes": beyond, "daemon_bytes": 65 << 20}
        return {"mode": mode, "cpu_s_per_gb": seconds, **memory}

    passed: dict[str, list[bool]] = {"cpu": [], "memory": []}
    for seconds, beyond in ((0.2, 1 << 20), (0.3, 0)):
        times = {"kernel": 1.0, "mount": 0.5}
        for name, (_, reached) in judged(result("a", times, cost(seconds, beyond), cache_bytes=750 << 20)).items():
            passed.get(name.rpartition(".")[2], []).append(reached)
    assert passed == {"cpu": cpu, "memory": [True, False]}
    llama = judged(result("a", {"kernel": 1.0, "mount": 0.5}, cost(9.0, 0), name="llama.cpp"))
    assert not any(name.endswith("cpu") for name in llama)


def test_the_table_has_every_side() -> None:
    cost = {"mode": "steer", "cpu_s_per_gb": 0.5, "resident_bytes": 10**9, "beyond_bytes": 2 * 10**6, "daemon_bytes": 10**6}
    times = {"kernel": 2.0, "kernel-128": 1.0, "mount": 0.5}
    made, *problems = mount.tables({"results": [result(case, times, cost) for case in "af"]})
    assert not isinstance(made, str) and problems == []
    columns = {str(column.header): list(column.cells) for column in made.columns}
    assert columns["side"] == ["direct", "kernel", "kernel-128", "mount: steer"] * 2
    assert columns["/kernel"] == ["1.00", "2.00", "1.00", "0.50"] * 2 and columns["/bound"][3:] == ["1.00", *"----"]
    assert columns["CPU s/GB"][3] == "0.5" and columns["memory MB"][2:4] == ["", "1,000+1, 2"]


def test_a_case_that_failed_reaches_nothing() -> None:
    failed = result("a", {"kernel": 1.0}, sides=["kernel", "mount"], problems={"mount": ["hung", "1 MiB wrong"]})
    nothing, bound, kernel = bars_of(failed)
    assert nothing.value == 2 and not (nothing.passed or bound.passed or kernel.passed)
    assert math.isnan(mount.storage_bytes(failed, "mount"))


@pytest.mark.parametrize(
    ("case", "mode", "compared", "failed"),
    [("a", "mount", "kernel", "kernel"), ("b", "mount", "plain", "kernel-128"), ("c", "mount", "direct", "kernel"),
     ("c", "inplace", "best", "kernel-128"), ("e", "inplace", "kernel", "kernel"), ("f", "inplace", "kernel", "kernel")],
)  # fmt: skip
def test_nothing_is_better_than_what_was_not_measured(case: str, mode: str, compared: str, failed: str) -> None:
    there = {side: 1.0 for side in ("kernel", "kernel-128") if side != failed}
    measured = result(case, {**there, mode: 0.4}, sides=["direct", "kernel", "kernel-128", mode])
    if compared == "direct":
        measured["runs"] = [run for run in measured["runs"] if run["side"] == mode]
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, mode)}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


@pytest.mark.parametrize(
    ("crcs", "same"), [([[1, 2, 3], [1, 2, 3]], True), ([[1, 2], [1, 2, 3]], True), ([[1, 2, 3], [1, 3]], False)]
)
def test_a_run_that_was_cut_off_has_no_wrong_bytes(crcs: list[list[int]], same: bool) -> None:
    runs = [SideRun("mount", 0, [ClientRun(steps=[ClientStep(1.0, 0, crc) for crc in own])], Usage()) for own in crcs]
    shape = Experiment("a", "x", Path("x"), 1, 1, lambda _side, _path: [], 3, 1)
    assert same_answers(Comparison(shape, 1.0, None, runs)) == same
