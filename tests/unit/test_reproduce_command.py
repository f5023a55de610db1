"""`llmcache reproduce`: pages and documents of all papers, an index of them, figures as they were, nothing overwritten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from matplotlib.figure import Figure

from llmcache.errors import DataError, EnvironmentProblem
from llmcache.report import REPRODUCTIONS, judge, paper_io_caching, reproduce, theme
from llmcache.report.judge import Finding, Judged, Verdict
from llmcache.report.reproduce import Reproduction, Tell
from tests.unit.command_parts import called
from tests.unit.report_parts import Page, check_alone
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.simulation_parts import loop, trace_of
from tools.bench import papers as papers_bench

NAMES = list(REPRODUCTIONS)
pytestmark = pytest.mark.usefixtures("unlaid")
VERDICTS = {verdict.value for verdict in Verdict}
GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden_papers.json").read_text())
HILLINFER = ("transfers", "systems", "beta", "accuracy")
SIZES = 4
PICTURES = {"io-caching": 12, "hillinfer": 5, "icecache": 3, "kelle": 7}


def run(*args: str | Path) -> CompletedProcess[str]:
    return called("reproduce", *args)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, unlaid: None) -> Path:
    """Page and document of each paper, done once; io-caching replays at 4 cache sizes.

    Its pictures of accesses are blank, as `test_report_plot` has them.
    """
    directory = tmp_path_factory.mktemp("results") / "new"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paper_io_caching, "QUICK_STEPS", SIZES)
        patched.setattr(paper_io_caching, "access_figure", lambda *_: Figure((1, 1)))
        assert run("all", "--quick", "-o", directory).returncode == 0
    return directory


def document(written: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / f"{name}.json").read_text())
    return found


def test_each_paper_and_an_index_are_written(written: Path) -> None:
    wanted = {f"{name}.{end}" for name in [*NAMES, "all"] for end in ("html", "json")}
    assert {path.name for path in written.iterdir()} == wanted
    papers = document(written, "all")["papers"]
    assert all(papers[name]["document"] == document(written, name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_and_its_page_have_every_claim_with_its_findings(name: str, written: Path) -> None:
    found, source = document(written, name), (written / f"{name}.html").read_text()
    page, claims = Page(source), found["claims"]
    check_alone(page, source)
    assert found["schema"] == f"llmcache.reproduce.{name}/1" and page.tags["img"] == PICTURES[name]
    assert len({(claim["about"], claim["name"]) for claim in claims}) == len(claims) >= 11
    assert source.count('class="badge ') == sum(len(claim["findings"]) for claim in claims)
    for claim in claims:
        assert claim["paper"]["section"] and claim["rule"] and claim["findings"]
        assert claim["kind"].startswith(("modelled", "measured", "computed"))
        assert f"ours ({claim['kind']})" in page.text and claim["paper"]["quote"] in page.text
        for finding in claim["findings"].values():
            assert finding["verdict"] in VERDICTS
            assert name == "kelle" or (finding["ours"] and finding["values"])
    if name in papers_bench.MEASURES:
        machine = reproduce.measurements(name)["machine"]
        assert (found["overhead"] if name == "io-caching" else found["measured_here"])["machine"] == machine
        assert machine["cpu"] in source


@pytest.mark.parametrize("name", ["kelle", "hillinfer"])
def test_what_is_modelled_is_what_it_was(name: str, written: Path) -> None:
    found = {}
    for claim in document(written, name)["claims"]:
        if not claim["kind"].startswith("measured"):
            key = f"{name}, {claim['about']}, {claim['name']}"
            findings = claim["findings"].items()
            found[key] = {one: [of.get("value", of.get("ours")), of["verdict"]] for one, of in findings}
    golden = {key: one for key, one in GOLDEN.items() if key.startswith(name)}
    assert set(found) == set(golden)
    for key, one in golden.items():
        assert set(found[key]) == set(one)
        for variant, (ours, verdict) in one.items():
            value = pytest.approx(ours, rel=1e-5) if isinstance(ours, float) else ours
            assert found[key][variant] == [value, verdict], (key, variant)


def test_io_caching_has_every_app_policy_size_and_bandwidth(written: Path) -> None:
    found = document(written, "io-caching")
    rows = found["results"]
    cells = {(row["trace"], row["policy"], row["cache_bytes"]) for row in rows}
    assert len(rows) == len(cells) == 8 * 5 * SIZES and set(found["cache_sizes_per_trace"].values()) == {SIZES}
    assert {row["trace"] for row in rows if row["inference"] == "remote"} == {"copilot", "perplexity", "claude", "gemini"}
    best = {(row["trace"], row["cache_bytes"]): row["hit_ratio"] for row in rows if row["policy"] == "belady"}
    for row in rows:
        whole_extents = 0.01 if row["policy"] == "llmcache" else 0  # come in, where Belady inserts a block
        assert 0 <= row["hit_ratio"] <= best[row["trace"], row["cache_bytes"]] + whole_extents
        assert [latency["bw"] for latency in row["latencies"]] == [10**8, 2 * 10**8, 5 * 10**8, 10**9]
    assert "synthetic" in found["traces"] and found["overhead"]["kind"].startswith("measured")
    for claim in found["claims"]:
        for finding in claim["findings"].values():
            if claim["about"] == "figures 1 and 2":
                assert finding["verdict"] == "confirmed", claim["name"]
            if claim["about"] == "loops":
                assert all(0 <= finding["values"][f"S={size}"] <= size for size in (100, 250, 500, 750, 900))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory in place of `llmcache/papers`, with the same files."""
    for file in judge.PAPERS.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["hillinfer", "icecache"])
