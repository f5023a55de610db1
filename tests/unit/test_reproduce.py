"""The `llmcache reproduce` command: verdicts from the rules of the papers, pages, errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from matplotlib.figure import Figure

from llmcache.errors import DataError, MissingRequirement
from llmcache.kv.bench.results import STOCK, Bench, Marks, Row, TaskBench
from llmcache.papers import REPRODUCTIONS, reproduce
from llmcache.papers import hillinfer as hill
from llmcache.papers import icecache as ice
from llmcache.papers import io_caching as io
from llmcache.papers.judge import PAPERS, Finding, Judged, Values, Verdict, holds, read_paper, values_text
from llmcache.papers.reproduce import Progress, Reproduction
from llmcache.report import theme
from tests.unit.command_parts import called
from tests.unit.report_parts import Page, check_alone
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.simulation_parts import loop, trace_of
from tests.unit.task_parts import bench, of_policies
from tools.bench import papers as papers_bench

YES, PARTLY, NO = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED
NAMES = list(REPRODUCTIONS)
CLAIMS = {name: read_paper(name).claims for name in NAMES}
MODELLED = {"io-caching": (24, 10, 13), "hillinfer": (24, 5, 16), "kelle": (65, 46, 190)}
"""Confirmed, partly confirmed and not confirmed findings of each paper that do not depend on measurements."""
SIZES = 4
PICTURES = {"io-caching": 12, "hillinfer": 5, "icecache": 3, "kelle": 6}
pytestmark = pytest.mark.usefixtures("unlaid")


def verdict(paper: str, name: str, values: Values) -> Verdict:
    """Return the verdict of a claim's rule on values."""
    return next(claim for claim in CLAIMS[paper] if claim.name == name).verdict(values)


# The judge


def test_conditions_are_evaluated_or_refused() -> None:
    values = {"a": 1.0, "b": 3.0}
    true = ("a <= 1", "a > 1 or b > 2", "b > a", "b > -1e-3 and a > 5 or a < 2")
    assert all(holds(condition, values) for condition in true)
    assert not holds("a < 1", values) and not holds("a > 1 and b > 2", values)
    for condition in ("a", "a = 1", "a <= 1 && b", "", "c > 1", "a > c"):
        with pytest.raises((ValueError, KeyError)):
            holds(condition, values)
    assert values_text({"share_of_x": 0.25, "a_ns": 2e6, "b_bytes": 4e9, "c": -3.14159}) == (
        "share of x: 25.0%; a: 2.00 ms; b: 4.00 GB; c: -3.14"
    )


# hillinfer: measured claims

FAST = {"full": 80.0, "h2o": 70.0, "prefetch": 60.0, "leoam": 50.0, "hillinfer-no-app": 20.0, "hillinfer": 10.0}


def row(name: str, token_ms: float, scored: float = 0.0, beta: float | None = 4.0) -> Row:
    stages = {"evaluate": 1e6, "fetch": 1e6, "compute": 1e6, "update": 0.0}
    moved = {"ssd to cpu, score": scored, "ssd to cpu, fetch": 1e6}
    return Row(name, name.title(), token_ms * 1e6, stages, 0.0, 0.5, moved, beta)


def runs() -> Bench:
    scored = {"prefetch": 1e6, "hillinfer": 1e4}
    return Bench("measured", {}, tuple(row(name, time, scored.get(name, 0.0)) for name, time in FAST.items()))


def sweep(*times: float) -> Values:
    rows = tuple(row("hillinfer", time, beta=2.0**place) for place, time in enumerate(times))
    return hill.beta_values(Bench("measured", {}, rows, Marks(4e9, 1e9, None)))


def accuracy(at_02: float, at_005: float) -> hill.Claims:
    by_system = {"hillinfer": {"0.05": at_005, "0.2": at_02, "0.4": 0.95}}
    return hill.accuracy_values({"tokens": 4096, "answers": 256, "full": 0.95, "by_system": by_system}, "hillinfer")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (hill.transfer_values({0.2: {1024: 1.0, 2048: 0.5}, 0.3: {1024: 2.0, 2048: 0.4}}), [NO, PARTLY]),
        (hill.run_values(runs()), [YES, YES, YES]),  # measured here: speed-ups, stages, bytes over the link
        ({"beta-here": sweep(9, 8, 2, 1, 9)}, [YES]),
        ({"beta-here": sweep(1, 2, 3, 4, 5)}, [NO]),
        (accuracy(0.5, 0.5), [NO, PARTLY]),
        (accuracy(0.95, 0.95), [YES, PARTLY]),
    ],
)
def test_hillinfer_is_judged_by_measured_values(found: hill.Claims, expected: list[Verdict]) -> None:
    assert [verdict("hillinfer", name, values) for name, values in found.items()] == expected


