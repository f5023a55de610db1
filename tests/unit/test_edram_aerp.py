"""AERP and its eDRAM cells: settings, storage rule, recomputation, lost bits, retention curves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from llmcache.arrays import Floats
from llmcache.errors import UsageError
from llmcache.papers.edram.aerp import AerpLayer, AerpSettings, LayerShape
from llmcache.papers.edram.constants import KELLE_INTERVALS, RefreshIntervals
from llmcache.papers.edram.flips import (
    LARGEST_HALF,
    NO_FLIPS,
    Bits,
    Cells,
    CellSettings,
    FlipRates,
    decode,
    draw,
    encode,
    name_rows,
    parse_flips,
)
from llmcache.papers.edram.retention import paper_curve, parse_curve, parse_intervals
from tests.unit.edram_parts import Stream, column_sums

UNKNOWN: Any = "unknown"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("budget", partial(AerpSettings, budget=4, sinks=4)),
        ("recompute", lambda: AerpSettings(30, recompute=UNKNOWN)),
        ("heads", partial(LayerShape, 4, 3, 8)),
        ("rates", partial(CellSettings, "exact", FlipRates.uniform(0.1))),
        ("recompute", partial(AerpLayer, AerpSettings(30, recompute="prefill"), LayerShape(1, 1, 4, 8))),
    ],
)
def test_an_impossible_setting_is_named(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        make()


def lossy() -> AerpLayer:
    """Return an MHA layer that stores x rows in cells that lose bits, after 20 steps."""
    shape, cells = LayerShape(4, 4, 8, channels=32), CellSettings(rates=FlipRates.uniform(0.02), seed=1)
    stream = Stream.of(shape, 80, seed=5)
    keys, values = stream.kv()
    layer = AerpLayer(AerpSettings(24, 2, 6, recompute="decode"), shape, stream.project, cells)
    layer.prefill(keys[:60], values[:60], column_sums(stream.queries[:60], keys[:60]), stream.x[:60])
    for t in range(60, 80):
        layer.step(stream.queries[t], keys[t], values[t], stream.x[t])
    return layer


def test_high_scores_are_protected_tokens_and_scores_from_the_median_up() -> None:
    layer = lossy()
    slots, high = layer.slots, layer.high_scores()
    for head, (positions, scores) in enumerate(zip(slots.positions, slots.scores, strict=True)):
        for slot, (position, score) in enumerate(zip(positions, scores, strict=True)):
            # Relative to the next token, number 80: the window of 6 starts after number 74.
            assert high[head, slot] == (position < 2 or position > 74 or score >= np.median(scores))
    votes = layer.x_high_scores(high)
    for index in np.nonzero(layer.inputs.used & ~layer.inputs.waiting)[0]:
        retaining = high[slots.positions == layer.inputs.positions[index]]
        assert votes[index] == (2 * retaining.sum() >= len(retaining))


ROWS, DIM = 4000, 32


def cells(rates: FlipRates, rows: Floats, **settings: Any) -> Cells:
    made = Cells((len(rows),), rows.shape[1], CellSettings(rates=rates, **settings))
    made.write((np.arange(len(rows)),), rows, name_rows(settings.get("seed", 0), np.arange(len(rows))))
    return made


def normal(rows: int = ROWS, dim: int = DIM) -> Floats:
    return np.random.default_rng(7).standard_normal((rows, dim), np.float32)


def settled(made: Cells, hst: bool) -> Floats:
    used = np.ones(made.places, np.bool_)
    made.settle(used & hst, used)
    return np.array(made.readings)


def test_each_bit_is_lost_at_the_rate_of_its_group() -> None:
    rates = FlipRates(2e-3, 3e-2, 8e-3, 0.2)
    for lost, (msb, lsb) in zip(draw(name_rows(0, np.arange(ROWS)), DIM, rates), ((2e-3, 3e-2), (8e-3, 0.2)), strict=True):
        for bit in range(16):
            rate, found = (msb if bit >= 8 else lsb), (lost >> bit & 1).mean()
            assert abs(found - rate) < 4.5 * np.sqrt(rate * (1 - rate) / lost.size), bit


def test_bits_lost_at_an_interval_are_lost_at_longer_ones() -> None:
    names, curve = name_rows(3, np.arange(ROWS)), paper_curve()
    before: Bits = np.zeros((ROWS, DIM), np.uint16)
    for factor in (0.1, 0.5, 1.0, 2.0, 10.0, 1000.0):
        lost, as_lst = draw(names, DIM, FlipRates.of_intervals(KELLE_INTERVALS.scaled(factor), curve))
        assert not (before & ~lost).any() and not (lost & ~as_lst).any()
        before = lost
    assert before.any()


def test_fp16_values_that_are_not_finite_read_as_0_or_the_largest() -> None:
    ones = np.full((200, 16), 1.0, np.float32)  # 0x3c00: losing bit 14 gives infinity or NaN
    read = settled(cells(FlipRates.uniform(0.3), ones, format="fp16"), True)
    assert np.isfinite(read).all() and np.abs(read).max() == LARGEST_HALF and (read == 0).any()
    huge = np.array([[1e6, -1e6]], np.float32)
    assert decode(*encode(huge, "fp16"), "fp16").tolist() == [[LARGEST_HALF, -LARGEST_HALF]]


def test_a_bit_lost_at_a_low_score_stays_lost_if_sticky() -> None:
    rates, rows = FlipRates(0.01, 0.01, 0.2, 0.2), normal(200)
    for sticky in (True, False):
        made = cells(rates, rows, sticky=sticky)
        high, low, back = (settled(made, hst) for hst in (True, False, True))
        assert (low != high).any()
        assert (back == (low if sticky else high)).all()


def test_lost_bits_are_counted_and_a_rewrite_restores_them() -> None:
    rows, used = normal(100), np.ones(100, np.bool_)
    made = cells(FlipRates.uniform(0.1), rows)
    assert made.lost_bits(used) == 0
    settled(made, True)
    assert made.lost_bits(used) == pytest.approx(0.1 * 16 * rows.size, rel=0.1)
    made.write((np.arange(100),), rows, name_rows(9, np.arange(100)))
    assert made.lost_bits(used) == 0 and np.abs(made.readings - rows).max() < 1e-3


def test_flip_rates_are_parsed() -> None:
    rates = partial(parse_flips, curve=paper_curve())
    assert rates("none") == NO_FLIPS and not NO_FLIPS.any
    assert rates("uniform=1e-3") == FlipRates.uniform(1e-3)
    assert rates("msb=0.1") == FlipRates(0.1, 0, 0.1, 0) and rates("lst=0.1") == FlipRates(0, 0, 0.1, 0.1)
    assert rates("2drp") == FlipRates.of_intervals(KELLE_INTERVALS, paper_curve()) == rates("2drp=1050us")
    assert rates("interval=45us").in_order() == pytest.approx([1e-6] * 4)
    for text in ("", "none=1", "uniform", "uniform=2", "uniform=x", "msb", "2drp=1s", "interval", "interval=1ms,2ms"):
        with pytest.raises(UsageError, match=r"^flips: ") as caught:
            rates(text)
        assert caught.value.hint


def test_curves_and_intervals_are_parsed() -> None:
    assert parse_curve("paper") is paper_curve()
    assert parse_curve("45us=1e-6, 1.05ms=3e-4").failure(1_050_000) == pytest.approx(3e-4)
    assert parse_intervals("1050us") == RefreshIntervals.uniform(1_050_000)
    assert parse_intervals("360us,5.4ms,1.44ms,7.2ms") == KELLE_INTERVALS
    for text in ("", "45us", "45us=x", "45us=1e-6", "1ms=1e-3,45us=1e-2", "45us=1e-3,1ms=1e-3", "1s=0"):
        with pytest.raises(UsageError) as caught:
            parse_curve(text)
        assert caught.value.hint
    for text in ("", "0s", "1ms,2ms", "1ms,2ms,3ms,0s"):
        with pytest.raises(UsageError):
            parse_intervals(text)