def test_what_was_not_measured_is_said_to_be_missing(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "figure_bytes", lambda *_: b"")
    file = saved / f"{name}.json"
    parts = {"icecache": ("passkey", "recall", "chain", "needle", "lengths")}.get(name, HILLINFER)
    empty = {"tasks": {}, "lengths": {"rows": []}} if name == "icecache" else dict.fromkeys(parts)
    file.write_text(json.dumps(json.loads(file.read_text()) | empty | {"missing": dict.fromkeys(parts, "no torch")}))
    done = reproduce.reproduce(name, True, lambda _: None)
    assert not [about for about in done.claims if done.paper.kinds[about].startswith("measured")]
    assert done.page().count("no torch") == len(parts)


def test_measurements_that_cannot_be_read_are_refused_with_a_hint(saved: Path) -> None:
    for text in ("{", '{"schema": "llmcache.papers.hillinfer/0"}'):
        (saved / "hillinfer.json").write_text(text)
        with pytest.raises(DataError) as caught:
            reproduce.reproduce("hillinfer", True, lambda _: None)
        assert "tools/bench papers --measure hillinfer" in str(caught.value.hint)


def test_measuring_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = papers_bench.transfers(quick=True)["rows"]
    assert {row["share"] for row in rows} == {0.2, 0.3} and all(row["seconds"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
    took = papers_bench.overhead(trace_of(loop(200, 5, 16)), "loop")["ns_per_block"]
    assert set(took) == {"lru", "lecar", "algorithm1", "llmcache"} and min(took.values()) > 0

    def fails(quick: bool, tell: Tell) -> tuple[dict[str, Any], dict[str, str]]:
        return {"overhead": {"repeats": 1, "trace": "loop", "ns_per_block": took}}, {"all": "no torch"}

    monkeypatch.setitem(papers_bench.MEASURES, "io-caching", fails)
    told = papers_bench.save("io-caching", True, lambda _: None, tmp_path)
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path)
    assert reproduce.measurements("io-caching") == told and told["quick"] and told["missing"] == {"all": "no torch"}


# What is written, and what not


def test_files_are_replaced_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(reproduce.reproduce("kelle", True, lambda _: None), blocks=dict)  # without its pictures
    monkeypatch.setattr(reproduce, "reproduce", lambda *_: found)
    words, file = ["kelle", "--quick", "-o", str(tmp_path / "new")], tmp_path / "new" / "kelle.json"
    assert run(*words).returncode == 0
    before = file.stat().st_mtime_ns
    told = run(*words)
    assert (told.returncode, told.stdout) == (2, "") and "-o: " in told.stderr and "--force" in told.stderr
    assert file.stat().st_mtime_ns == before
    told = run(*words, "--force")
    assert (told.returncode, told.stderr) == (0, "") and file.stat().st_mtime_ns > before
    assert "not confirmed" in told.stdout and "3.94× is printed" in told.stdout and "written: " in told.stdout


def test_json_goes_to_stdout_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("icecache", "--json")
    assert told.stderr == "" and json.loads(told.stdout)["schema"] == "llmcache.reproduce.icecache/1"
    assert told.returncode == 0 and not list(tmp_path.iterdir())


def test_bad_input_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for args, named in (
        (["io-cashing"], "NAME: there is no reproduction called 'io-cashing'"),
        ([], "NAME"),
        (["io-caching", "-o", file], "-o: "),
        (["io-caching", "-o", file / "below"], "-o: "),
    ):
        told = run(*args)
        assert (told.returncode, told.stdout) == (2, "") and named in told.stderr and "Traceback" not in told.stderr


# All of them: the failure of one does not take away the others


def made(name: str) -> Reproduction:
    """A paper with a claim that has two variants."""
    paper = judge.read_paper(name)
    claim, about = paper.claims[0], next(iter(paper.kinds))
    findings = {"a": Finding(Verdict.CONFIRMED, "1 < 2", {"x": 1.0}), "b": Finding(Verdict.PARTLY, "2 = 2", {})}
    return Reproduction(name, paper, {about: [Judged(claim, findings)]}, {}, dict)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Papers that cannot be recomputed, with their errors; all others are made up, and told whether it is quick."""
    errors: dict[str, Exception] = {}

    def make(name: str, quick: bool, told: Tell) -> Reproduction:
        assert quick
        if name in errors:
            raise errors[name]
        return made(name)

    monkeypatch.setattr(reproduce, "reproduce", make)
    return errors


def test_the_index_counts_verdicts(failing: dict[str, Exception], tmp_path: Path) -> None:
    shown = run("all", "--quick", "-o", tmp_path)
    told = document(tmp_path, "all")
    assert told["schema"] == reproduce.ALL_SCHEMA and told["quick"] is True and list(told["papers"]) == NAMES
    assert all(paper["verdicts"] == {"confirmed": 1, "partly": 1, "not confirmed": 0} for paper in told["papers"].values())
    page = (tmp_path / "all.html").read_text()
    assert all(f'<a href="{name}.html">' in page for name in NAMES) and page.count("1 &lt; 2") == len(NAMES)
    lines = [line.split()[:4] for line in shown.stdout.splitlines()[1 : 1 + len(NAMES)]]
    assert shown.returncode == 0 and lines == [[name, "1", "1", "0"] for name in NAMES]


def test_one_that_fails_does_not_take_away_the_others(failing: dict[str, Exception], tmp_path: Path) -> None:
    failing[NAMES[1]] = EnvironmentProblem("torch is missing", "install it")
    failing[NAMES[2]] = RuntimeError("a bug")
    told = run("all", "--quick", "-o", tmp_path)
    papers = document(tmp_path, "all")["papers"]
    assert papers[NAMES[1]]["error"] == "torch is missing" and papers[NAMES[1]]["hint"] == "install it"
    assert papers[NAMES[2]]["exit_code"] == 1 and "RuntimeError: a bug" in papers[NAMES[2]]["error"]
    assert "document" in papers[NAMES[0]] and "document" in papers[NAMES[3]]
    assert not (tmp_path / f"{NAMES[1]}.html").exists() and (tmp_path / f"{NAMES[3]}.html").exists()
    assert "not recomputed: torch is missing" in (tmp_path / "all.html").read_text()
    assert told.returncode == 3 and "failed" in told.stdout and "Traceback" in told.stderr
    assert "llmcache: error: torch is missing\nhint: install it" in told.stderr


def test_nothing_begins_where_a_file_would_be_replaced(failing: dict[str, Exception], tmp_path: Path) -> None:
    (tmp_path / f"{NAMES[-1]}.json").write_text("mine")
    told = run("all", "--quick", "-o", tmp_path)
    assert told.returncode == 2 and "--force replaces it" in told.stderr and len(list(tmp_path.iterdir())) == 1
    assert run("all", "--quick", "-o", tmp_path, "--force").returncode == 0
