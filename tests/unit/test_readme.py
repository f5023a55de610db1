"""The README's figures are those of the JSON in the tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.readme import render

ROOT = Path(__file__).parents[2]
TABLES = ["mount", "policies", "simulate", "size", "trace", "kv", "kvpipeline", "kvtransformers", "kvindex"]


@pytest.mark.parametrize("results", TABLES)
def test_the_result_tables_are_the_measured_ones(results: str) -> None:
    document = json.loads((ROOT / f"tools/bench/results/{results}.json").read_text())
    assert render(document) in (ROOT / "README.md").read_text()
