"""Bit flips: rates per bit, nesting, determinism, both formats, and what halves that are no number read as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.edram.constants import KELLE_INTERVALS
from llmcache.edram.flips import (
    NO_FLIPS,
    Cells,
    CellSettings,
    FlipRates,
    draw,
    iso_failure,
    iso_power,
    name_rows,
    parse_flips,
)
from llmcache.edram.flips.formats import LARGEST_HALF, decode, encode
from llmcache.edram.retention import paper_curve
from llmcache.errors import UsageError

Floats = NDArray[np.float32]
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


def test_every_bit_is_lost_at_the_rate_of_its_group() -> None:
    rates = FlipRates(2e-3, 3e-2, 8e-3, 0.2)
    for lost, (msb, lsb) in zip(draw(name_rows(0, np.arange(ROWS)), DIM, rates), ((2e-3, 3e-2), (8e-3, 0.2)), strict=True):
        for bit in range(16):
            rate, found = (msb if bit >= 8 else lsb), (lost >> bit & 1).mean()
            assert abs(found - rate) < 4.5 * np.sqrt(rate * (1 - rate) / lost.size), bit


def test_bits_are_lost_independently_of_each_other() -> None:
    lost, _ = draw(name_rows(0, np.arange(ROWS)), DIM, FlipRates.uniform(0.1))
    planes = np.stack([lost >> bit & 1 for bit in range(16)]).reshape(16, -1).astype(np.float64)
    off = np.corrcoef(planes) - np.eye(16)
    assert np.abs(off).max() < 5 / np.sqrt(lost.size)
    along = np.corrcoef(lost[:, :-1].reshape(-1) & 1, lost[:, 1:].reshape(-1) & 1)[0, 1]
    assert abs(along) < 5 / np.sqrt(lost.size)


def test_what_is_lost_early_is_lost_at_every_longer_interval() -> None:
    names, curve = name_rows(3, np.arange(ROWS)), paper_curve()
    before: NDArray[np.uint16] = np.zeros((ROWS, DIM), np.uint16)
    for factor in (0.1, 0.5, 1.0, 2.0, 10.0, 1000.0):
        lost, as_lst = draw(names, DIM, FlipRates.of_intervals(KELLE_INTERVALS.scaled(factor), curve))
        assert not (before & ~lost).any() and not (lost & ~as_lst).any()
        before = lost
    assert before.any()


def test_a_seed_decides_all_and_order_nothing() -> None:
    rates = FlipRates.uniform(0.05)
    names = name_rows(1, np.arange(3)[:, None], np.arange(5))
    whole = draw(names, 8, rates)[0]
    assert (draw(names[::-1, ::-1], 8, rates)[0] == whole[::-1, ::-1]).all()
    assert (draw(name_rows(1, 2, np.arange(5)), 8, rates)[0] == whole[2]).all()
    assert (draw(name_rows(2, np.arange(3)[:, None], np.arange(5)), 8, rates)[0] != whole).any()


def test_rates_of_0_and_1_are_exact() -> None:
    names = name_rows(0, np.arange(100))
    assert (draw(names, 4, FlipRates(1, 0, 0, 1))[0] == 0xFF00).all()
    assert (draw(names, 4, FlipRates(1, 0, 0, 1))[1] == 0x00FF).all()


def test_integers_round_by_half_a_step_of_the_largest_number() -> None:
    rows = normal()
    read = decode(encode(rows, "int16"), "int16")
    assert (np.abs(read - rows) <= np.abs(rows).max(1, keepdims=True) / 32767 * 0.51).all()
    assert (decode(encode(np.zeros((1, 4), np.float32), "int16"), "int16") == 0).all()
    assert (decode(encode(rows, "fp16"), "fp16") == rows.astype(np.float16).astype(np.float32)).all()
    assert (decode(encode(rows, "exact"), "exact").view(np.uint32) == rows.view(np.uint32)).all()


def test_a_lost_low_byte_of_an_integer_is_small_and_a_lost_exponent_of_a_half_is_not() -> None:
    rows = normal()
    largest = np.abs(rows).max(1, keepdims=True)
    low = settled(cells(FlipRates(hst_lsb=1.0), rows), True)
    assert (np.abs(low - rows) <= 256 / 32767 * largest).all()
    halves = settled(cells(FlipRates(hst_msb=0.01), rows, format="fp16"), True)
    integers = settled(cells(FlipRates(hst_msb=0.01), rows), True)
    assert np.abs(halves - rows).max() > 1000 * np.abs(integers - rows).max()


def test_halves_that_are_no_number_read_as_said() -> None:
    ones = np.full((200, 16), 1.0, np.float32)  # 0x3c00: losing bit 14 gives infinity or NaN
    rates = FlipRates.uniform(0.3)
    clamped, kept = (settled(cells(rates, ones, format="fp16", nonfinite=how), True) for how in ("clamp", "keep"))
    assert np.isfinite(clamped).all() and np.abs(clamped).max() <= LARGEST_HALF
    assert np.isnan(kept).any()
    assert (clamped[np.isnan(kept)] == 0).all() and (clamped[np.isfinite(kept)] == kept[np.isfinite(kept)]).all()
    huge = np.array([[1e6, -1e6]], np.float32)
    assert decode(encode(huge, "fp16"), "fp16").tolist() == [[LARGEST_HALF, -LARGEST_HALF]]


def test_only_what_is_stored_as_one_leaks_if_told_so() -> None:
    rows = np.zeros((50, 8), np.float32)
    assert (settled(cells(FlipRates.uniform(0.5), rows, polarity="ones"), True) == 0).all()
    assert (settled(cells(FlipRates.uniform(0.5), rows, polarity="zeros"), True) != 0).any()
    ones, zeros = (settled(cells(FlipRates.uniform(1.0), normal(), polarity=how), True) for how in ("ones", "zeros"))
    assert (ones == 0).all() and np.allclose(zeros, zeros[:, :1]) and (zeros != 0).all()  # -1: all bits one


def test_a_bit_lost_as_a_low_score_token_stays_lost_unless_told_otherwise() -> None:
    rates, rows = FlipRates(0.01, 0.01, 0.2, 0.2), normal(200)
    for sticky in (True, False):
        made = cells(rates, rows, sticky=sticky)
        high, low, back = (settled(made, hst) for hst in (True, False, True))
        assert (low != high).any()
        assert (back == (low if sticky else high)).all()


def test_a_group_without_losses_heals_nothing_and_loses_nothing() -> None:
    made = cells(FlipRates(hst_msb=0.1), normal(200))
    assert (settled(made, False) == settled(cells(NO_FLIPS, normal(200)), False)).all()
    lost = settled(made, True)
    assert (settled(made, False) == lost).all()


def test_a_rewrite_heals_and_lost_bits_are_counted() -> None:
    rows, used = normal(100), np.ones(100, np.bool_)
    made = cells(FlipRates.uniform(0.1), rows)
    assert made.lost_bits(used) == 0
    settled(made, True)
    assert made.lost_bits(used) == pytest.approx(0.1 * 16 * rows.size, rel=0.1)
    made.write((np.arange(100),), rows, name_rows(9, np.arange(100)))
    assert made.lost_bits(used) == 0 and np.abs(made.readings - rows).max() < 1e-3


def test_readings_change_only_where_told() -> None:
    made = cells(FlipRates.uniform(0.1), normal(100))
    used = np.arange(100) < 40
    (changed,) = made.settle(used, used)
    assert (changed == np.arange(40)).all()
    assert len(made.settle(used, used)[0]) == 0
    made.grow(5)
    assert made.readings.shape == (105, DIM) and (made.readings[100:] == 0).all()


def test_equal_power_and_equal_failure_are_two_comparisons() -> None:
    rates = FlipRates.of_intervals(KELLE_INTERVALS)
    assert iso_failure(KELLE_INTERVALS).mean == pytest.approx(rates.mean) == pytest.approx(2e-3)
    assert iso_power(KELLE_INTERVALS).mean < rates.mean / 3


def test_texts_of_rates() -> None:
    assert parse_flips("none") == NO_FLIPS and not NO_FLIPS.any
    assert parse_flips("uniform=1e-3") == FlipRates.uniform(1e-3)
    assert parse_flips("msb=0.1") == FlipRates(0.1, 0, 0.1, 0) and parse_flips("lst=0.1") == FlipRates(0, 0, 0.1, 0.1)
    assert parse_flips("2drp") == FlipRates.of_intervals(KELLE_INTERVALS) == parse_flips("2drp=1050us")
    assert parse_flips("interval=45us").in_order() == pytest.approx([1e-6] * 4)
    for text in ("", "none=1", "uniform", "uniform=2", "uniform=x", "msb", "2drp=1s", "interval", "interval=1ms,2ms"):
        with pytest.raises(UsageError, match=r"^flips: ") as caught:
            parse_flips(text)
        assert caught.value.hint


def test_settings_that_cannot_be_are_named() -> None:
    for name, values in (("format", {"format": "fp8"}), ("polarity", {"polarity": "up"}), ("nonfinite", {"nonfinite": "?"})):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            CellSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rates: "):
        CellSettings("exact", FlipRates.uniform(0.1))
    with pytest.raises(ValueError, match=r"^lst_lsb: "):
        FlipRates(0, 0, 0, 1.5)
