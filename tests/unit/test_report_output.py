"""Output on a terminal: wide tables are split, long lines are wrapped, and no text is cut off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.table import Table

from llmcache.report import output

COLUMNS = [f"column {number} of many" for number in range(12)]


def wide_table(keys: int = 1) -> Table:
    table = output.plain_table("name", *COLUMNS, title="A title")
    table.keys = keys
    for row in ("first", "second"):
        table.add_row(row, *(f"{row[0]}{number}" for number in range(12)))
    return table


def printed(capsys: pytest.CaptureFixture[str], parts: Sequence[str | Table]) -> list[str]:
    output.show(False, dict, parts)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("columns", [30, 80])
@pytest.mark.parametrize("keys", [1, 2])
def test_a_wide_table_is_split_into_parts_with_row_names(
    columns: int, keys: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, [wide_table(keys)])
    assert lines[0] == "A title" and max(map(len, lines)) <= columns
    rows = [line.split() for line in lines if line.startswith(("first", "second"))]
    assert all(row[1:keys] == [f"{row[0][0]}0"][: keys - 1] for row in rows)
    cells = [cell for row in rows for cell in row[keys:]]
    assert sorted(cells) == sorted(f"{row}{number}" for row in "fs" for number in range(keys - 1, 12))


def test_output_to_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = " ".join(["words"] * 50)
    shown, title, head, *rows = printed(capsys, [line, wide_table()])
    assert shown == line and title == "A title" and len(rows) == 2 and all(heading in head for heading in COLUMNS)


def test_long_lines_are_wrapped_without_loss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = "storage     one of the words is measured in 123 ms, 17 GB per second"
    lines = printed(capsys, [line])
    assert max(map(len, lines)) <= 40 and " ".join(lines).split() == line.split()
