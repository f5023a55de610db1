"""The README's figures are those of the JSON in the tree."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench.readme import render

ROOT = Path(__file__).parents[2]


def test_the_result_table_is_the_measured_one() -> None:
    document = json.loads((ROOT / "tools/bench/results/mount.json").read_text())
    assert render(document) in (ROOT / "README.md").read_text()