# icecache

ICE, TREE, PAGES = ice.JUDGED


def answered(own: Sequence[int], full: Sequence[int]) -> TaskBench:
    """Return results that all answer `full`, except IceCache: `own` with the largest budget, nothing with a small one."""
    return bench({(STOCK, None): full, (ICE, 64): [0] * len(own), (ICE, 256): own})


EVERY, MOST = (bench({(STOCK, None): [10] * 20, (ICE, 64): [right] * 20}) for right in (10, 9))
BETTER, EQUAL, WORSE = (of_policies(own, 5, ice.JUDGED) for own in (9, 5, 4))
ALL, FEWER = (answered([right] * 2, [100] * 2) for right in (99, 94))
LIKE_QUEST = replace(
    BETTER, rows=tuple(replace(one, answers=EQUAL.rows[1].answers) if one.policy == PAGES else one for one in BETTER.rows)
)


@pytest.mark.parametrize(
    ("name", "values", "policy", "confirming", "other"),
    [
        ("every-passkey", ice.every_passkey, ICE, EVERY, MOST),
        ("keeps-99", ice.kept, ICE, ALL, FEWER),
        ("keeps-99", ice.kept, ICE, answered([50, 50], [50, 50]), FEWER),  # as good as the full cache is enough
        ("quarter-of-the-budget", ice.quarter, TREE, EQUAL, WORSE),
        ("outperforms", ice.outperforms, TREE, BETTER, EQUAL),  # equal is not better
        ("near-top-k", ice.near_exact, PAGES, BETTER, LIKE_QUEST),
    ],
)
def test_answers_are_judged_against_the_full_cache_and_rivals(
    name: str, values: Callable[[TaskBench, str], Values], policy: str, confirming: TaskBench, other: TaskBench
) -> None:
    assert [verdict("icecache", name, values(data, policy)) for data in (confirming, other)] == [YES, NO]


# The command


def run(*args: str | Path) -> CompletedProcess[str]:
    return called("reproduce", *args)


def document(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, unlaid: None) -> Path:
    """Write page and document of each paper once: io-caching at 4 cache sizes and without figures of accesses."""
    directory = tmp_path_factory.mktemp("results") / "new"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(io, "QUICK_STEPS", SIZES)
        patched.setattr(io, "access_figure", lambda *_: Figure((1, 1)))
        assert run("all", "--quick", "-o", directory).returncode == 0
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_a_document_and_its_page_have_every_claim_with_its_findings(name: str, written: Path) -> None:
    found, source = document(written, name), (written / f"{name}.html").read_text()
    assert document(written, "all")["papers"][name]["document"] == found
    page, claims = Page(source), found["claims"]
    check_alone(page, source)
    assert found["schema"] == f"llmcache.reproduce.{name}/1" and page.tags["img"] == PICTURES[name]
    assert len({(claim["about"], claim["name"]) for claim in claims}) == len(claims) >= 11
    assert source.count('class="badge ') == sum(len(claim["findings"]) for claim in claims)
    for claim in claims:
        assert claim["paper"]["section"] and claim["rule"] and claim["findings"]
        assert claim["kind"].startswith(("modelled", "measured", "computed"))
        assert f"ours ({claim['kind']})" in page.text and claim["paper"]["quote"] in page.text
        assert all("value" in of or (of["ours"] and of["values"]) for of in claim["findings"].values())
        for of in claim["findings"].values():  # only times and bytes may be large
            assert all(value < 1e4 or key.endswith(("_ns", "bytes")) for key, value in of.get("values", {}).items())
    if name in papers_bench.MEASURES:
        machine = reproduce.measurements(name)["machine"]
        assert (found["overhead"] if name == "io-caching" else found["measured_here"])["machine"] == machine
        assert machine["cpu"] in source


