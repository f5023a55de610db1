"""The claims about latency, patterns, loops, overhead and hardware: verdicts from the numbers, whichever way they point."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from llmcache.cache.classify import classify
from llmcache.cache.constants import PHONE, WATCH
from llmcache.cache.latency import FetchModel
from llmcache.report.claims import Verdict, claims_table, judge
from llmcache.report.reproduce.io_caching import figure5, hardware, loops, overhead, patterns
from llmcache.report.reproduce.io_caching.evidence import ON_DEVICE, Evidence, writes_fetch_too
from llmcache.trace.shapes import SHAPES
from tests.unit.reproduce_parts import BANDWIDTHS, app, latencies, verdict
from tests.unit.simulation_parts import loop, trace_of

YES, PARTLY, NO = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED
# Rows: 100, 200, 500, 1000 MB/s; columns: small to large cache.
BY_BANDWIDTH: list[list[float]] = [[10, 9.5, 9], [8, 7.6, 7.2], [6, 5.7, 5.4], [5.8, 5.5, 5.2]]
BY_SIZE: list[list[float]] = [[10, 5, 1], [9, 4.5, 0.9], [8, 4, 0.8], [7.8, 3.9, 0.78]]
STILL = [[10.0] * 3] * 4


def test_latency_falls() -> None:
    rising = [[10.0, 9.0, 11.0], *BY_BANDWIDTH[1:]]
    assert verdict(figure5.CLAIMS, "latency-falls", latencies(BY_BANDWIDTH)) is YES
    assert verdict(figure5.CLAIMS, "latency-falls", latencies(BY_BANDWIDTH, ai_notes=rising)) is PARTLY
    assert verdict(figure5.CLAIMS, "latency-falls", latencies(BY_BANDWIDTH[::-1])) is NO


def test_knee_of_bandwidth() -> None:
    halving = [[8.0], [4.0], [2.0], [1.0]]  # no set-up latency: every doubling counts
    slight = [[10.0], [9.5], [9.0], [8.9]]
    assert verdict(figure5.CLAIMS, "knee-of-bandwidth", latencies(BY_BANDWIDTH)) is YES
    assert verdict(figure5.CLAIMS, "knee-of-bandwidth", latencies(BY_BANDWIDTH, text_embedder=slight)) is PARTLY
    assert verdict(figure5.CLAIMS, "knee-of-bandwidth", latencies(halving)) is NO


def test_size_counts_less_than_bandwidth() -> None:
    late: list[list[float]] = [
        [10, 9.9, 1],
        [8, 7.9, 0.8],
        [6, 5.9, 0.6],
        [5.8, 5.7, 0.58],
    ]  # once all fits
    assert verdict(figure5.CLAIMS, "size-counts-less", latencies(BY_BANDWIDTH)) is YES
    assert verdict(figure5.CLAIMS, "size-counts-less", latencies(late)) is PARTLY
    assert verdict(figure5.CLAIMS, "size-counts-less", latencies(BY_SIZE)) is NO


def test_ai_translate_is_the_most_sensitive_to_size() -> None:
    name = "translate-sensitive"
    assert verdict(figure5.CLAIMS, name, latencies(BY_BANDWIDTH, ai_translate=BY_SIZE)) is YES
    assert verdict(figure5.CLAIMS, name, latencies(BY_SIZE, ai_translate=BY_BANDWIDTH)) is PARTLY  # steeper where slow
    assert verdict(figure5.CLAIMS, name, latencies(BY_SIZE, ai_translate=STILL)) is NO


def test_writes_that_fetch_count_every_access() -> None:
    read_only = Evidence({"a": app("a", {"llmcache": [0.0, 0.5, 1.0]})}, BANDWIDTHS)
    latency = writes_fetch_too(read_only).apps["a"].latency_s["llmcache"]
    assert latency.shape == (4, 3)
    assert latency[0, 1] == pytest.approx(FetchModel().latency_s(1000, 500, 100_000_000))
    assert latency[3, 2] == pytest.approx(FetchModel().gpu_s(1000))


def found_in(*, loops_in: tuple[str, ...], remote: str = "gemini") -> patterns.Patterns:
    """Patterns in which the applications of `loops_in` are what they are, all others a scan."""
    scan = classify([trace_of(loop(200, 1, 16))])
    classes = {name: classify([SHAPES[name]()]) if name in loops_in else scan for name in ON_DEVICE}
    return patterns.Patterns(classes | {"remote": classify([SHAPES[remote]()])}, ("remote",))


def test_patterns_are_judged_by_what_the_detector_finds() -> None:
    everything = found_in(loops_in=ON_DEVICE)
    some = found_in(loops_in=("ai_notes",), remote="ai_notes")
    none = found_in(loops_in=())
    for name in ("loops-detected", "three-traits"):
        assert [verdict(patterns.CLAIMS, name, data) for data in (everything, some, none)] == [YES, PARTLY, NO]
    assert verdict(patterns.CLAIMS, "remote-has-no-loops", everything) is YES
    assert verdict(patterns.CLAIMS, "remote-has-no-loops", some) is NO
    remote = everything.classes["remote"]
    hot = replace(remote, rows=tuple(row for row in remote.rows if row.kind == "HOT"))
    assert verdict(patterns.CLAIMS, "remote-has-no-loops", patterns.Patterns({"remote": hot}, ("remote",))) is PARTLY


def test_loops_are_judged_by_the_hits_of_a_pass() -> None:
    def judged(hits: float) -> Verdict:
        return verdict(loops.CLAIMS, "pinned-loop", loops.Loops(1000, {"llmcache": {100: hits}}))

    def under_lru(**hits: float) -> Verdict:
        sizes = {int(size[1:]): value for size, value in hits.items()}
        return verdict(loops.LRU_CLAIMS, "lru-evicts-loops", loops.Loops(1000, {"lru": sizes}), "lru")

    assert [judged(100), judged(99), judged(98)] == [YES, PARTLY, NO]
    assert [under_lru(s1=0, s2=0), under_lru(s1=0, s2=7), under_lru(s1=3, s2=7)] == [YES, PARTLY, NO]


def test_a_replayed_loop_hits_no_more_than_the_cache_holds() -> None:
    found = loops.replayed()
    assert all(size - 1 < hits <= size for size, hits in found.hits["belady"].items())
    assert all(0 <= hits <= size for held in found.hits.values() for size, hits in held.items())


def test_overhead_is_judged_by_the_ratio_of_times() -> None:
    def judged(lecar: float) -> Verdict:
        return verdict(overhead.CLAIMS, "lecar-overhead", overhead.Overhead("a", {"lecar": lecar, "llmcache": 100.0}))

    assert [judged(250), judged(150), judged(105), judged(50)] == [YES, PARTLY, NO, NO]


def test_every_policy_is_timed() -> None:
    took = overhead.measured(trace_of(loop(200, 5, 16)), "loop")
    assert set(took.ns_per_block) == {"lru", "lecar", "algorithm1", "llmcache"}
    assert all(time > 0 for time in took.ns_per_block.values())


PAPER = hardware.Hardware()
MB = 10**6


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("watch-loop", PAPER, YES),
        ("watch-loop", hardware.Hardware(watch=replace(WATCH, bandwidth=120 * MB)), PARTLY),
        ("watch-loop", hardware.Hardware(watch=replace(WATCH, cache_bytes=32 * MB)), NO),
        ("phone-loops", PAPER, YES),
        ("phone-loops", hardware.Hardware(phone=replace(PHONE, cache_bytes=600 * MB)), PARTLY),
        ("phone-loops", hardware.Hardware(phone=replace(PHONE, bandwidth=500 * MB)), NO),
        ("apps-fit", PAPER, YES),
        ("apps-fit", hardware.Hardware(watch=replace(WATCH, cache_bytes=32 * MB)), PARTLY),
        ("apps-fit", hardware.Hardware(watch=replace(WATCH, cache_bytes=2 * MB)), NO),
        ("large-does-not-fit", PAPER, YES),
        ("large-does-not-fit", hardware.Hardware(watch=replace(WATCH, cache_bytes=600 * MB)), NO),
        ("parameters", hardware.Hardware(phone=replace(PHONE, cache_bytes=1000 * MB)), YES),
        ("parameters", PAPER, PARTLY),
        ("parameters", hardware.Hardware(phone=replace(PHONE, cache_bytes=100 * MB)), NO),
        ("insensitive-to-t", hardware.Hardware(WATCH, replace(PHONE, bandwidth=100 * MB)), YES),
        ("insensitive-to-t", PAPER, PARTLY),
        ("insensitive-to-t", hardware.Hardware(replace(WATCH, bandwidth=10**9), replace(PHONE, bandwidth=4 * 10**9)), NO),
    ],
)
def test_hardware(name: str, data: hardware.Hardware, expected: Verdict) -> None:
    assert verdict(hardware.CLAIMS, name, data, hardware.MODEL) is expected


def test_the_printed_formula_contradicts_the_example_of_the_paper() -> None:
    judged = {claim.name: claim.findings[hardware.MODEL] for claim in judge(hardware.CLAIMS, PAPER)}
    sign, floor = judged["sign-of-formula"], judged["floor-of-formula"]
    assert (sign.verdict, floor.verdict) == (NO, NO)
    assert sign.values["difference_bytes"] == 60 * MB
    assert sign.values["product_bytes"] == pytest.approx(70e6 / 4096 * 100e6 / 4096 * 0.1 * 4096)
    assert floor.values == {"floor": 7, "needed": 8}
    # Were BW x T one block per loop, the product would be right.
    tiny = hardware.Hardware(watch=replace(WATCH, bandwidth=40_960, cache_bytes=74 * MB))
    assert verdict(hardware.CLAIMS, "sign-of-formula", tiny, hardware.MODEL) is YES


def test_a_floor_is_enough_for_whole_blocks_only() -> None:
    whole = hardware.Hardware(example=(10, Fraction(2)))
    assert verdict(hardware.CLAIMS, "floor-of-formula", whole, hardware.MODEL) is YES


@pytest.mark.parametrize(("blocks", "expected"), [((10_000, 25_000), YES), ((0, 30_000), PARTLY), ((0, 20_000), NO)])
def test_the_loop_of_ai_notes_against_its_blocks(blocks: tuple[int, int], expected: Verdict) -> None:
    data = hardware.Hardware(notes_blocks=blocks)
    assert verdict(hardware.CLAIMS, "notes-loop-size", data, hardware.MODEL) is expected


def test_a_table_of_claims_keeps_paper_and_ours_in_columns_of_their_own() -> None:
    found = loops.Loops(1000, {name: {100: 99.0} for name in ("algorithm1", "llmcache")})
    table = claims_table("claims", judge(loops.CLAIMS, found), {"algorithm1": "A", "llmcache": "B"}, "modelled here")
    assert table.columns == ["paper", "section", "A: verdict", "A (modelled here)", "B: verdict", "B (modelled here)"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "◐" in table.html() and "each cycle yields S cache hits" in table.html()
