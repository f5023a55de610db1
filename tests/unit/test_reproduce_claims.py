"""Claims of papers: each verdict follows from made-up numbers by the rule in the paper's file, whichever way they point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from llmcache.cache.classify import classify
from llmcache.cache.latency import FetchModel
from llmcache.cache.sizing import PHONE, WATCH
from llmcache.kv.bench.results import STOCK, Answers, Bench, Marks, Observed, Row, TaskBench
from llmcache.kv.planning import MODELS, SYSTEMS
from llmcache.report import REPRODUCTIONS
from llmcache.report import paper_hillinfer as hill
from llmcache.report import paper_icecache as ice
from llmcache.report import paper_io_caching as io
from llmcache.report.judge import Measure, Rule, Verdict, holds, judge, number, read_paper
from llmcache.trace.shapes import SHAPES
from tests.unit.simulation_parts import loop, trace_of
from tests.unit.task_parts import bench, of_policies

YES, PARTLY, NO = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED
PAPERS = {name: read_paper(name) for name in REPRODUCTIONS}


def verdict(paper: str, name: str, measure: Measure) -> Verdict:
    """What the rule of a claim says of a measure."""
    return next(claim for claim in PAPERS[paper].claims if claim.name == name).rule.verdict(measure.values)


# The judge


@pytest.mark.parametrize(
    ("condition", "true"),
    [
        ("a <= 1", True),
        ("a < 1", False),
        ("a >= 1 and b > 2", True),
        ("a > 1 and b > 2", False),
        ("a > 1 or b > 2", True),
        ("b > a", True),
        ("b > -1e-3 and a > 5 or a < 2", True),
    ],
)
def test_conditions_mean_what_they_say(condition: str, true: bool) -> None:
    assert holds(condition, {"a": 1.0, "b": 3.0}) is true


@pytest.mark.parametrize("condition", ["a", "a = 1", "a <= 1 && b", "", "c > 1", "a > c"])
def test_conditions_that_are_none_are_refused(condition: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        holds(condition, {"a": 1.0})


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_claim_is_whole(name: str) -> None:
    paper = PAPERS[name]
    keys = [(claim.about, claim.name) for claim in paper.claims]
    assert len(set(keys)) == len(keys) and {claim.about for claim in paper.claims} <= set(paper.kinds)
    shown = {about for section in paper.sections for about in section.get("about", ())}
    assert shown == set(paper.kinds)
    for claim in paper.claims:
        assert claim.quote and claim.section and claim.rule.words and claim.rule.confirmed


@pytest.mark.parametrize(
    ("rule", "paper", "ours", "expected"),
    [
        ("close", 2.0, 2.1, YES),
        ("close", 2.0, 1.51, PARTLY),
        ("close", 2.0, 2.51, NO),
        ("as printed", 1.05, 1.0537, YES),
        ("equal", 4.0, 4.0, YES),
        ("equal", 4.0, 4.01, PARTLY),
        ("gain", 1.32, 1.34, YES),
        ("gain", 1.19, 1.0, NO),  # within 25 %, but no gain at all
        ("gain", 0.61, 0.75, PARTLY),
        ("gain", 0.61, 1.18, NO),
        ("at most", 2.67, 2.67, YES),
        ("at most", 2.67, 23.8, NO),
        ("at least", 2.0, 2.28, YES),
        ("at least", 2.0, 1.9, NO),
        ("share", 1.0, 1.0, YES),
        ("share", 1.0, 0.67, PARTLY),
        ("share", 1.0, 0.5, NO),
        ("bound of aep-bound", 3.16, 2.42, NO),
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(19_456, "19,456"), (0.0302, "0.0302"), (5.2e-5, "5.20e-05"), (2.08, "2.08"), (1054.2, "1,054"), (118.4, "118.4")],
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


# io-caching: hit ratios and latencies

Ratios = Sequence[float]
LINE = [0.2, 0.4, 0.6, 0.8, 0.9]
STEP = [0.0, 0.0, 0.0, 0.0, 0.9]  # what LRU makes of a single long loop
BENT = [0.2, 0.4, 0.3, 0.8, 0.9]
EVEN = {"llmcache": LINE, "lecar": LINE}
# Rows: 100, 200, 500, 1000 MB/s; columns: small to large cache.
BY_BANDWIDTH: list[list[float]] = [[10, 9.5, 9], [8, 7.6, 7.2], [6, 5.7, 5.4], [5.8, 5.5, 5.2]]
BY_SIZE: list[list[float]] = [[10, 5, 1], [9, 4.5, 0.9], [8, 4, 0.8], [7.8, 3.9, 0.78]]
LATE: list[list[float]] = [[10, 9.9, 1], [8, 7.9, 0.8], [6, 5.9, 0.6], [5.8, 5.7, 0.58]]  # once all fits
RISING: list[list[float]] = [[10, 9, 11], *BY_BANDWIDTH[1:]]


def app(name: str, hits: Mapping[str, Ratios], latency: Sequence[Ratios] = ()) -> io.App:
    """An application of 1000 accesses whose caches are 1, 2, … MB; `latency`: rows by bandwidth, for every policy."""
    sizes = np.arange(1, 1 + len(next(iter([*hits.values(), *latency])))).astype(np.float64) * 1e6
    latencies = {policy: np.array(latency, float) for policy in ("algorithm1", "llmcache")}
    ratios = {policy: np.array(values, float) for policy, values in hits.items()}
    return io.App(name, name.title(), False, int(sizes[-1]), 1000, sizes, ratios, latencies)


def by_hits(name: str, hits: Mapping[str, Ratios], aware: str = "llmcache", **other: Mapping[str, Ratios]) -> Verdict:
    """The verdict of a claim of figure 4 if every application has `hits`, but those named in `other`."""
    apps = {key: app(key, other.get(key, hits)) for key in io.ON_DEVICE}
    return verdict("io-caching", name, io.FIGURE4[name](apps, aware))


def shifted(by: float) -> list[float]:
    return [value + by for value in LINE]


def against(lecar: list[float]) -> dict[str, list[float]]:
    return {"llmcache": LINE, "lecar": lecar}


@pytest.mark.parametrize(
    ("name", "hits", "other", "expected"),
    [
        ("higher-than-lru", {"llmcache": LINE, "lru": STEP}, {}, YES),
        ("higher-than-lru", {"llmcache": LINE, "lru": LINE}, {}, YES),
        ("higher-than-lru", {"llmcache": [*LINE[:4], 0.7], "lru": STEP}, {}, PARTLY),  # below at one size of five
        ("higher-than-lru", {"llmcache": STEP, "lru": LINE}, {}, NO),
        ("lru-stands-still", {"llmcache": LINE, "lru": STEP}, {}, YES),
        ("lru-stands-still", {"llmcache": LINE, "lru": STEP}, {"ai_notes": {"llmcache": LINE, "lru": LINE}}, PARTLY),
        ("lru-stands-still", {"llmcache": LINE, "lru": LINE}, {}, NO),
        ("lru-stands-still", {"llmcache": STEP, "lru": STEP}, {}, NO),
        ("lru-near-baseline", {"llmcache": LINE, "lru": STEP}, {}, YES),
        ("lru-near-baseline", {"llmcache": LINE, "lru": STEP}, {"text_embedder": {"llmcache": LINE, "lru": LINE}}, PARTLY),
        ("lru-near-baseline", {"llmcache": LINE, "lru": LINE}, {}, NO),
        ("lru-near-baseline", {"llmcache": STEP, "lru": STEP}, {}, NO),
        ("lru-near-baseline", {"llmcache": LINE, "lru": [0.1] * 5}, {}, YES),  # it never gains anything
        ("lecar-sometimes-ai_notes", EVEN, {"ai_notes": against([0.22, *LINE[1:]])}, YES),
        ("lecar-sometimes-ai_notes", EVEN, {"ai_notes": against([0.5, *LINE[1:]])}, PARTLY),  # by more than slightly
        ("lecar-sometimes-ai_notes", EVEN, {"ai_notes": against(shifted(0.02))}, PARTLY),  # everywhere
        ("lecar-sometimes-ai_notes", EVEN, {}, NO),
        ("lecar-sometimes-text_classification", EVEN, {"text_classification": against([0.22, *LINE[1:]])}, YES),
        ("outperforms-lecar", EVEN, {"ai_translate": against(shifted(-0.1))}, YES),
        ("outperforms-lecar", EVEN, {"ai_translate": against(shifted(-0.02))}, PARTLY),
        ("outperforms-lecar", EVEN, {"ai_translate": against([0.5, 0.0, 0.0, 0.9, 0.9])}, PARTLY),  # below at two sizes
        ("outperforms-lecar", EVEN, {"ai_translate": against(shifted(0.05))}, NO),
        ("higher-overall", against(shifted(-0.1)), {"ai_notes": against(shifted(0.1))}, YES),
        ("higher-overall", against(shifted(-0.1)), {"text_embedder": against(shifted(0.1))}, PARTLY),
        ("higher-overall", against(shifted(0.1)), {"ai_notes": against(shifted(-0.1))}, NO),
        ("lecar-fluctuates", against(BENT), {}, YES),
        ("lecar-fluctuates", {"llmcache": [0.2, 0.4, 0.37, 0.8, 0.9], "lecar": BENT}, {}, PARTLY),
        ("lecar-fluctuates", EVEN, {}, NO),
        ("lecar-fluctuates", {"llmcache": BENT, "lecar": LINE}, {}, NO),
    ],
)
def test_hit_ratios(name: str, hits: Any, other: Any, expected: Verdict) -> None:
    assert by_hits(name, hits, **other) is expected


def test_both_readings_of_the_policy_are_judged_apart() -> None:
    hits = {"llmcache": LINE, "algorithm1": STEP, "lru": LINE}
    assert [by_hits("higher-than-lru", hits, aware) for aware in ("llmcache", "algorithm1")] == [YES, NO]


def test_flat_regions_end_where_a_policy_has_all_it_can_get() -> None:
    shares = [io.flat_share(app("a", {"lru": [0.1, *rest, 0.9]}), "lru") for rest in ([0.9, 0.9], [0.1, 0.1], [0.2, 0.2])]
    assert shares == pytest.approx([0, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "rows", "other", "expected"),
    [
        ("latency-falls", BY_BANDWIDTH, {}, YES),
        ("latency-falls", BY_BANDWIDTH, {"ai_notes": RISING}, PARTLY),
        ("latency-falls", BY_BANDWIDTH[::-1], {}, NO),
        ("knee-of-bandwidth", BY_BANDWIDTH, {}, YES),
        ("knee-of-bandwidth", BY_BANDWIDTH, {"text_embedder": [[10.0], [9.5], [9.0], [8.9]]}, PARTLY),
        ("knee-of-bandwidth", [[8.0], [4.0], [2.0], [1.0]], {}, NO),  # no set-up latency: every doubling counts
        ("size-counts-less", BY_BANDWIDTH, {}, YES),
        ("size-counts-less", LATE, {}, PARTLY),
        ("size-counts-less", BY_SIZE, {}, NO),
        ("translate-sensitive", BY_BANDWIDTH, {"ai_translate": BY_SIZE}, YES),
        ("translate-sensitive", BY_SIZE, {"ai_translate": BY_BANDWIDTH}, PARTLY),  # steeper where slow
        ("translate-sensitive", BY_SIZE, {"ai_translate": [[10.0] * 3] * 4}, NO),
    ],
)
def test_latencies(name: str, rows: Any, other: Any, expected: Verdict) -> None:
    apps = {key: app(key, {}, other.get(key, rows)) for key in io.ON_DEVICE}
    assert verdict("io-caching", name, io.FIGURE5[name](apps, "llmcache")) is expected


def test_writes_that_fetch_count_every_access() -> None:
    latency = io.writes_fetch_too({"a": app("a", {"llmcache": [0.0, 0.5, 1.0]})})["a"].latency_s["llmcache"]
    assert latency.shape == (4, 3)
    assert latency[0, 1] == pytest.approx(FetchModel().latency_s(1000, 500, 100_000_000))
    assert latency[3, 2] == pytest.approx(FetchModel().gpu_s(1000))


# io-caching: patterns, loops, overhead, hardware


def test_patterns_are_judged_by_what_the_detector_finds() -> None:
    scan = classify([trace_of(loop(200, 1, 16))])
    made = {name: classify([SHAPES[name]()]) for name in (*io.ON_DEVICE, "gemini")}

    def found(loops_in: tuple[str, ...], remote: str = "gemini") -> dict[str, Verdict]:
        classes = {name: made[name] if name in loops_in else scan for name in io.ON_DEVICE} | {"remote": made[remote]}
        return {name: verdict("io-caching", name, one) for name, one in io.patterns(classes, ("remote",)).items()}

    everything, some, none = found(io.ON_DEVICE), found(("ai_notes",), "ai_notes"), found(())
    for name in ("loops-detected", "three-traits"):
        assert [one[name] for one in (everything, some, none)] == [YES, PARTLY, NO]
    assert [one["remote-has-no-loops"] for one in (everything, some)] == [YES, NO]


@pytest.mark.parametrize(
    ("name", "measure", "expected"),
    [
        ("pinned-loop", io.loop_hits({100: 100}), YES),
        ("pinned-loop", io.loop_hits({100: 99}), PARTLY),
        ("pinned-loop", io.loop_hits({100: 98}), NO),
        ("lru-evicts-loops", io.loop_hits({1: 0.0, 2: 0.0}), YES),
        ("lru-evicts-loops", io.loop_hits({1: 0.0, 2: 7.0}), PARTLY),
        ("lru-evicts-loops", io.loop_hits({1: 3.0, 2: 7.0}), NO),
        ("lecar-overhead", io.lecar_costs_more({"lecar": 250, "llmcache": 100}, "llmcache"), YES),
        ("lecar-overhead", io.lecar_costs_more({"lecar": 150, "llmcache": 100}, "llmcache"), PARTLY),
        ("lecar-overhead", io.lecar_costs_more({"lecar": 105, "llmcache": 100}, "llmcache"), NO),
    ],
)
def test_loops_and_overhead(name: str, measure: Measure, expected: Verdict) -> None:
    assert verdict("io-caching", name, measure) is expected


def test_a_replayed_loop_hits_no_more_than_the_cache_holds() -> None:
    found = io.hits_of_loops()
    assert all(size - 1 < hits <= size for size, hits in found["belady"].items())
    assert all(0 <= hits <= size for held in found.values() for size, hits in held.items())


MB = 10**6


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("watch-loop", {}, YES),
        ("watch-loop", {"watch": replace(WATCH, bandwidth=120 * MB)}, PARTLY),
        ("watch-loop", {"watch": replace(WATCH, cache_bytes=32 * MB)}, NO),
        ("phone-loops", {}, YES),
        ("phone-loops", {"phone": replace(PHONE, cache_bytes=600 * MB)}, PARTLY),
        ("phone-loops", {"phone": replace(PHONE, bandwidth=500 * MB)}, NO),
        ("apps-fit", {}, YES),
        ("apps-fit", {"watch": replace(WATCH, cache_bytes=32 * MB)}, PARTLY),
        ("apps-fit", {"watch": replace(WATCH, bandwidth=MB, cache_bytes=5 * MB)}, NO),
        ("notes-loop-size", {"notes_blocks": (10_000, 25_000)}, YES),
        ("notes-loop-size", {"notes_blocks": (0, 30_000)}, PARTLY),
        ("notes-loop-size", {"notes_blocks": (0, 20_000)}, NO),
        ("large-does-not-fit", {}, YES),
        ("large-does-not-fit", {"watch": replace(WATCH, cache_bytes=600 * MB)}, NO),
        ("parameters", {"phone": replace(PHONE, cache_bytes=1000 * MB)}, YES),
        ("parameters", {}, PARTLY),
        ("parameters", {"phone": replace(PHONE, cache_bytes=100 * MB)}, NO),
        ("insensitive-to-t", {"phone": replace(PHONE, bandwidth=100 * MB)}, YES),
        ("insensitive-to-t", {}, PARTLY),
        ("insensitive-to-t", {"watch": replace(WATCH, bandwidth=10**9), "phone": replace(PHONE, bandwidth=4 * 10**9)}, NO),
        # Were BW x T one block per loop, the product would be right.
        ("sign-of-formula", {"watch": replace(WATCH, bandwidth=40_960, cache_bytes=74 * MB)}, YES),
        ("sign-of-formula", {}, NO),
        ("floor-of-formula", {"example": (10, Fraction(2))}, YES),
        ("floor-of-formula", {}, NO),
    ],
)
def test_hardware(name: str, changes: Any, expected: Verdict) -> None:
    assert verdict("io-caching", name, io.hardware(**changes)[name]) is expected


def test_the_printed_formula_contradicts_the_example_of_the_paper() -> None:
    found = io.hardware()
    assert found["sign-of-formula"].values["difference_bytes"] == 60 * MB
    product = found["sign-of-formula"].values["product_bytes"]
    assert product == pytest.approx(70e6 / 4096 * 100e6 / 4096 * 0.1 * 4096)
    assert found["floor-of-formula"].values == {"floor": 7, "needed": 8, "late": 0.5}


# hillinfer: what the models give, and what is measured

SHARE = hill.READINGS["share-20"]
FAST = {"full": 80.0, "h2o": 70.0, "prefetch": 60.0, "leoam": 50.0, "hillinfer-no-app": 20.0, "hillinfer": 10.0}


def memory(factor: float) -> Measure:
    """The measure of Qwen-7B's memory if it were `factor` times as large."""
    by_context, _ = hill.memory_tables()
    use = by_context["Qwen-7B"][4096]
    changed = replace(use, weights=use.weights + (factor - 1) * use.total)
    return hill.memory_measures({**by_context, "Qwen-7B": {4096: changed}})["qwen-30-gb"]