@pytest.mark.parametrize(("name", "counts"), MODELLED.items())
def test_modelled_findings_keep_their_verdicts(name: str, counts: tuple[int, int, int], written: Path) -> None:
    modelled = [claim for claim in document(written, name)["claims"] if not claim["kind"].startswith("measured")]
    found = Counter(finding["verdict"] for claim in modelled for finding in claim["findings"].values())
    assert tuple(found[verdict.value] for verdict in (YES, PARTLY, NO)) == counts


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use a directory with the same measurements in place of `llmcache/papers`."""
    for file in PAPERS.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["hillinfer", "icecache"])
def test_missing_measurements_are_shown_with_their_reason(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "figure_bytes", lambda *_: b"")
    file = saved / f"{name}.json"
    parts: tuple[str, ...] = ("transfers", "systems", "beta", "accuracy")
    empty: dict[str, Any] = dict.fromkeys(parts)
    if name == "icecache":
        parts, empty = ("passkey", "recall", "chain", "needle", "lengths"), {"tasks": {}, "lengths": {"rows": []}}
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


def test_written_measurements_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = papers_bench.transfers(quick=True)["rows"]
    assert {row["share"] for row in rows} == {0.2, 0.3} and all(row["seconds"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
    took = papers_bench.overhead(trace_of(loop(200, 5, 16)), "loop")["ns_per_block"]
    assert set(took) == {"lru", "lecar", "algorithm1", "llmcache"} and min(took.values()) > 0
    found = {"overhead": {"repeats": 1, "trace": "loop", "ns_per_block": took}}, {"all": "no torch"}
    monkeypatch.setitem(papers_bench.MEASURES, "io-caching", lambda *_: found)
    saved = papers_bench.save("io-caching", True, lambda _: None, tmp_path)
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path)
    assert reproduce.measurements("io-caching") == saved and saved["quick"] and saved["missing"] == {"all": "no torch"}


# Written files and errors


def test_files_are_replaced_only_with_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(reproduce.reproduce("kelle", True, lambda _: None), blocks=dict)  # without its figures
    monkeypatch.setattr(reproduce, "reproduce", lambda *_: found)
    words, file = ["kelle", "-o", str(tmp_path / "new")], tmp_path / "new" / "kelle.json"
    assert run(*words).returncode == 0
    before = file.stat().st_mtime_ns
    shown = run(*words)
    assert (shown.returncode, shown.stdout) == (2, "") and "-o: " in shown.stderr and "--force" in shown.stderr
    assert file.stat().st_mtime_ns == before
    shown = run(*words, "--force")
    assert (shown.returncode, shown.stderr) == (0, "") and file.stat().st_mtime_ns > before
    assert "not confirmed" in shown.stdout and "the paper has 3.94×" in shown.stdout and "written: " in shown.stdout
    monkeypatch.chdir(tmp_path / "new")
    shown = run("kelle", "--json")
    assert json.loads(shown.stdout)["schema"] == "llmcache.reproduce.kelle/1" and len(list(file.parent.iterdir())) == 2


def test_bad_input_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for args, named in (
        (["io-cashing"], "NAME: there is no reproduction called 'io-cashing'"),
        ([], "NAME"),
        (["io-caching", "-o", file], "-o: "),
        (["io-caching", "-o", file / "below"], "-o: "),
    ):
        shown = run(*args)
        assert (shown.returncode, shown.stdout) == (2, "") and named in shown.stderr and "Traceback" not in shown.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Return the errors to raise by paper; all other papers have one invented claim with two variants."""
    errors: dict[str, Exception] = {}

    def make(name: str, quick: bool, _progress: Progress) -> Reproduction:
        assert quick
        if name in errors:
            raise errors[name]
        paper = read_paper(name)
        findings = {"a": Finding(YES, "1 < 2", {"x": 1.0}), "b": Finding(PARTLY, "2 = 2", {})}
        judged = {next(iter(paper.kinds)): [Judged(replace(paper.claims[0], paper=None), findings)]}
        return Reproduction(name, paper, judged, {}, dict)

    monkeypatch.setattr(reproduce, "reproduce", make)
    return errors


def test_a_failing_paper_does_not_affect_the_others(failing: dict[str, Exception], tmp_path: Path) -> None:
    failing[NAMES[1]] = MissingRequirement("torch is missing", "install it")
    failing[NAMES[2]] = RuntimeError("a bug")
    (tmp_path / f"{NAMES[-1]}.json").write_text("mine")
    shown = run("all", "--quick", "-o", tmp_path)
    assert shown.returncode == 2 and "--force replaces it" in shown.stderr and len(list(tmp_path.iterdir())) == 1
    shown = run("all", "--quick", "-o", tmp_path, "--force")
    found = document(tmp_path, "all")
    papers = found["papers"]
    assert found["schema"] == reproduce.ALL_SCHEMA and found["quick"] is True and list(papers) == NAMES
    assert papers[NAMES[0]]["verdicts"] == {"confirmed": 1, "partly": 1, "not confirmed": 0}
    assert papers[NAMES[1]]["error"] == "torch is missing" and papers[NAMES[1]]["hint"] == "install it"
    assert papers[NAMES[2]]["exit_code"] == 1 and "RuntimeError: a bug" in papers[NAMES[2]]["error"]
    assert "document" in papers[NAMES[0]] and "document" in papers[NAMES[3]]
    assert not (tmp_path / f"{NAMES[1]}.html").exists() and (tmp_path / f"{NAMES[3]}.html").exists()
    assert "not recomputed: torch is missing" in (tmp_path / "all.html").read_text()
    assert shown.returncode == 3 and "failed" in shown.stdout and "Traceback" in shown.stderr
    assert "llmcache: error: torch is missing\nhint: install it" in shown.stderr
