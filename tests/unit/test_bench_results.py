"""What benchmarks write: bars are reached on their side, figures are short, recorded ones are of the bench beside them."""

from __future__ import annotations

import importlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.conftest import examples
from tools.bench import edram, harness, kv, kvanswers, kvindex, kvstore, kvtransformers, results, simulate
from tools.bench.results import Bar, bar_table, bars_of, exit_code, figure, of_json, with_bars

RECORDED = sorted(one.stem for one in results.DIRECTORY.glob("*.json") if one.stem != "all")


def bar(value: float = 1.0, sense: str = "<=", limit: float = 1.0, name: str = "a", kind: str = "measured") -> Bar:
    return Bar(name, "what", value, sense, limit, kind)


@pytest.mark.parametrize(("sense", "passed"), [("<=", [1, 1, 0]), ("<", [1, 0, 0]), (">=", [0, 1, 1]), (">", [0, 0, 1])])
def test_a_bar_is_reached_on_its_side(sense: str, passed: list[int]) -> None:
    assert [bar(value, sense).passed for value in (0.9, 1.0, 1.1)] == [bool(one) for one in passed]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sense", ["<=", ">="])
def test_what_is_no_number_reaches_nothing_and_is_null(value: float, sense: str) -> None:
    told = bar(value, sense).to_json()
    assert told["value"] is None and told["passed"] is False and bar(value).shown == "-"
    assert not of_json(json.loads(json.dumps(told))).passed and exit_code([bar(value)]) == 1


def test_bars_are_read_as_they_were_written() -> None:
    bars = [bar(), bar(2.0, name="b", kind="modelled")]
    told = with_bars({"schema": "x/1"}, bars)
    assert bars_of(json.loads(json.dumps(told))) == bars and [one["passed"] for one in told["bars"]] == [True, False]
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
    max_leaves=20,
)


@settings(max_examples=examples(40))
@given(documents)
def test_short_lists_hold_the_same(document: Any) -> None:
    assert json.loads(results.text(document)) == document == results.rounded(document)


def test_samples_are_short_and_figures_are_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    told = results.rounded({"seconds": [[1 / 3] * 3], "figure": 1 / 3})
    results.write(path, told)
    assert results.read(path) == {"seconds": [[0.333333] * 3], "figure": 1 / 3} == told
    assert "[0.333333, 0.333333, 0.333333]" in path.read_text() and [one.name for one in tmp_path.iterdir()] == ["x.json"]


# The recorded documents


def recorded(name: str) -> Any:
    return results.read(results.DIRECTORY / f"{name}.json")


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_of_the_benchmark_and_judged_by_it(name: str) -> None:
    bench: Any = importlib.import_module(f"tools.bench.{name}")
    told = recorded(name)
    assert told["schema"] == bench.SCHEMA and told["machine"]["cpus"] and not told.get("quick") and told["bars"]
    assert [bar.to_json() for bar in harness.bars_of(bench, told)] == told["bars"]
    Console(file=(shown := io.StringIO()), width=200).print(bar_table(bars_of(told)), *harness.tables_of(bench, told))
    assert told["bars"][0]["what"][:30] in shown.getvalue(), "people see it too"


def test_what_is_recorded_was_whole() -> None:
    assert (recorded("kv")["tokens"], recorded("kv")["spill"]["tokens"]) == (kv.TOKENS, kv.SPILLED)
    assert recorded("kvstore")["tokens"] == kvstore.TOKENS and len(recorded("mount")["results"]) == 72
    assert recorded("edram")["configurations"] == edram.CONFIGURATIONS == len(edram.axes())
    assert [row["case"] for row in recorded("edram")["cases"]] == list(edram.cases())
    kinds = [(one["kind"], one["keys"]) for one in recorded("kvindex")["rows"]]
    assert kinds == [(kind, size) for kind in kvindex.KINDS for size in kvindex.SIZES]
    for bench in (kvanswers, kvtransformers):
        assert len(recorded(bench.__name__.rpartition(".")[2])["bars"]) == len(bench.BARS)
    wanted = [(one.trace, one.name, one.bar or None) for one in simulate.speeds()]
    assert [(one["trace"], one["policy"], one["bar"]) for one in recorded("simulate")["speeds"]] == wanted
    assert {one["blocks"] for one in recorded("simulate")["memory"]} == {simulate.LARGE}