def transfers(low: Ratios, high: Ratios) -> hill.ClaimMeasures:
    """The measures of seconds for 20 % and 30 % at three contexts."""
    rows = [
        {"share": share, "context": 1024 << place, "seconds": seconds}
        for share, row in ((0.2, low), (0.3, high))
        for place, seconds in enumerate(row)
    ]
    return hill.Transfers.read({"layers": 1, "rows": rows}).measures()


def dominating(transfer: float, idle: float) -> Measure:
    return Measure("", {"transfer_share": transfer, "idle_share": idle})


class MadeUp(hill.ModelledCase):
    """A point whose speed-ups are given."""

    def speedup(self, baseline: str) -> float:
        given: Any = self.latencies
        return float(given[baseline])


def speedups(*rows: Ratios) -> hill.ClaimMeasures:
    """The measures of one model whose speed-ups over the four baselines are `rows`, by context."""
    return hill.speedup_measures(
        [
            MadeUp("Qwen-7B", 1024 << place, dict(zip(hill.BASELINES, row, strict=True)))  # type: ignore[arg-type]
            for place, row in enumerate(rows)
        ]
    )


def order(*cases: bool) -> Measure:
    """The measure of points at which the systems come in their order, or with the ends exchanged."""
    full = SHARE.latency("full", MODELS["Qwen-7B"], 4096)
    names = list(SYSTEMS)
    right = {name: replace(full, token_ns=1e9 * (len(names) - place), prefill_ns=0) for place, name in enumerate(names)}
    wrong = {**right, "full": right["hillinfer"], "hillinfer": right["full"]}
    return hill.systems_in_order([hill.ModelledCase("Qwen-7B", 4096, right if case else wrong) for case in cases])


