"""The bars of the mount benchmark, its sides and its table, from made-up results."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from tools.bench import mount, sides
from tools.bench.cgroup import Usage
from tools.bench.demo import same_answers
from tools.bench.experiment import Comparison, Experiment, SideRun
from tools.bench.machine import Disk
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
    ("case", "kernel", "mount", "values"),
    [
        ("a", 2.0, 0.6, {"bound": (1.2, False), "kernel": (0.3, True)}),
        ("b", 0.9, 1.0, {"plain": (0.9, True)}),
        ("c", 2.0, 1.25, {"direct": (0.8, True)}),
        ("d", 1.0, 1.1, {"bound": (1.1, True), "kernel": (1.1, False)}),
        ("e", 2.0, 0.72, {"bound": (1.2, False)}),
        ("f", 1.0, 0.7, {}),
    ],
)
def test_bars_of_the_mount(case: str, kernel: float, mount: float, values: dict[str, tuple[float, bool]]) -> None:
    measured = result(case, {"kernel": kernel, "mount": mount})
    nothing, *bars = bars_of(measured)
    assert nothing.name == "problems" and nothing.passed, "what goes wrong without the mount is not its fault"
    assert judged(measured) == {f"case-{case}.{key}": value for key, value in values.items()}
    assert all(f"--only {case}" in one.command and "--mode " not in one.command for one in bars)


@pytest.mark.parametrize(
    ("case", "seconds", "values"),
    [
        ("a", 0.51, {"bound": (1.02, True), "kernel": (0.51, False)}),
        ("b", 1.25, {"plain": (0.8, False)}),
        ("c", 1.25, {"best": (0.8, False)}),
        ("e", 0.6, {"bound": (1.0, True), "kernel": (0.6, True)}),
        ("f", 0.7, {"kernel": (0.7, False)}),
    ],
)
def test_bars_in_place_are_higher(case: str, seconds: float, values: dict[str, tuple[float, bool]]) -> None:
    times = {"kernel": 3.0, "kernel-128": 1.0, "inplace": seconds}
    measured = result(case, times)
    assert judged(measured) == {f"case-{case}.inplace.{key}": value for key, value in values.items()}
    assert all(one.command.endswith("--mode inplace") for one in bars_of(measured)[1:])
    chosen = result(case, {"kernel": 3.0, "kernel-128": 1.0, "mount": seconds}, {"mode": "inplace"})
    assert values.items() <= {name.split(".")[1]: value for name, value in judged(chosen).items()}.items()


@pytest.mark.parametrize(("share", "passed"), [(0.4, True), (0.6, True), (0.75, False), (0.9, True)])
def test_where_most_is_gained_without_a_limit_most_is_asked(share: float, passed: bool) -> None:
    measured = result("f", {"kernel": 1.0, "inplace": 1.0}, loop_bytes=10**9 + 7, cache_bytes=int(share * (10**9 + 7)))
    assert judged(measured) == {"case-f.inplace.kernel": (1.0, passed)}


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


def test_each_mode_is_judged_by_itself() -> None:
    times = {"kernel": 1.0, "kernel-128": 2.0, "inplace": 0.5, "steer": 0.55}
    bars = judged(result("a", times))
    assert bars["case-a.inplace.kernel"] == (0.5, False) and bars["case-a.steer.bound"] == (1.1, True)
    failed = result("a", times, problems={side: ["hung"] for side in times} | {"direct": []})
    assert bars_of(failed)[0].value == 2


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


def test_a_daemon_that_told_nothing_reaches_nothing() -> None:
    measured = result("a", {"kernel": 1.0, "inplace": 0.1})
    silent = {**measured, "runs": [{**run, "mount": None} for run in measured["runs"]]}
    bars = {one.name: one for one in bars_of(silent)}
    for key in ("cpu", "memory"):
        assert math.isnan(bars[f"case-a.inplace.{key}"].value) and not bars[f"case-a.inplace.{key}"].passed


def test_costs_are_of_a_warm_mount() -> None:
    def told(cpu_s: float, read: int, resident: int, beyond: int) -> dict[str, Any]:
        told = {"mode": "steer", "cpu_s": cpu_s, "storage_bytes": read, "resident_bytes": resident}
        return {**told, "beyond_bytes": beyond, "daemon_bytes": 1, "schema": "x"}

    usage = Usage()
    cost = SideRun("mount", 0, [], usage, [told(5.0, 10**9, 50, 0), told(6.0, 3 * 10**9, 60, 20)]).mount()
    memory = {"resident_bytes": 50, "beyond_bytes": 0, "daemon_bytes": 1}
    assert cost == {"mode": "steer", "cpu_s_per_gb": 0.5, **memory}
    assert (SideRun("mount", 0, [], usage, [told(5.0, 1, 0, 0)]).mount() or {})["cpu_s_per_gb"] is None
    assert SideRun("kernel", 0, [], usage).mount() is None


def test_the_table_has_every_side() -> None:
    cost = {"mode": "steer", "cpu_s_per_gb": 0.5, "resident_bytes": 10**9, "beyond_bytes": 2 * 10**6, "daemon_bytes": 10**6}
    times = {"kernel": 2.0, "kernel-128": 1.0, "mount": 0.5}
    made, *problems = mount.tables({"results": [result(case, times, cost) for case in "af"]})
    assert not isinstance(made, str) and problems == []
    columns = {str(column.header): list(column.cells) for column in made.columns}
    assert columns["side"] == ["direct", "kernel", "kernel-128", "mount: steer"] * 2
    assert columns["/kernel"] == ["1.00", "2.00", "1.00", "0.50"] * 2 and columns["/bound"][3:] == ["1.00", *"----"]
    assert columns["CPU s/GB"][3] == "0.5" and columns["memory MB"][2:4] == ["", "1,000+1, 2"]


def test_modes_are_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mount, "kernels", lambda _source: (sides.Plain(),))
    parser = argparse.ArgumentParser()
    mount.options(parser)

    def names(*words: str) -> list[str]:
        return [side.name for side in mount.sides(parser.parse_args(words), tmp_path)]

    assert names() == ["kernel", "mount"]
    assert names("--mode", "steer", "--mode", "inplace", "--mode", "steer") == ["kernel", "steer", "inplace"]


@pytest.mark.parametrize(("own", "names"), [("128\n", ["kernel"]), ("8192\n", ["kernel", "kernel-128"])])
def test_the_page_cache_is_measured_at_its_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, names: list[str]
) -> None:
    (tmp_path / "read_ahead_kb").write_text(own)
    monkeypatch.setattr(Disk, "read_ahead_file", tmp_path / "read_ahead_kb")
    monkeypatch.setattr(sides, "disk_of", lambda _path: Disk("8:0", "sda"))
    assert [side.name for side in sides.kernels(tmp_path)] == names


def test_without_a_limit_many_parts_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mount, "loop_file", lambda path, _size: path)
    made = list(mount.unlimited(mount.CasePlan(tmp_path, tmp_path, None, 1, 0.75, True)))
    assert [one.name for one in made if one.name.startswith("read")] == [f"read loop {each} N" for each in mount.FRACTIONS]
    assert all(one.capped and one.read_bps is None and one.loop_bytes - one.cache_bytes > 64 << 20 for one in made)


def test_a_case_that_failed_reaches_nothing() -> None:
    failed = result("a", {"kernel": 1.0}, sides=["kernel", "mount"], problems={"mount": ["hung", "1 MiB wrong"]})
    nothing, bound, kernel = bars_of(failed)
    assert nothing.value == 2 and not (nothing.passed or bound.passed or kernel.passed)
    assert math.isnan(mount.storage_bytes(failed, "mount"))


@pytest.mark.parametrize(
    ("case", "mode", "compared"),
    [("a", "mount", "kernel"), ("b", "mount", "plain"), ("c", "mount", "direct"), ("d", "mount", "kernel"),
     ("c", "inplace", "best"), ("e", "inplace", "kernel"), ("f", "inplace", "kernel")],
)  # fmt: skip
@pytest.mark.parametrize("failed", ["kernel", "kernel-128"])
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
