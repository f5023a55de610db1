"""Claims of papers: verdicts follow from made-up numbers by the rules in the papers' files, whichever way they point.

What the models of hillinfer and kelle give is held by golden figures (test_reproduce_command).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from llmcache.cache.sizing import PHONE, WATCH
from llmcache.kv.bench.results import STOCK, Bench, Marks, Row, TaskBench
from llmcache.kv.planning.latency import SYSTEMS
from llmcache.kv.planning.models import MODELS
from llmcache.report import REPRODUCTIONS
from llmcache.report import paper_hillinfer as hill
from llmcache.report import paper_icecache as ice
from llmcache.report import paper_io_caching as io
from llmcache.report.judge import Measure, Rule, Verdict, holds, judge, number, read_paper
from tests.unit.task_parts import bench, of_policies

YES, PARTLY, NO = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED
PAPERS = {name: read_paper(name) for name in REPRODUCTIONS}


def verdict(paper: str, name: str, measure: Measure) -> Verdict:
    """What the rule of a claim says of a measure."""
    return next(claim for claim in PAPERS[paper].claims if claim.name == name).rule.verdict(measure.values)


# The judge


def test_conditions_mean_what_they_say_or_are_refused() -> None:
    values = {"a": 1.0, "b": 3.0}
    true = ("a <= 1", "a > 1 or b > 2", "b > a", "b > -1e-3 and a > 5 or a < 2")
    assert all(holds(condition, values) for condition in true)
    assert not holds("a < 1", values) and not holds("a > 1 and b > 2", values)
    for condition in ("a", "a = 1", "a <= 1 && b", "", "c > 1", "a > c"):
        with pytest.raises((ValueError, KeyError)):
            holds(condition, values)


@pytest.mark.parametrize(
    ("rule", "paper", "ours", "expected"),
    [
        ("as printed", 1.05, 1.0537, YES),
        ("gain", 1.19, 1.0, NO),  # within 25 %, but no gain at all
        ("at most", 2.67, 2.67, YES),
        ("share", 1.0, 0.67, PARTLY),
        ("bound of aep-bound", 2.39, 2.63, YES),
    ],
)
def test_rules_for_numbers_judge_as_they_say(rule: str, paper: float, ours: float, expected: Verdict) -> None:
    kelle = PAPERS["kelle"]
    claim = replace(kelle.claims[0], rule=kelle.rules[rule], paper=paper, why="")
    (judged,) = judge(replace(kelle, claims=[claim]), {claim.about: {claim.name: {"ours": ours}}})[claim.about]
    assert judged.findings["ours"].verdict is expected
    assert number(ours) in judged.findings["ours"].words and number(paper) in judged.findings["ours"].words


def test_a_claim_of_something_measured_needs_a_measure_and_what_is_not_measured_is_left_out() -> None:
    paper = PAPERS["icecache"]
    assert judge(paper, {}) == {}
    with pytest.raises(KeyError):
        judge(paper, {"figure 6": {}})
    with pytest.raises(KeyError, match="share"):
        Rule("", "share >= 1").verdict({"hits": 1.0})


# io-caching: hit ratios and latencies

Ratios = Sequence[float]
LINE = [0.2, 0.4, 0.6, 0.8, 0.9]
STEP = [0.0, 0.0, 0.0, 0.0, 0.9]  # what LRU makes of a single long loop


# Rows: 100, 200, 500, 1000 MB/s; columns: small to large cache.
def app(name: str, own: Ratios, rival: Ratios = (), latency: Sequence[Ratios] = ()) -> io.App:
    """An application of 1000 accesses whose caches are 1, 2, … MB; `rival`: of LRU and LeCaR; `latency`: by bandwidth."""
    sizes = np.arange(1, 1 + len(own or latency[0])).astype(np.float64) * 1e6
    ratios = {"llmcache": own, "algorithm1": rival, "lru": rival, "lecar": rival}
    hits = {policy: np.array(values, float) for policy, values in ratios.items()}
    return io.App(name, name.title(), False, int(sizes[-1]), 1000, sizes, hits, {"llmcache": np.array(latency, float)})


def shifted(by: float) -> list[float]:
    return [value + by for value in LINE]


BOTH = ("text_embedder", "text_classification")


@pytest.mark.parametrize(
    ("name", "names", "confirming", "other"),
    [
        ("higher-than-lru", io.ON_DEVICE, STEP, shifted(0.05)),
        ("lru-stands-still", io.ON_DEVICE, STEP, LINE),
        ("lru-near-baseline", BOTH, STEP, LINE),
        ("lru-near-baseline", BOTH, [0.1] * 5, LINE),  # it never gains anything
        ("lecar-sometimes-ai_notes", ["ai_notes"], [0.22, *LINE[1:]], LINE),
        ("lecar-sometimes-text_classification", ["text_classification"], [0.22, *LINE[1:]], LINE),
        ("outperforms-lecar", ["ai_translate"], shifted(-0.1), shifted(0.05)),
        ("higher-overall", BOTH, shifted(-0.1), shifted(0.1)),
        ("lecar-fluctuates", io.ON_DEVICE, [0.2, 0.4, 0.3, 0.8, 0.9], LINE),
    ],
)
def test_hit_ratios(name: str, names: Collection[str], confirming: Ratios, other: Ratios) -> None:
    """LRU and LeCaR hit as said in the applications `names`; else every policy hits alike."""
    for rival, expected in ((confirming, YES), (other, NO)):
        apps = {each: app(each, LINE, rival if each in names else LINE) for each in io.ON_DEVICE}
        assert verdict("io-caching", name, io.FIGURE4[name](apps, "llmcache")) is expected


# io-caching: patterns, loops, overhead, hardware


MB = 10**6


@pytest.mark.parametrize(
    ("name", "stated", "changes", "changed"),
    [
        ("watch-loop", YES, {"watch": replace(WATCH, cache_bytes=32 * MB)}, NO),
        ("phone-loops", YES, {"phone": replace(PHONE, bandwidth=500 * MB)}, NO),
        ("apps-fit", YES, {"watch": replace(WATCH, bandwidth=MB, cache_bytes=5 * MB)}, NO),
        ("notes-loop-size", YES, {"notes_blocks": (0, 20_000)}, NO),
        ("large-does-not-fit", YES, {"watch": replace(WATCH, cache_bytes=600 * MB)}, NO),
        ("parameters", PARTLY, {"phone": replace(PHONE, cache_bytes=1000 * MB)}, YES),
        ("insensitive-to-t", PARTLY, {"phone": replace(PHONE, bandwidth=100 * MB)}, YES),
        # Were BW x T one block per loop, the product would be right.
        ("sign-of-formula", NO, {"watch": replace(WATCH, bandwidth=40_960, cache_bytes=74 * MB)}, YES),
        ("floor-of-formula", NO, {"example": (10, Fraction(2))}, YES),
    ],
)
def test_hardware(name: str, stated: Verdict, changes: Any, changed: Verdict) -> None:
    measures = io.hardware()[name], io.hardware(**changes)[name]
    assert [verdict("io-caching", name, measure) for measure in measures] == [stated, changed]


# hillinfer: what the models give, and what is measured

SHARE = hill.READINGS["share-20"]
FAST = {"full": 80.0, "h2o": 70.0, "prefetch": 60.0, "leoam": 50.0, "hillinfer-no-app": 20.0, "hillinfer": 10.0}


def points(*rows: Ratios) -> list[hill.ModelledCase]:
    """Points of one model, by context, at which the systems take as long as each of `rows` says, in their order."""
    full = replace(SHARE.latency("full", MODELS["Qwen-7B"], 4096), prefill_ns=0)
    made = [{name: replace(full, token_ns=ns) for name, ns in zip(SYSTEMS, row, strict=True)} for row in rows]
    return [hill.ModelledCase("Qwen-7B", 1024 << place, latencies) for place, latencies in enumerate(made)]


SHRINKING = hill.Transfers("measured", 1, {0.2: {1024: 1.0, 2048: 0.5}, 0.3: {1024: 2.0, 2048: 0.4}})
FASTER = points((8, 7, 6, 5, 1), (8.5, 7.5, 6.5, 5.5, 1))


def row(name: str, token_ms: float, scored: float = 0.0, beta: float | None = 4.0) -> Row:
    stages = {"evaluate": 1e6, "fetch": 1e6, "compute": 1e6, "update": 0.0}
    moved = {"ssd to cpu, score": scored, "ssd to cpu, fetch": 1e6}
    return Row(name, name.title(), token_ms * 1e6, stages, 0.0, 0.5, moved, beta)


def runs(device: float = 1e4, **times: float) -> Bench:
    scored = {"prefetch": 1e6, "hillinfer": device}
    rows = tuple(row(name, time, scored.get(name, 0.0)) for name, time in (FAST | times).items())
    return Bench("measured", {"context": 2048}, rows)


def sweep(*times: float) -> Measure:
    rows = tuple(row("hillinfer", time, beta=2.0**place) for place, time in enumerate(times))
    return hill.beta_measure(Bench("measured", {}, rows, Marks(4e9, 1e9, None)))


def accuracy(at_02: float, at_005: float) -> hill.ClaimMeasures:
    by_system = {"hillinfer": {"0.05": at_005, "0.2": at_02, "0.4": 0.95}}
    return hill.accuracy_measures({"tokens": 4096, "answers": 256, "full": 0.95, "by_system": by_system}, "hillinfer")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (SHRINKING.measures(), [NO, PARTLY]),
        (hill.speedup_measures(FASTER), [YES, YES, YES]),
        ({"order": hill.systems_in_order(FASTER)}, [YES]),
        ({"beta-rule": hill.sweep_measure((1, 2, 3, 4, 5, 6))}, [NO]),
        # what ran here: speed-ups, parts, bytes over the link
        (hill.run_measures(runs()), [YES, YES, YES]),
        (hill.run_measures(runs(5e5, hillinfer=19.9)), [NO, PARTLY, NO]),
        ({"beta-here": sweep(9, 8, 2, 1, 9)}, [YES]),
        ({"beta-here": sweep(1, 2, 3, 4, 5)}, [NO]),
        (accuracy(0.95, 0.5), [YES, YES]),
        (accuracy(0.5, 0.5), [NO, PARTLY]),
        (accuracy(0.95, 0.95), [YES, PARTLY]),
    ],
)
def test_hillinfer_is_judged_by_its_numbers(found: hill.ClaimMeasures, expected: list[Verdict]) -> None:
    assert [verdict("hillinfer", name, measure) for name, measure in found.items()] == expected


# icecache

ICE, TREE, PAGES = ice.OURS


def answered(own: Sequence[int], full: Sequence[int], contexts: Sequence[int] = (1024,)) -> TaskBench:
    """Results in which the largest budget of IceCache answers `own`, and a small one nothing, where all answer `full`."""
    return bench({(STOCK, None): full, (ICE, 64): [0] * len(own), (ICE, 256): own}, contexts)


FAR = bench({(STOCK, None): [10] * 4, (ICE, 256): [7] * 4}, (4096,))
EVERY, MOST = (bench({(STOCK, None): [10] * 20, (ICE, 64): [right] * 20}) for right in (10, 9))


def replaced(data: TaskBench, policy: str, of: str) -> TaskBench:
    """Results in which `policy` answers as `of` does."""
    answers = next(one.answers for one in data.rows if one.policy == of)
    return replace(data, rows=tuple(replace(one, answers=answers) if one.policy == policy else one for one in data.rows))


BETTER, EQUAL, WORSE = (of_policies(own, 5, ice.OURS) for own in (9, 5, 4))
ALL, FEWER = (answered([right] * 2, [100] * 2) for right in (99, 94))


@pytest.mark.parametrize(
    ("name", "measure", "policy", "confirming", "other"),
    [
        ("every-passkey", ice.every_passkey, ICE, EVERY, MOST),
        ("keeps-99", ice.kept, ICE, ALL, FEWER),
        ("keeps-99", ice.kept, ICE, answered([50, 50], [50, 50]), FEWER),  # it cannot know more than the model
        ("needles", ice.kept, ICE, ALL, replace(FAR, rows=(*ALL.rows, *FAR.rows))),  # the worst context counts
        ("quarter-of-the-budget", ice.quarter, TREE, EQUAL, WORSE),
        ("outperforms", ice.outperforms, TREE, BETTER, EQUAL),  # as good is not better
        ("near-top-k", ice.near_exact, PAGES, BETTER, replaced(BETTER, PAGES, "quest")),
    ],
)
def test_answers_are_judged_against_the_full_cache_and_rivals(
    name: str, measure: Callable[[TaskBench, str], Measure], policy: str, confirming: TaskBench, other: TaskBench
) -> None:
    assert [verdict("icecache", name, measure(data, policy)) for data in (confirming, other)] == [YES, NO]