def parts(*seconds: float) -> Measure:
    timed = zip(hill.parts_of(SHARE).items(), seconds, strict=True)
    found = {name: replace(of, token_ns=one * 1e9) for (name, of), one in timed}
    return hill.part_measures(found, SHARE)["each-part-counts"]


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
        *[({"qwen-30-gb": memory(f)}, [v]) for f, v in ((1.0, YES), (1.05, PARTLY), (1.2, NO), (0.8, NO))],
        (transfers((1, 2, 4), (2, 3, 6)), [YES, YES]),
        (transfers((1, 0.95, 4), (2, 3, 6)), [PARTLY, YES]),
        (transfers((1, 0.5, 4), (2, 0.4, 6)), [NO, PARTLY]),
        (transfers((2, 3, 4), (1, 2, 3)), [YES, NO]),
        *[({"dominates": dominating(*v)}, [e]) for v, e in (((0.6, 0.5), YES), ((0.6, 0.1), PARTLY), ((0.4, 0.1), NO))],
        # the range, the largest, longer contexts
        (speedups((8, 7, 6, 5), (8.5, 7.5, 6.5, 5.5)), [YES, YES, YES]),
        (speedups((8, 7, 6, 1), (8.5, 6, 6.5, 1.5)), [PARTLY, YES, PARTLY]),
        (speedups((20, 2, 2, 1), (10, 2, 2, 1)), [NO, PARTLY, NO]),
        (speedups((2, 2, 2, 1), (1, 1, 1, 1)), [NO, NO, NO]),
        *[({"order": order(*cases)}, [v]) for cases, v in (((True,), YES), ((True, False), PARTLY), ((False,), NO))],
        *[({"each-part-counts": parts(*s)}, [v]) for s, v in (((3, 2, 1), YES), ((1, 2, 1), PARTLY), ((1, 2, 3), NO))],
        ({"beta-rule": hill.sweep_measure((6, 5, 1, 2, 3, 4))}, [YES]),
        ({"beta-rule": hill.sweep_measure((6, 5, 2, 1, 3, 4))}, [YES]),
        ({"beta-rule": hill.sweep_measure((6, 5, 1.01, 2, 3, 1))}, [PARTLY]),
        ({"beta-rule": hill.sweep_measure((1, 2, 3, 4, 5, 6))}, [NO]),
        # what ran here: speed-ups, parts, bytes over the link
        (hill.run_measures(runs()), [YES, YES, YES]),
        (hill.run_measures(runs(5e4, hillinfer=14.0)), [PARTLY, YES, PARTLY]),
        (hill.run_measures(runs(5e5, hillinfer=19.9)), [NO, PARTLY, NO]),
        (hill.run_measures(runs(hillinfer=100.0)), [NO, PARTLY, YES]),
        ({"beta-here": sweep(9, 8, 1, 8, 9)}, [YES]),
        ({"beta-here": sweep(9, 8, 2, 1, 9)}, [YES]),
        ({"beta-here": sweep(9, 8, 1.01, 9, 1)}, [PARTLY]),
        ({"beta-here": sweep(1, 2, 3, 4, 5)}, [NO]),
        (accuracy(0.95, 0.5), [YES, YES]),
        (accuracy(0.92, 0.5), [PARTLY, PARTLY]),
        (accuracy(0.5, 0.5), [NO, PARTLY]),
        (accuracy(0.95, 0.95), [YES, PARTLY]),
    ],
)
def test_hillinfer_is_judged_by_its_numbers(found: hill.ClaimMeasures, expected: list[Verdict]) -> None:
    assert [verdict("hillinfer", name, measure) for name, measure in found.items()] == expected


