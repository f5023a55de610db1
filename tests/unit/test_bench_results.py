"""What benchmarks write: bars are reached on their side, figures are short, recorded ones are of the bench beside them."""

from __future__ import annotations

import importlib
import io
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.conftest import examples
from tools.bench import harness, results
from tools.bench.results import Bar, bar_table, bars_of, exit_code, of_json, with_bars

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


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.6g}")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=examples(40))
@given(documents)
def test_short_lists_hold_the_same(document: Any) -> None:
    assert json.loads(results.text(document)) == document == results.rounded(document)


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
