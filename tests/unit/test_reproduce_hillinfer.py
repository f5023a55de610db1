"""`llmcache reproduce hillinfer`: verdicts follow from made-up numbers, the page keeps apart what is whose."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcache import cli
from llmcache.errors import EnvironmentProblem
from llmcache.kv.bench.results import Bench, Marks, Observed, Row
from llmcache.kv.planning import MODELS, SYSTEMS
from llmcache.report.claims import Verdict
from llmcache.report.reproduce.hillinfer import figure2, figure3, figure8, figure10, figure11, here, measured, run
from llmcache.report.reproduce.hillinfer.document import KINDS, modelled
from llmcache.report.reproduce.hillinfer.readings import BASELINES, READINGS, Point, points
from tests.unit.reproduce_parts import verdict

GOOD, FAIR, BAD = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED


# What the models give


def test_figure_2_is_confirmed_by_the_sizes_alone() -> None:
    memory = figure2.computed()
    assert {claim.name: verdict(figure2.CLAIMS, claim.name, memory, figure2.MODEL) for claim in figure2.CLAIMS} == {
        claim.name: GOOD for claim in figure2.CLAIMS
    }


@pytest.mark.parametrize(("factor", "expected"), [(1.0, GOOD), (1.05, FAIR), (1.2, BAD), (0.8, BAD)])
def test_memory_that_differs_is_not_confirmed(factor: float, expected: Verdict) -> None:
    memory = figure2.computed()
    use = memory.at("Qwen-7B")
    changed = replace(use, weights=use.weights + (factor - 1) * use.total)
    rows = {**memory.by_context, "Qwen-7B": {**memory.by_context["Qwen-7B"], 4096: changed}}
    assert verdict(figure2.CLAIMS, "qwen-30-gb", figure2.Memory(rows, memory.by_batch), figure2.MODEL) is expected


def test_modelled_transfers_are_bytes_by_speed() -> None:
    found = figure3.modelled()
    bytes_8k = 0.2 * MODELS["Qwen-7B"].kv_bytes(8192, 8)
    assert found.seconds[0.2][8192] == pytest.approx(bytes_8k / READINGS["share-20"].machine.ssd_bytes_per_s)
    assert found.kind == "modelled" and found.transfer_share is not None and found.transfer_share > 0.5


def transfers(low: Sequence[float], high: Sequence[float]) -> figure3.Transfers:
    contexts = (1024, 2048, 4096)
    seconds: dict[float, Mapping[int, float]] = {
        0.2: dict(zip(contexts, low, strict=True)),
        0.3: dict(zip(contexts, high, strict=True)),
    }
    return figure3.Transfers("measured here", 1, seconds, 0.6, 0.5)


@pytest.mark.parametrize(
    ("low", "high", "growth", "share"),
    [
        ((1, 2, 4), (2, 3, 6), GOOD, GOOD),
        ((1, 0.95, 4), (2, 3, 6), FAIR, GOOD),
        ((1, 0.5, 4), (2, 0.4, 6), BAD, FAIR),
        ((2, 3, 4), (1, 2, 3), GOOD, BAD),
    ],
)
def test_transfers_are_judged_by_their_times(
    low: Sequence[float], high: Sequence[float], growth: Verdict, share: Verdict
) -> None:
    data = transfers(low, high)
    assert verdict(figure3.CLAIMS, "grows-with-context", data, figure3.READ) is growth
    assert verdict(figure3.CLAIMS, "grows-with-share", data, figure3.READ) is share


@pytest.mark.parametrize(("transfer", "idle", "expected"), [(0.6, 0.5, GOOD), (0.6, 0.1, FAIR), (0.4, 0.1, BAD)])
def test_what_dominates_a_step(transfer: float, idle: float, expected: Verdict) -> None:
    data = replace(transfers((1, 2, 3), (1, 2, 3)), transfer_share=transfer, idle_share=idle)
    assert verdict(figure3.STEP_CLAIMS, "dominates", data, figure3.READ) is expected


class MadeUp(Point):
    """A point whose speed-ups are given."""

    def speedup(self, baseline: str, output_tokens: int) -> float:
        given: Any = self.latencies
        return float(given[baseline])


def speedups(*rows: Sequence[float]) -> figure10.Speedups:
    """Points of one model whose speed-ups over the four baselines are `rows`."""
    made = [
        MadeUp("Qwen-7B", 1024 << place, dict(zip(BASELINES, row, strict=True)))  # type: ignore[arg-type]
        for place, row in enumerate(rows)
    ]
    return figure10.Speedups({"sizes": made})


@pytest.mark.parametrize(
    ("rows", "in_range", "up_to", "longer"),
    [
        (((8, 7, 6, 5), (8.5, 7.5, 6.5, 5.5)), GOOD, GOOD, GOOD),
        (((8, 7, 6, 1), (8.5, 6, 6.5, 1.5)), FAIR, GOOD, FAIR),
        (((20, 2, 2, 1), (10, 2, 2, 1)), BAD, FAIR, BAD),
        (((2, 2, 2, 1), (1, 1, 1, 1)), BAD, BAD, BAD),
    ],
)
def test_speed_ups_are_judged_by_the_papers_range(
    rows: Sequence[Sequence[float]], in_range: Verdict, up_to: Verdict, longer: Verdict
) -> None:
    data = speedups(*rows)
    assert verdict(figure10.CLAIMS, "speed-up-range", data, "sizes") is in_range
    assert verdict(figure10.CLAIMS, "up-to-8.56", data, "sizes") is up_to
    assert verdict(figure10.CLAIMS, "longer-gains-more", data, "sizes") is longer


def test_the_order_is_that_of_the_modelled_times() -> None:
    data = figure10.Speedups({"sizes": points(READINGS["sizes"])})
    point = data.points["sizes"][0]
    names = list(SYSTEMS)
    slow = {
        name: replace(point.latencies["full"], token_ns=1e9 * (len(names) - place), prefill_ns=0)
        for place, name in enumerate(names)
    }
    ordered = figure10.Speedups({"sizes": [replace(point, latencies=slow)]})
    assert verdict(figure10.CLAIMS, "order", ordered, "sizes") is GOOD
    swapped = {**slow, "full": slow["hillinfer"], "hillinfer": slow["full"]}
    both = figure10.Speedups({"sizes": [replace(point, latencies=slow), replace(point, latencies=swapped)]})
    assert verdict(figure10.CLAIMS, "order", both, "sizes") is FAIR


def test_points_are_within_what_models_were_made_for() -> None:
    for reading in READINGS.values():
        found = points(reading)
        assert len(found) == 11 and all(point.context <= MODELS[point.model].context_limit for point in found)
        if reading.ssd_share is not None:
            shares = {one.places.ssd_share for point in found for one in point.latencies.values()}
            assert all(share == pytest.approx(reading.ssd_share) for share in shares)


def test_no_reading_has_a_factor_of_its_own_for_a_system() -> None:
    """Readings differ in the machine and in the workload, which all systems of a reading share."""
    for reading in READINGS.values():
        found = points(reading)
        assert {one.machine for point in found for one in point.latencies.values()} == {reading.machine.name}


def test_needed_speeds_give_the_ends_of_the_range() -> None:
    reading = READINGS["share-20"]
    base = reading.machine.ssd_bytes_per_s
    for one in figure10.needed(reading):
        for rate, expected in ((one.slowest, figure10.MOST), (one.fastest, figure10.LEAST)):
            factor = rate / base
            machine = reading.machine.faster(ssd_bytes_per_s=factor, ssd_requests_per_s=factor)
            changed = replace(reading, machine=machine)
            names = (one.baseline, "hillinfer")
            point = Point("", 4096, {name: changed.latency(name, MODELS["Qwen-7B"], 4096) for name in names})
            assert point.speedup(one.baseline, figure10.OUTPUT_TOKENS) == pytest.approx(expected, rel=1e-6)
    assert all(math.isnan(one.slowest) for one in figure10.needed(READINGS["sizes"]))


def test_hits_that_were_measured_change_what_is_modelled() -> None:
    plain = runs(FAST).bench
    assert figure10.with_hits(plain, 0.2) is None
    seen = Observed((1,), 1, 100, 1.0, 0, 0, 0, 0.0, None, {})
    hits = {"prefetch": 0.7, "hillinfer": 1.0}
    rows = tuple(replace(row, observed=replace(seen, hit_ratio=hits.get(row.policy, 0.8))) for row in plain.rows)
    found = figure10.with_hits(replace(plain, rows=rows), 0.2)
    assert found is not None and set(found.points) == {"share-20", "flexgen-20"}
    worst = figure10.Speedups({"share-20": points(READINGS["share-20"])})
    pairs = zip(found.over("share-20", "prefetch"), worst.over("share-20", "prefetch"), strict=True)
    assert all(better > plainly for better, plainly in pairs)


def test_parts_and_the_ratio_of_the_pools() -> None:
    ablation = figure11.ablation()
    one = ablation.parts["share-20"]
    names = list(figure11.PARTS)
    base = one[names[0]]
    for times, expected in (((3, 2, 1), GOOD), ((1, 2, 1), FAIR), ((1, 2, 3), BAD)):
        row = {name: replace(base, token_ns=time * 1e9) for name, time in zip(names, times, strict=True)}
        assert verdict(figure11.CLAIMS, "each-part-counts", figure11.Ablation({"share-20": row}), "share-20") is expected
    for curve, expected in (
        ((6, 5, 1, 2, 3, 4), GOOD),
        ((6, 5, 2, 1, 3, 4), GOOD),
        ((6, 5, 1.01, 2, 3, 1), FAIR),
        ((1, 2, 3, 4, 5, 6), BAD),
    ):
        data = figure11.Sweep(30.0, {figure11.BEST: [value * 1e9 for value in curve]})
        assert verdict(figure11.SWEEP_CLAIMS, "beta-rule", data, figure11.BEST) is expected


# What is measured here


def row(name: str, token_ms: float, scored: float = 0.0, beta: float | None = 4.0) -> Row:
    stages = {"evaluate": 1e6, "fetch": 1e6, "compute": 1e6, "update": 0.0}
    moved = {"ssd to cpu, score": scored, "ssd to cpu, fetch": 1e6}
    return Row(name, name.title(), token_ms * 1e6, stages, 0.0, 0.5, moved, beta)


def runs(times: Mapping[str, float], host: float = 1e6, device: float = 1e4) -> here.Runs:
    scored = {"prefetch": host, "hillinfer": device}
    rows = tuple(row(name, time, scored.get(name, 0.0)) for name, time in times.items())
    return here.Runs(Bench("measured", {"context": 2048}, rows))


FAST = {"full": 80.0, "h2o": 70.0, "prefetch": 60.0, "leoam": 50.0, "hillinfer-no-app": 20.0, "hillinfer": 10.0}


def test_runs_on_this_machine_are_judged_by_the_same_numbers() -> None:
    assert verdict(here.CLAIMS, "speed-up-here", runs(FAST), here.HERE) is GOOD
    assert verdict(here.CLAIMS, "speed-up-here", runs({**FAST, "hillinfer": 14.0}), here.HERE) is FAIR
    assert verdict(here.CLAIMS, "speed-up-here", runs({**FAST, "hillinfer": 100.0}), here.HERE) is BAD
    assert verdict(here.CLAIMS, "parts-here", runs(FAST), here.HERE) is GOOD
    assert verdict(here.CLAIMS, "parts-here", runs({**FAST, "hillinfer": 19.9}), here.HERE) is FAIR
    for device, expected in ((1e4, GOOD), (5e4, FAIR), (5e5, BAD)):
        assert verdict(here.CLAIMS, "link-bytes-here", runs(FAST, device=device), here.HERE) is expected


def beta_sweep(times: Sequence[float]) -> Bench:
    rows = tuple(row("hillinfer", time, beta=2.0**place) for place, time in enumerate(times))
    return Bench("measured", {}, rows, Marks(4e9, 1e9, None))


@pytest.mark.parametrize(
    ("times", "expected"),
    [((9, 8, 1, 8, 9), GOOD), ((9, 8, 2, 1, 9), GOOD), ((9, 8, 1.01, 9, 1), FAIR), ((1, 2, 3, 4, 5), BAD)],
)
def test_the_sweep_on_this_machine(times: Sequence[float], expected: Verdict) -> None:
    assert verdict(here.SWEEP_CLAIMS, "beta-here", beta_sweep(times), here.HERE) is expected


@pytest.mark.parametrize(
    ("at_02", "at_005", "comparable", "trade"),
    [(0.95, 0.5, GOOD, GOOD), (0.92, 0.5, FAIR, FAIR), (0.5, 0.5, BAD, FAIR), (0.95, 0.95, GOOD, FAIR)],
)
def test_accuracy_is_judged_against_the_full_cache(at_02: float, at_005: float, comparable: Verdict, trade: Verdict) -> None:
    by_alpha = {0.05: at_005, 0.2: at_02, 0.4: 0.95}
    data = figure8.Accuracy(4096, 256, 0.95, {"hillinfer": by_alpha})
    assert verdict(figure8.CLAIMS, "comparable-accuracy", data, "hillinfer") is comparable
    assert verdict(figure8.CLAIMS, "alpha-trade-off", data, "hillinfer") is trade


def test_transfers_are_really_read_from_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = measured.transfers(quick=True)
    assert found.kind == "measured here" and found.layers == 1
    assert set(found.seconds) == {0.2, 0.3} and all(time > 0 for times in found.seconds.values() for time in times.values())
    assert not list(tmp_path.iterdir())


# The command


def nothing(*_arguments: object) -> Any:
    raise EnvironmentProblem("there is no torch here", "install it")


def measured_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    by_system = {name: {0.1: 0.9, 0.2: 0.95} for name in figure8.SYSTEMS}
    monkeypatch.setattr(measured, "transfers", lambda quick: transfers((1, 2, 3), (2, 3, 4)))
    monkeypatch.setattr(measured, "systems", lambda quick, progress: runs(FAST).bench)
    monkeypatch.setattr(measured, "sweep", lambda quick, progress: beta_sweep((3, 2, 1, 2, 3)))
    monkeypatch.setattr(figure8, "measured", lambda quick: figure8.Accuracy(1024, 32, 0.95, by_system))


def reproduced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", ["reproduce", "hillinfer", "--quick", "-o", str(directory)])
    assert caught.value.code == 0
    told = capsys.readouterr()
    assert told.err == "" and "confirmed" in told.out
    found: dict[str, Any] = json.loads((directory / "hillinfer.json").read_text())
    return found


def test_page_and_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured_parts(monkeypatch)
    document = reproduced(monkeypatch, capsys, tmp_path)
    page = (tmp_path / "hillinfer.html").read_text()
    assert document["schema"] == "llmcache.reproduce.hillinfer/1"
    assert document["measured_here"]["missing"] == {} and document["measured_here"]["systems"]["kind"] == "measured"
    assert len(document["modelled"]["points"]) == 11 * len(READINGS)
    abouts = {claim["about"] for claim in document["claims"]}
    assert {"figure 2", "figure 3", "figure 3, this disk", "figure 8", "figures 9 and 10", "figure 11b"} <= abouts
    for claim in document["claims"]:
        assert claim["kind"].startswith(("modelled", "measured")) and claim["rule"] and claim["paper"]["quote"]
        for finding in claim["findings"].values():
            assert finding["verdict"] in {one.value for one in Verdict} and re.search(r"[0-9]", finding["ours"])
            assert finding["values"]
    for words in ("(modelled here)", "(measured here)", "by how much not, and why", "emulated", "assumed", "FlexGen"):
        assert words in page
    assert "<script" not in page and "http" not in re.sub(r"base64,[^\"]*", "", page).replace("http-equiv", "")


def test_what_cannot_be_measured_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("transfers", "systems", "sweep"):
        monkeypatch.setattr(measured, name, nothing)
    monkeypatch.setattr(figure8, "measured", nothing)
    document = reproduced(monkeypatch, capsys, tmp_path)
    here_found = document["measured_here"]
    assert set(here_found["missing"]) == {"transfers", "systems", "sweep", "accuracy"}
    assert here_found["accuracy"] is None and here_found["beta"] is None
    assert not [claim for claim in document["claims"] if claim["kind"].startswith("measured")]
    assert (tmp_path / "hillinfer.html").read_text().count("not measured. there is no torch here (install it)") == 4


def test_every_finding_is_of_a_kind() -> None:
    made = run._judged(modelled(), measured.Measured(missing={}))
    assert set(made) <= set(KINDS)