def test_needed_speeds_give_the_ends_of_the_range() -> None:
    for baseline, rates in hill.needed(SHARE).items():
        for rate, expected in zip(rates, (hill.MOST, hill.LEAST), strict=True):
            factor = rate / SHARE.machine.ssd_bytes_per_s
            changed = replace(SHARE, machine=SHARE.machine.faster(ssd_bytes_per_s=factor, ssd_requests_per_s=factor))
            both = {name: changed.latency(name, MODELS["Qwen-7B"], 4096) for name in (baseline, "hillinfer")}
            assert hill.ModelledCase("", 4096, both).speedup(baseline) == pytest.approx(expected, rel=1e-6)
    assert all(math.isnan(slowest) for slowest, _ in hill.needed(hill.READINGS["sizes"]).values())


def test_hits_that_were_measured_change_what_is_modelled() -> None:
    plain = runs()
    assert hill.with_hits(plain, 0.2) is None
    seen = Observed((1,), 1, 100, 1.0, 0, 0, 0, 0.0, None, {})
    hits = {"prefetch": 0.7, "hillinfer": 1.0}
    rows = tuple(replace(one, observed=replace(seen, hit_ratio=hits.get(one.policy, 0.8))) for one in plain.rows)
    found = hill.with_hits(replace(plain, rows=rows), 0.2)
    assert found is not None and set(found) == {"share-20", "flexgen-20"}
    worst = hill.over(hill.points(SHARE), "prefetch")
    assert all(better > plainly for better, plainly in zip(hill.over(found["share-20"], "prefetch"), worst, strict=True))


