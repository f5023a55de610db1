"""Reports of KV benchmarks: one dataclass for table, JSON and pictures; measured and modelled never beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from llmcache.errors import DataError, UsageError
from llmcache.kv.bench.results import Bench, Marks, Observed, Row, read_bench
from llmcache.kv.bench.synthetic import Variant, variants_of
from llmcache.kv.pipeline import Span, Timeline
from llmcache.report import kv_bench
from tests.unit.report_parts import unlaid as unlaid

pytestmark = pytest.mark.usefixtures("unlaid")

MS = 1_000_000


def timeline() -> dict[str, Any]:
    made = Timeline(["compute"])
    for layer in range(3):
        made.add(Span("cpu", "evaluate", layer, 7, 10 * layer * MS, (10 * layer + 4) * MS))
        made.add(Span("compute", "compute", layer, 7, (10 * layer + 5) * MS, (10 * layer + 9) * MS))
    return made.to_json()


def observed() -> Observed:
    device = {"emulated": True, "profile": "smartssd", "commands": 9, "modelled_ns": 4 * MS, "wall_ns": 7 * MS}
    return Observed((30 * MS, 29 * MS, 31 * MS), MS, 512, 0.75, 12, 11, 3, 0.25, device, timeline())


def row(policy: str, token_ms: float, beta: float | None = 1.0, seen: Observed | None = None) -> Row:
    stages = {"evaluate": 12.0 * MS, "fetch": 3.0 * MS, "compute": 12.0 * MS, "update": 1.0 * MS}
    links = {
        "ssd to cpu, fetch": 5e6, "cpu to ssd, fetch": 1e6, "ssd to cpu, score": 1e5, "ssd to cpu, index": 2e5,
        "cpu to ssd, spill": 7e3, "ssd to device, score": 8e7, "device to ssd, spill": 1e7,
    }  # fmt: skip
    return Row(policy, policy.title(), token_ms * MS, stages, (token_ms - 12) * MS, 1 - 12 / token_ms, links, beta, seen)


MEASURED = Bench(
    "measured", {"context": 2048, "stream": {"synthetic": True}, "alpha": None},
    (row("full", 90, seen=observed()), row("hillinfer", 30, seen=replace(observed(), device=None))), notes=("a note",),
)  # fmt: skip
SWEEP = Bench(
    "modelled", {"machine": "the paper's"},
    tuple(row("hillinfer", ms, beta) for beta, ms in ((0.5, 50), (1.0, 30), (2.0, 24), (4.0, 27))), Marks(8e9, 4e9, 3.0),
)  # fmt: skip


def printed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    kv_bench.show(bench, False)
    return capsys.readouterr().out


def test_what_is_saved_comes_back_whole() -> None:
    for bench in (MEASURED, SWEEP):
        told = json.loads(json.dumps(bench.document()))
        again = read_bench(told, "run.json")
        assert again.document() == bench.document()
        assert told["schema"] == "llmcache.kv-bench/1"
    assert MEASURED.document()["rows"][1]["speedup_over"] == {"full": 3.0}
    assert SWEEP.document()["rows"][0]["speedup_over"] == {}, "all rows are of one policy"
    assert SWEEP.document()["marks"]["expected"] == 2.0 and Marks(8e9, 1e9, 3.0).expected == 3.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": "llmcache.size/1"}, "schema"),
        ({"kind": "guessed"}, "kind"),
        ({"rows": [{"policy": "full"}]}, "title: missing"),
        ({"marks": {"f_c": 1}}, "f_s: missing"),
        ({"rows": 3}, "int"),
        ({"rows": []}, "rows: none"),
        ({"rows": [{**asdict(row("full", 90)), "token_ns": "soon"}]}, "token_ns: 'soon'"),
        ({"rows": [{**asdict(row("full", 90)), "stages_ns": {"evaluate": 1.0}}]}, "stages_ns"),
        ({"rows": [{**asdict(MEASURED.rows[0]), "observed": {**asdict(observed()), "timeline": {}}}]}, "emulated: missing"),
    ],
)
def test_what_is_no_benchmark_is_refused_with_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError, match=f"^run.json: .*{field}") as caught:
        read_bench({**MEASURED.document(), **change}, "run.json")
    assert caught.value.hint
    with pytest.raises(DataError, match="schema"):
        read_bench([1], "run.json")


def test_the_table_says_what_is_measured_and_what_is_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(MEASURED, capsys)
    assert "measured on this machine, with a synthetic stream" in told and "a note" in told
    assert "Full: emulated device (smartssd): 9 commands in all steps, modelled 4.00 ms, wall 7.00 ms" in told
    lines = [line.split() for line in told.splitlines() if line.startswith("Full ")]
    assert lines[0][-1] == "3.00" and lines[1][-2:] == ["3", "(25.0%)"]
    assert "context 2048" in told and "alpha" not in told, "what was not set is not told"
    assert "stream synthetic" in told and "Hillinfer: 3.00 x Full (speed-up)" in told
    assert " ".join(lines[1][1:11]) == "512 75.0% 300 KB 6.00 MB 7.00 KB 90.0 MB", "scoring, fetch, the rest; inside"


def test_a_modelled_table_has_no_measured_column(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(SWEEP, capsys)
    assert "modelled, on a machine that is not here" in told
    assert not [word for word in ("measured", "in memory", "speed-up") if word in told]
    assert "f_c / f_s = 2, memory ends at 3; expected minimum at 2" in told


def test_the_gantt_chart_has_a_bar_for_every_span() -> None:
    figure = kv_bench.timeline_figure(MEASURED, "run.json")
    assert len(figure.axes) == 2
    for panel, wanted in zip(figure.axes, MEASURED.rows, strict=True):
        bars = [path for found in panel.collections for path in found.get_paths()]
        assert len(bars) == 6 and not [patch for patch in panel.patches if isinstance(patch, Rectangle)]
        edges = sorted(round(path.get_extents().x1) for path in bars)
        assert edges == [4, 9, 14, 19, 24, 29], "ms"
        assert panel.get_title(loc="left").startswith(f"{wanted.title}: {wanted.idle_share:.0%}")
        assert next(label.get_text() for label in panel.get_yticklabels()) == "compute (emulated)"
    assert set(kv_bench.STAGE_COLOURS) == {"evaluate", "fetch", "compute", "update"}
    with pytest.raises(DataError, match="rows: modelled ones have no timeline"):
        kv_bench.timeline_figure(SWEEP, "run.json")


def test_the_sweep_marks_the_rule_and_where_memory_ends() -> None:
    figure = kv_bench.beta_figure(SWEEP, "run.json")
    (panel,) = figure.axes
    betas, times = (np.asarray(found).tolist() for found in panel.lines[0].get_data())
    assert betas == [0.5, 1.0, 2.0, 4.0] and times == [50, 30, 24, 27]
    marks = {line.get_label(): np.asarray(line.get_xdata())[0] for line in panel.lines[2:]}
    assert marks == {"f_c / f_s = 2": 2.0, "M0 = 3": 3.0}
    assert "modelled" in panel.get_ylabel() and b"expects the least at 2" in kv_bench.drawn(SWEEP, "run.json", "html")
    with pytest.raises(DataError, match="marks"):
        kv_bench.beta_figure(MEASURED, "run.json")


@pytest.mark.parametrize("bench", [MEASURED, SWEEP], ids=["timelines", "sweep"])
@pytest.mark.parametrize("form", ["png", "svg", "html"])
def test_every_form_is_drawn_from_the_saved_file_alone(bench: Bench, form: str, tmp_path: Path) -> None:
    run, output = tmp_path / "run.json", tmp_path / f"picture.{form}"
    run.write_text(json.dumps(bench.document()))
    kv_bench.plot(str(run), str(output), force=False)
    data = output.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!DOCTYPE"}[form])
    if form == "svg":
        assert (b"Measured, with an emulated accelerator." if bench is MEASURED else b"Modelled.") in data
    with pytest.raises(UsageError, match=r"exists|there"):
        kv_bench.plot(str(run), str(output), force=False)
    kv_bench.plot(str(run), str(output), force=True)
    assert output.read_bytes() == data, "the same data, the same bytes"


def test_captions_say_what_of_it_was_emulated_by_the_rows() -> None:
    real, both = Timeline().to_json(), Timeline(["device", "compute"]).to_json()
    rows = [row("full", 90, seen=replace(observed(), timeline=real)), row("hillinfer", 30, seen=observed())]
    assert kv_bench.kind_of(replace(MEASURED, rows=(rows[0],))) == "measured"
    assert kv_bench.kind_of(replace(MEASURED, rows=tuple(rows))) == "measured, with an emulated accelerator"
    rows[1] = row("hillinfer", 30, seen=replace(observed(), timeline=both))
    told = "measured, with an emulated accelerator and computational SSD"
    assert kv_bench.kind_of(replace(MEASURED, rows=tuple(rows))) == told
    page = kv_bench.drawn(replace(MEASURED, rows=tuple(rows)), "run.json", "html").decode()
    assert f"figures are {told}." in page and f"M{told[1:]}." in page and "every figure" not in page
    assert kv_bench.kind_of(SWEEP) == "modelled"


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        kv_bench.plot(str(tmp_path / "run.json"), str(tmp_path / "a.png"), False)
    with pytest.raises(UsageError, match="cannot read"):
        kv_bench.plot(str(tmp_path / "none.json"), str(tmp_path / "a.png"), False)
    with pytest.raises(UsageError, match="must end in"):
        kv_bench.plot(str(tmp_path / "run.json"), str(tmp_path / "a.jpg"), False)


def test_variants_are_named_by_what_they_lack() -> None:
    assert variants_of("full, hillinfer-no-app", ["bkp"]) == [Variant("full"), Variant("hillinfer", bkp=False, app=False)]
    variant = Variant("hillinfer", bkp=False, app=False)
    assert variant.name == "hillinfer-no-bkp-no-app" and variant.titled("HillInfer") == "HillInfer without BKP, APP"
    assert variants_of(variant.name) == [variant]


@pytest.mark.parametrize("text", ["", ",", "full,full", "hillinfer-no-x", "full-no-app", "hillinfer,hillinfer-no-"])
def test_variants_that_there_are_not_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--policy: ") as caught:
        variants_of(text)
    assert caught.value.hint
