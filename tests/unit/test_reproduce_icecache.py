"""`llmcache reproduce icecache`: verdicts follow from made-up numbers, the page keeps apart what is whose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcache import cli
from llmcache.errors import EnvironmentProblem
from llmcache.kv.bench import lengths, task
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.task_results import STOCK, Memory, TaskBench
from llmcache.report.claims import Verdict
from llmcache.report.reproduce.icecache import answers, measured, times
from llmcache.report.reproduce.icecache.measured import ICE, OURS, PAGES, REUSE, TREE, Measured
from llmcache.report.reproduce.icecache.paper import TABLE1
from llmcache.report.reproduce.icecache.run import Findings, judged
from tests.unit.reproduce_parts import verdict
from tests.unit.task_parts import bench, of_policies, speed

GOOD, FAIR, BAD = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED


def ours(own: int = 10, rival: int = 5) -> TaskBench:
    return of_policies(own, rival, tuple(OURS))


# Verdicts


@pytest.mark.parametrize(("found", "expected"), [([10] * 20, GOOD), ([10] * 19 + [5], FAIR), ([9] * 20, BAD)])
def test_every_passkey_means_every_one(found: Sequence[int], expected: Verdict) -> None:
    data = bench({(STOCK, None): [10] * 20, (ICE, 64): found, (ICE, 256): [10] * 20})
    if expected is BAD:
        data = bench({(STOCK, None): [10] * 20, (ICE, 64): found})
    assert verdict(answers.PASSKEY, "every-passkey", data, ICE) is expected


@pytest.mark.parametrize(("own", "expected"), [([100, 99], GOOD), ([98, 94], FAIR), ([94, 94], BAD)])
def test_99_percent_are_of_what_the_full_cache_answers(own: Sequence[int], expected: Verdict) -> None:
    data = bench({(STOCK, None): [100, 100], (ICE, 64): [0, 0], (ICE, 256): own})
    assert verdict(answers.RECALL, "keeps-99", data, ICE) is expected
    half = bench({(STOCK, None): [50, 50], (ICE, 256): [50, 50]})
    assert verdict(answers.RECALL, "keeps-99", half, ICE) is GOOD, "it cannot know more than the model"


def test_the_worst_context_counts() -> None:
    near = bench({(STOCK, None): [10] * 4, (ICE, 256): [10] * 4}, (1024,))
    far = bench({(STOCK, None): [10] * 4, (ICE, 256): [7] * 4}, (4096,))
    both = replace(near, rows=(*near.rows, *far.rows))
    assert verdict(answers.NEEDLE, "needles", near, ICE) is GOOD
    assert verdict(answers.NEEDLE, "needles", both, ICE) is BAD


@pytest.mark.parametrize(
    ("own", "rival", "quarter", "outperforms"), [(9, 5, GOOD, GOOD), (5, 5, GOOD, BAD), (4, 5, BAD, BAD)]
)
def test_rivals_are_beaten_or_not(own: int, rival: int, quarter: Verdict, outperforms: Verdict) -> None:
    data = ours(own, rival)
    assert verdict(answers.RECALL, "quarter-of-the-budget", data, TREE) is quarter
    assert verdict(answers.RECALL, "outperforms", data, TREE) is outperforms


def test_one_rival_that_is_as_good_makes_it_partly() -> None:
    data = ours(9, 5)
    rows = tuple(replace(row, answers=data.rows[1].answers) if row.policy == "quest" else row for row in data.rows)
    assert verdict(answers.RECALL, "outperforms", replace(data, rows=rows), TREE) is FAIR


def test_trees_are_compared_with_the_exact_scan() -> None:
    assert verdict(answers.RECALL, "near-top-k", ours(), PAGES) is GOOD
    rows = tuple(replace(row, answers=ours(5).rows[1].answers) if row.policy == PAGES else row for row in ours().rows)
    assert verdict(answers.RECALL, "near-top-k", replace(ours(), rows=rows), PAGES) is BAD


def made(
    tokens: int, policy: str, ms: float, kv: int = 100, index: int = 0, loading: float = 0.1, query: float = 0.2
) -> LengthRow:
    return LengthRow(tokens, policy, policy, speed(ms, loading * ms, query * ms), Memory(kv, index), {})


def by_length(*own: float, policy: str = ICE, kv: int = 4, index: int = 50, **parts: float) -> list[LengthRow]:
    """Lengths at which the full cache takes 10, 20, 40 .. ms and `policy` as said."""
    rows = [made(1024 << place, STOCK, 10 << place, loading=0, query=0) for place in range(len(own))]
    return rows + [made(1024 << place, policy, ms, kv, index, **parts) for place, ms in enumerate(own)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (by_length(15, 19, 20, index=1), GOOD),
        (by_length(15, 19, 20, index=2), FAIR),
        (by_length(15, 19, 20), FAIR),
        (by_length(15, 19, 50, index=1), FAIR),
        (by_length(15, 19, 50), FAIR),
        (by_length(15, 19, 20, kv=50), FAIR),
        (by_length(15, 19, 50, kv=50), BAD),
    ],
)
def test_memory_and_time_count_together(rows: list[LengthRow], expected: Verdict) -> None:
    assert verdict(times.CLAIMS, "memory-and-time", rows, ICE) is expected


def test_the_index_is_told_beside_the_pages() -> None:
    found = times.trade_off(by_length(15, 19, 20), ICE)
    assert found.values["kv_share"] == 0.04 and found.values["share_with_index"] == 0.54
    assert "54.0% with index" in found.ours and "faster from 2,048 tokens on" in found.ours


@pytest.mark.parametrize(("own", "expected"), [((5, 10, 15), GOOD), ((5, 10, 30), FAIR), ((5, 10, 60), BAD)])
def test_growth_is_compared_with_the_full_cache(own: tuple[float, ...], expected: Verdict) -> None:
    assert verdict(times.CLAIMS, "slower-growth", by_length(*own), ICE) is expected


@pytest.mark.parametrize(
    ("loading", "query", "expected"), [(0.1, 0.2, GOOD), (0.2, 0.1, FAIR), (0.5, 0.3, FAIR), (0.6, 0.1, BAD)]
)
def test_parts_are_ranked(loading: float, query: float, expected: Verdict) -> None:
    assert verdict(times.CLAIMS, "breakdown", by_length(9, 9, loading=loading, query=query), ICE) is expected


@pytest.mark.parametrize(("reuse", "expected"), [(8.0, GOOD), (9.8, FAIR), (11.0, BAD)])
def test_reuse_is_compared_with_itself(reuse: float, expected: Verdict) -> None:
    rows = [*by_length(10.0), made(1024, REUSE, reuse)]
    assert verdict(times.CLAIMS, "reuse-is-faster", rows, REUSE) is expected


# The whole


def everything() -> Measured:
    data = ours()
    passkey, recall, chain, needle = (replace(data, task=name) for name in ("passkey", "recall", "chain", "needle"))
    rows = [*by_length(15, 19, 20), made(4096, REUSE, 12, 4)]
    return Measured(passkey, recall, chain, needle, rows)


def test_the_page_shows_the_papers_numbers_and_leaves_ours_blank_beside() -> None:
    page = Findings(everything(), judged(everything())).page()
    for name, _, llama, _ in TABLE1:
        assert name in page and f">{llama:,.1f}<" in page
    assert page.count("not here") > len(TABLE1), "every row of the paper's has a blank of ours"
    assert "needs the models and LongBench" in page and "--task passkey --model DIR" in page
    assert page.count("<img") >= 3


def test_what_could_not_be_measured_is_missing_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise EnvironmentProblem("torch is missing", "install it")

    monkeypatch.setattr(task, "run", failing)
    monkeypatch.setattr(lengths, "measure", failing)
    found = measured.measure(True, lambda _: None)
    assert set(found.missing) == {"passkey", "recall", "chain", "needle", "lengths"} and judged(found) == {}
    page = Findings(found, judged(found)).page()
    assert page.count("torch is missing (install it)") == 5 and "49.5" in page


def test_the_command_writes_page_and_document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llmcache.report.reproduce.icecache.run.measure", lambda quick, progress: everything())
    with pytest.raises(SystemExit) as end:
        cli.run(cli.app, "llmcache", ["reproduce", "icecache", "-o", str(tmp_path)])
    assert end.value.code == 0
    told = json.loads((tmp_path / "icecache.json").read_text())
    assert told["schema"] == "llmcache.reproduce.icecache/1"
    assert {claim["about"] for claim in told["claims"]} == {
        "figure 6", "tables 1, 2 and 5", "tables 3 and 6", "table 4", "figures 1, 7 and 8",
    }  # fmt: skip
    assert all("paper" in claim and "rule" in claim for claim in told["claims"])
    assert told["measured_here"]["lengths"]["synthetic_prompt"] is True