# icecache

ICE, TREE, PAGES = ice.OURS


def asked(name: str, measure: Callable[[TaskBench, str], Measure], data: TaskBench, policy: str = ICE) -> Verdict:
    return verdict("icecache", name, measure(data, policy))


def answered(own: Sequence[int], full: Sequence[int], contexts: Sequence[int] = (1024,)) -> TaskBench:
    """Results in which the largest budget of IceCache answers `own`, and a small one nothing, where all answer `full`."""
    return bench({(STOCK, None): full, (ICE, 64): [0] * len(own), (ICE, 256): own}, contexts)


FAR = bench({(STOCK, None): [10] * 4, (ICE, 256): [7] * 4}, (4096,))


@pytest.mark.parametrize(
    ("name", "measure", "data", "expected"),
    [
        ("every-passkey", ice.every_passkey, bench({(STOCK, None): [10] * 20, (ICE, 64): [10] * 20}), YES),
        ("every-passkey", ice.every_passkey, bench({(STOCK, None): [10] * 20, (ICE, 64): [10] * 19 + [5]}), PARTLY),
        ("every-passkey", ice.every_passkey, bench({(STOCK, None): [10] * 20, (ICE, 64): [9] * 20}), NO),
        ("keeps-99", ice.kept, answered([100, 99], [100, 100]), YES),
        ("keeps-99", ice.kept, answered([98, 94], [100, 100]), PARTLY),
        ("keeps-99", ice.kept, answered([94, 94], [100, 100]), NO),
        ("keeps-99", ice.kept, answered([50, 50], [50, 50]), YES),  # it cannot know more than the model
        ("needles", ice.kept, answered([10] * 4, [10] * 4), YES),
        ("needles", ice.kept, replace(FAR, rows=(*answered([10] * 4, [10] * 4).rows, *FAR.rows)), NO),  # the worst context
    ],
)
def test_answers_are_judged_against_the_full_cache(
    name: str, measure: Callable[[TaskBench, str], Measure], data: TaskBench, expected: Verdict
) -> None:
    assert asked(name, measure, data) is expected


