"""The claims about figure 4: each verdict comes from the numbers, whichever way they point."""

from __future__ import annotations

import numpy as np
import pytest

from llmcache.report.claims import Verdict
from llmcache.report.reproduce.io_caching import figure4
from tests.unit.reproduce_parts import app, ratios, verdict

YES, PARTLY, NO = Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NOT_CONFIRMED
LINE = [0.2, 0.4, 0.6, 0.8, 0.9]
STEP = [0.0, 0.0, 0.0, 0.0, 0.9]  # what LRU makes of a single long loop
EVEN = {"llmcache": LINE, "lecar": LINE}
BENT = [0.2, 0.4, 0.3, 0.8, 0.9]


def shifted(values: list[float], by: float) -> list[float]:
    return [value + by for value in values]


@pytest.mark.parametrize(
    ("ours", "lru", "expected"),
    [
        (LINE, STEP, YES),
        (LINE, LINE, YES),
        ([*LINE[:4], 0.7], STEP, PARTLY),  # below at one size of five, above on the mean
        (STEP, LINE, NO),
    ],
)
def test_higher_than_lru(ours: list[float], lru: list[float], expected: Verdict) -> None:
    assert verdict(figure4.CLAIMS, "higher-than-lru", ratios({"llmcache": ours, "lru": lru})) is expected


def test_lru_stands_still() -> None:
    still = {"llmcache": LINE, "lru": STEP}
    moves = {"llmcache": LINE, "lru": LINE}
    name = "lru-stands-still"
    assert verdict(figure4.CLAIMS, name, ratios(still)) is YES
    assert verdict(figure4.CLAIMS, name, ratios(still, ai_notes=moves)) is PARTLY
    assert verdict(figure4.CLAIMS, name, ratios(moves)) is NO
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": STEP, "lru": STEP})) is NO


def test_flat_regions_end_where_a_policy_has_all_it_can_get() -> None:
    assert figure4.flat_share(app("a", {"lru": [0.1, 0.9, 0.9, 0.9]}), "lru") == 0
    assert figure4.flat_share(app("a", {"lru": [0.1, 0.1, 0.1, 0.9]}), "lru") == pytest.approx(0.5)
    assert figure4.flat_share(app("a", {"lru": [0.1, 0.2, 0.2, 0.9]}), "lru") == pytest.approx(0.25)


def test_lru_near_its_baseline() -> None:
    both = {"llmcache": LINE, "lru": STEP}
    name = "lru-near-baseline"
    assert verdict(figure4.CLAIMS, name, ratios(both)) is YES
    assert verdict(figure4.CLAIMS, name, ratios(both, text_embedder={"llmcache": LINE, "lru": LINE})) is PARTLY
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": LINE, "lru": LINE})) is NO
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": STEP, "lru": STEP})) is NO
    # A cache that never gains anything stays at its baseline to the end.
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": LINE, "lru": [0.1] * 5})) is YES


def test_progress_goes_from_the_smallest_to_the_largest_cache() -> None:
    assert figure4.progress(np.array([0.2, 0.4, 0.6])) == pytest.approx([0, 0.5, 1])
    assert figure4.progress(np.array([0.2, 0.2])) == pytest.approx([0, 0])


@pytest.mark.parametrize("name", ["ai_notes", "text_classification"])
def test_lecar_sometimes_ahead(name: str) -> None:
    def judged(lecar: list[float]) -> Verdict:
        return verdict(figure4.CLAIMS, f"lecar-sometimes-{name}", ratios(EVEN, **{name: {"llmcache": LINE, "lecar": lecar}}))

    assert judged([0.22, *LINE[1:]]) is YES
    assert judged([0.5, *LINE[1:]]) is PARTLY  # by far more than slightly
    assert judged(shifted(LINE, 0.02)) is PARTLY  # everywhere
    assert judged(LINE) is NO
    assert judged(shifted(LINE, -0.1)) is NO


def test_outperforms_lecar_in_ai_translate() -> None:
    def judged(lecar: list[float]) -> Verdict:
        found = ratios(EVEN, ai_translate={"llmcache": LINE, "lecar": lecar})
        return verdict(figure4.CLAIMS, "outperforms-lecar", found)

    assert judged(shifted(LINE, -0.1)) is YES
    assert judged(shifted(LINE, -0.02)) is PARTLY
    assert judged([0.5, 0.0, 0.0, 0.9, 0.9]) is PARTLY  # far above on the mean, but below at two sizes of five
    assert judged(LINE) is NO
    assert judged(shifted(LINE, 0.05)) is NO


def test_higher_overall_than_lecar() -> None:
    above, below = ({"llmcache": LINE, "lecar": shifted(LINE, by)} for by in (-0.1, 0.1))
    name = "higher-overall"
    assert verdict(figure4.CLAIMS, name, ratios(above, ai_notes=below)) is YES
    assert verdict(figure4.CLAIMS, name, ratios(above, text_embedder=below)) is PARTLY
    assert verdict(figure4.CLAIMS, name, ratios(below, ai_notes=above)) is NO


def test_lecar_fluctuates_and_ours_does_not() -> None:
    name = "lecar-fluctuates"
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": LINE, "lecar": BENT})) is YES
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": [0.2, 0.4, 0.37, 0.8, 0.9], "lecar": BENT})) is PARTLY
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": LINE, "lecar": LINE})) is NO
    assert verdict(figure4.CLAIMS, name, ratios({"llmcache": BENT, "lecar": LINE})) is NO


def test_both_readings_of_the_policy_are_judged_apart() -> None:
    found = ratios({"llmcache": LINE, "algorithm1": STEP, "lru": LINE})
    assert verdict(figure4.CLAIMS, "higher-than-lru", found, "llmcache") is YES
    assert verdict(figure4.CLAIMS, "higher-than-lru", found, "algorithm1") is NO
