"""Bars of benchmarks and the JSON they stand in: what is reached, what is shown, what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import mountbars, results
from tools.bench.bars import Bar, exit_code, figure, of_document, of_json, with_bars


def bar(value: float = 1.0, sense: str = "<=", limit: float = 1.0, name: str = "a", kind: str = "measured") -> Bar:
    return Bar(2, name, "what", value, sense, limit, "command", kind)


@pytest.mark.parametrize(("sense", "passed"), [("<=", [1, 1, 0]), ("<", [1, 0, 0]), (">=", [0, 1, 1]), (">", [0, 0, 1])])
def test_a_bar_is_reached_on_its_side(sense: str, passed: list[int]) -> None:
    assert [bar(value, sense).passed for value in (0.9, 1.0, 1.1)] == [bool(one) for one in passed]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sense", ["<=", ">="])
def test_what_is_no_number_reaches_nothing_and_is_null(value: float, sense: str) -> None:
    told = bar(value, sense).to_json()
    assert told["value"] is None and told["passed"] is False and bar(value).shown == "-"
    assert not of_json(json.loads(json.dumps(told))).passed and exit_code([bar(value)]) == 1


@pytest.mark.parametrize("change", [{"sense": "=="}, {"kind": "guessed"}])
def test_senses_and_kinds_are_those_there_are(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="kind or sense"):
        bar(**change)  # type: ignore[arg-type]


def test_bars_are_read_as_they_were_written() -> None:
    bars = [bar(), bar(2.0, name="b", kind="modelled")]
    told = with_bars({"schema": "x/1"}, bars)
    assert of_document(json.loads(json.dumps(told))) == bars and [one["passed"] for one in told["bars"]] == [True, False]
    assert (exit_code(bars), exit_code(bars[:1])) == (1, 0)
    with pytest.raises(ValueError, match="twice"):
        with_bars({}, [bar(), bar()])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.8576, "0.858"), (1.15, "1.15"), (449.4, "449"), (1e5, "100,000"), (2e-4, "0.0002")]
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.6g}")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(documents)
def test_short_lists_hold_the_same(document: Any) -> None:
    assert json.loads(results.text(document)) == document == results.rounded(document)


def test_samples_are_short_and_figures_are_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    told = results.rounded({"seconds": [[1 / 3] * 3], "figure": 1 / 3})
    results.write(path, told)
    assert results.read(path) == {"seconds": [[0.333333] * 3], "figure": 1 / 3} == told
    assert "[0.333333, 0.333333, 0.333333]" in path.read_text() and [one.name for one in tmp_path.iterdir()] == ["x.json"]


def result(case: str, kernel: float, mount: float, **changes: Any) -> dict[str, Any]:
    sides = {"kernel": kernel, "mount": mount, "direct": 1.0}
    runs = [{"side": side, "seconds": [[each, 2 * each, each]], "storage_bytes_per_step": 1} for side, each in sides.items()]
    about = {"case": case, "name": f"Case {case}", "loop_bytes": 10**9, "read_bps": 10**9, "clients": 2, "compute_s": 0.1}
    return {**about, "bound_s": 0.5, "problems": {"mount": [], "kernel": ["hung"]}, "runs": runs, **changes}


@pytest.mark.parametrize(
    ("case", "kernel", "mount", "values"),
    [
        ("a", 2.0, 0.6, {"bound": (1.2, False), "kernel": (0.3, True)}),
        ("b", 0.9, 1.0, {"plain": (0.9, True)}),
        ("c", 2.0, 1.25, {"direct": (0.8, True)}),
        ("d", 1.0, 1.1, {"bound": (1.1, True), "kernel": (1.1, False)}),
        ("e", 2.0, 0.72, {"bound": (1.2, False)}),
    ],
)
def test_bars_of_the_mount(case: str, kernel: float, mount: float, values: dict[str, tuple[float, bool]]) -> None:
    nothing, *bars = mountbars.bars([result(case, kernel, mount)])
    assert nothing.name == "problems" and nothing.passed, "what goes wrong without the mount is not its fault"
    assert {one.name.rpartition(".")[2]: (round(one.value, 9), one.passed) for one in bars} == values
    assert all(one.name.startswith(f"case-{case}.") and f"--only {case}" in one.command for one in bars)


def test_a_case_that_failed_reaches_nothing() -> None:
    failed = result("a", 1.0, 0.5, runs=[{"side": "kernel", "seconds": [[1.0]], "storage_bytes_per_step": 1}])
    nothing, bound, kernel = mountbars.bars([{**failed, "problems": {"mount": ["hung", "1 MiB wrong"]}}])
    assert nothing.value == 2 and not (nothing.passed or bound.passed or kernel.passed)
    assert math.isnan(mountbars.storage_bytes(failed, "mount"))


@pytest.mark.parametrize(("case", "compared"), [("a", "kernel"), ("b", "plain"), ("c", "direct"), ("d", "kernel")])
def test_nothing_is_better_than_what_was_not_measured(case: str, compared: str) -> None:
    runs = [{"side": "mount", "seconds": [[0.4]], "storage_bytes_per_step": 1}]
    bars = {one.name.rpartition(".")[2]: one for one in mountbars.judge(result(case, 1.0, 1.0, runs=runs))}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


def test_the_bars_of_the_mount_in_the_tree_follow_from_its_runs() -> None:
    told = results.read(results.DIRECTORY / "mount.json")
    assert [one.to_json() for one in mountbars.bars(told["results"])] == told["bars"] and len(told["results"]) == 20