@pytest.mark.parametrize(("own", "rival", "quarter", "outperforms"), [(9, 5, YES, YES), (5, 5, YES, NO), (4, 5, NO, NO)])
def test_rivals_are_beaten_or_not(own: int, rival: int, quarter: Verdict, outperforms: Verdict) -> None:
    data = of_policies(own, rival, ice.OURS)
    assert asked("quarter-of-the-budget", ice.quarter, data, TREE) is quarter
    assert asked("outperforms", ice.outperforms, data, TREE) is outperforms


def test_one_rival_that_is_as_good_and_a_tree_that_finds_less() -> None:
    data, fewer = of_policies(9, 5, ice.OURS), of_policies(5, 5, ice.OURS).rows[1].answers

    def changed(policy: str, answers: Answers) -> TaskBench:
        return replace(data, rows=tuple(replace(one, answers=answers) if one.policy == policy else one for one in data.rows))

    assert asked("outperforms", ice.outperforms, changed("quest", data.rows[1].answers), TREE) is PARTLY
    assert asked("near-top-k", ice.near_exact, data, PAGES) is YES
    assert asked("near-top-k", ice.near_exact, changed(PAGES, fewer), PAGES) is NO


def length(tokens: int, policy: str, ms: float, full_ms: float, loading: float = 0.1, query: float = 0.2) -> dict[str, Any]:
    parts = {"loading": loading * ms, "query": query * ms, "update": 0.0, "decoding": (1 - loading - query) * ms}
    speed = {"tpot_ns": ms * 1e6, "parts_ns": {part: one * 1e6 for part, one in parts.items()}}
    return {"tokens": tokens, "policy": policy, "title": policy, "speed": speed, "times_stock": ms / full_ms}


def by_length(*own: float, kv: float = 0.04, whole: float = 0.54, **parts: float) -> list[dict[str, Any]]:
    """Lengths at which the full cache takes 10, 20, 40 .. ms and IceCache as said, and what it has in memory."""
    rows = [length(1024 << place, STOCK, 10 << place, 10 << place, 0, 0) for place in range(len(own))]
    rows += [length(1024 << place, ICE, ms, 10 << place, **parts) for place, ms in enumerate(own)]
    return [{**one, "kv_share": kv, "share_with_index": whole} for one in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (by_length(15, 19, 20, whole=0.05), YES),
        (by_length(15, 19, 20, whole=0.06), PARTLY),
        (by_length(15, 19, 20), PARTLY),
        (by_length(15, 19, 50, whole=0.05), PARTLY),
        (by_length(15, 19, 50), PARTLY),
        (by_length(15, 19, 20, kv=0.5), PARTLY),
        (by_length(15, 19, 50, kv=0.5), NO),
    ],
)
def test_memory_and_time_count_together(rows: list[dict[str, Any]], expected: Verdict) -> None:
    found = ice.memory_and_time(rows)
    assert verdict("icecache", "memory-and-time", found) is expected
    assert "with index" in found.words and ("faster from 2,048 tokens on" in found.words) == (found.values["times"] <= 1)


@pytest.mark.parametrize(
    ("name", "measure", "rows", "expected"),
    [
        ("slower-growth", ice.growth, by_length(5, 10, 15), YES),
        ("slower-growth", ice.growth, by_length(5, 10, 30), PARTLY),
        ("slower-growth", ice.growth, by_length(5, 10, 60), NO),
        ("breakdown", ice.breakdown, by_length(9, 9, loading=0.1, query=0.2), YES),
        ("breakdown", ice.breakdown, by_length(9, 9, loading=0.2, query=0.1), PARTLY),
        ("breakdown", ice.breakdown, by_length(9, 9, loading=0.5, query=0.3), PARTLY),
        ("breakdown", ice.breakdown, by_length(9, 9, loading=0.6, query=0.1), NO),
        ("reuse-is-faster", ice.reuse_faster, [*by_length(10.0), length(1024, ice.REUSE, 8.0, 10)], YES),
        ("reuse-is-faster", ice.reuse_faster, [*by_length(10.0), length(1024, ice.REUSE, 9.8, 10)], PARTLY),
        ("reuse-is-faster", ice.reuse_faster, [*by_length(10.0), length(1024, ice.REUSE, 11.0, 10)], NO),
    ],
)
def test_times_are_judged_by_length(
    name: str, measure: Callable[[list[dict[str, Any]]], Measure], rows: list[dict[str, Any]], expected: Verdict
) -> None:
    assert verdict("icecache", name, measure(rows)) is expected
