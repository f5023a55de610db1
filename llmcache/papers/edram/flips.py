"""Bit flips of 2DRP: reads of eDRAM whose four groups are refreshed at their own intervals.

16-bit cells hold integers with one scale per vector, or fp16 numbers; the paper only says "16 bits". A lost exponent bit of
an fp16 number ruins the model at rates that hardly affect integers.

A bit is lost in a group if a hash of its location is below the group's rate, so two runs with one seed differ only by their
rates. A loss is determined at the write and remains until the next write. If `sticky`, a bit that is lost while its token
has a low score remains lost when the token is promoted. Differs from the paper: section 4.2 does not say when bits are
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import UsageError
from llmcache.papers.edram.constants import GROUPS, KELLE_INTERVALS, TABLE4_INTERVALS, RefreshIntervals
from llmcache.papers.edram.retention import RetentionCurve, parse_intervals

Bits = NDArray[np.uint16]
Format = Literal["int16", "fp16", "exact"]
LARGEST_HALF = 65504.0


def encode(rows: Floats, how: Format) -> tuple[Bits, Floats]:
    """Return `rows` [..., dim] as bits [..., dim] and scales [..., 1], which cannot be lost.

    int16: the largest number of a vector becomes 32767. fp16: the scales are 1.
    """
    if how == "fp16":
        limited = np.clip(rows, -LARGEST_HALF, LARGEST_HALF)
        return limited.astype(np.float16).view(np.uint16), np.ones((*rows.shape[:-1], 1), np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(32767), np.float32(1)).astype(np.float32)
    return np.rint(rows / scales).astype(np.int16).view(np.uint16), scales


def decode(bits: Bits, scales: Floats, how: Format) -> Floats:
    """Return float32 [..., dim]; in fp16, NaN reads as 0, infinities as the largest finite number."""
    if how == "int16":
        return bits.view(np.int16).astype(np.float32) * scales
    numbers = bits.view(np.float16).astype(np.float32)
    return np.nan_to_num(numbers, copy=False, nan=0.0, posinf=LARGEST_HALF, neginf=-LARGEST_HALF)


@dataclass(frozen=True)
class FlipRates:
    """The probability that a bit is lost, by group."""

    hst_msb: float = 0.0
    hst_lsb: float = 0.0
    lst_msb: float = 0.0
    lst_lsb: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in zip(GROUPS, self.in_order(), strict=True):
            if not 0 <= rate <= 1:
                raise ValueError(f"{name}: must be from 0 to 1, not {rate}")

    @classmethod
    def uniform(cls, rate: float) -> FlipRates:
        return cls(rate, rate, rate, rate)

    @classmethod
    def of_intervals(cls, intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
        return cls(*map(curve.failure, intervals.in_order()))

    def in_order(self) -> tuple[float, float, float, float]:
        return self.hst_msb, self.hst_lsb, self.lst_msb, self.lst_lsb

    @property
    def mean(self) -> float:
        return sum(self.in_order()) / len(GROUPS)

    @property
    def any(self) -> bool:
        return any(self.in_order())


NO_FLIPS = FlipRates()


def iso_power(intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
    """Return the rates of the uniform interval with the same number of refreshes: the harmonic mean.

    Source: kelle.txt, table 4. Section 7.2 claims "the same average failure rate", but 2DRP loses several times more bits.
    """
    return FlipRates.of_intervals(RefreshIntervals.uniform(intervals.mean_ns), curve)


def iso_failure(intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
    """Return the uniform rate that loses the same number of bits (section 7.2)."""
    return FlipRates.uniform(FlipRates.of_intervals(intervals, curve).mean)


_HINT = (
    "write a rate by group: uniform=1e-3, msb=1e-2, lsb=1e-2, hst=1e-2 or lst=1e-2; intervals: 2drp, 2drp=540us, "
    "interval=1050us or interval=360us,5.4ms,1.44ms,7.2ms; or none"
)
_ONE_SIDED = {
    "uniform": GROUPS,
    "msb": ("hst_msb", "lst_msb"),
    "lsb": ("hst_lsb", "lst_lsb"),
    "hst": ("hst_msb", "hst_lsb"),
    "lst": ("lst_msb", "lst_lsb"),
}


def one_sided(side: str, rate: float) -> FlipRates:
    """Return `rate` for one `side` ("uniform", "msb", "lsb", "hst", "lst"), 0 elsewhere (figure 8)."""
    return FlipRates(**dict.fromkeys(_ONE_SIDED[side], rate))


def parse_flips(text: str, curve: RetentionCurve) -> FlipRates:
    """Return the rates that `text` (see `_HINT`) specifies; UsageError names an invalid part."""
    kind, _, value = text.strip().partition("=")
    if kind == "none" and not value:
        return NO_FLIPS
    if kind in _ONE_SIDED:
        try:
            return one_sided(kind, float(value))
        except ValueError:
            raise UsageError(f"flips: '{text}' has no rate from 0 to 1", _HINT) from None
    if kind == "2drp" and not value:
        return FlipRates.of_intervals(KELLE_INTERVALS, curve)
    if kind not in ("interval", "2drp") or not value:
        raise UsageError(f"flips: '{text}' is neither rates nor intervals", _HINT)
    try:
        intervals = parse_intervals(value)
    except UsageError as error:
        raise UsageError(f"flips: '{text}': {error.message}", _HINT) from error
    if kind == "2drp":
        columns = {printed: column for printed, column in TABLE4_INTERVALS.items() if abs(intervals.mean_ns - printed) < 1}
        if not columns:
            known = ", ".join(f"{printed // 1000}us" for printed in TABLE4_INTERVALS)
            raise UsageError(f"flips: table 4 has no column '{value}'", f"one of: {known}")
        (intervals,) = columns.values()
    return FlipRates.of_intervals(intervals, curve)


Names = NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)


def name_rows(*parts: int | Int64s) -> Names:
    """Return one 64-bit hash per row of the numbers that identify it (seed, layer, head, position...)."""
    with np.errstate(over="ignore"):
        name = np.zeros((), np.uint64)
        for part in parts:
            name = _mixed(name + _STEP + np.asarray(part).astype(np.uint64))
    return name


def _mixed(z: Names) -> Names:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Names = z ^ (z >> np.uint64(31))
    return mixed


_mixed_one = njit(nogil=True)(_mixed)


def draw(names: Names, dim: int, rates: FlipRates) -> tuple[Bits, Bits]:
    """Return the bits that rows lose as HST and as LST, uint16 [*names.shape, dim] each."""
    shape = (*names.shape, dim)
    hst, lst = np.empty(shape, np.uint16), np.empty(shape, np.uint16)
    limits = np.array([round(rate * 2**32) for rate in rates.in_order()], np.uint64)
    _draw(names.reshape(-1), limits, hst.reshape(-1, dim), lst.reshape(-1, dim))
    return hst, lst


@njit(cache=True, nogil=True)
def _draw(names, limits, hst, lst):  # type: ignore[no-untyped-def]
    for row in range(names.size):
        z = names[row]
        for column in range(hst.shape[1]):
            as_hst = as_lst = 0
            for pair in range(8):
                z += _STEP
                m = _mixed_one(z)
                low = 0 if pair >= 4 else 1  # bits 15 to 8 are the MSB group
                for half in range(2):
                    number = m >> np.uint64(32) if half else m & np.uint64(0xFFFFFFFF)
                    bit = 1 << (2 * pair + half)
                    if number < limits[low]:
                        as_hst |= bit
                    if number < limits[2 + low]:
                        as_lst |= bit
            hst[row, column] = as_hst
            lst[row, column] = as_lst


Where = tuple[NDArray[np.intp], ...]
HST, LST = 1, 2


@dataclass(frozen=True)
class CellSettings:
    """The format and the losses of vectors. The format "exact" rounds and loses nothing."""

    format: Format = "int16"
    rates: FlipRates = NO_FLIPS
    seed: int = 0
    sticky: bool = True

    def __post_init__(self) -> None:
        if self.format == "exact" and self.rates.any:
            raise ValueError("rates: must be 0 for the format 'exact'")


@dataclass
class Cells:
    """Rows [*places, dim]; `write` and `settle` keep their `readings`, float32, up to date."""

    places: tuple[int, ...]
    dim: int
    settings: CellSettings
    readings: Floats = field(init=False)

    def __post_init__(self) -> None:
        shape = (*self.places, self.dim)
        self.readings = np.zeros(shape, np.float32)
        if self.settings.rates.any:
            self._groups = np.zeros(self.places, np.uint8)  # groups since the write: HST, LST or both; 0: not settled yet
            self._bits, self._hst, self._lst = (np.zeros(shape, np.uint16) for _ in range(3))
            self._scales = np.zeros((*self.places, 1), np.float32)

    def write(self, at: Where, rows: Floats, names: Names) -> None:
        """Store `rows` [n, dim] at `at` (one index array per axis); `names` [n] seed their losses."""
        how = self.settings.format
        if how == "exact":
            self.readings[at] = rows
            return
        bits, scales = encode(rows, how)
        self.readings[at] = decode(bits, scales, how)
        if self.settings.rates.any:
            self._groups[at], self._bits[at], self._scales[at] = 0, bits, scales
            self._hst[at], self._lst[at] = draw(names, self.dim, self.settings.rates)

    def grow(self, more: int) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self.places = (self.places[0] + more, *self.places[1:])

    def settle(self, hst: Flags, used: Flags) -> Where:
        """Set the groups of the `used` rows; return the places whose readings may have changed.

        Both arguments are [*places], or cover a prefix of each axis.
        """
        if not self.settings.rates.any:
            return np.nonzero(np.zeros(hst.shape, np.bool_))
        before = self._groups[tuple(map(slice, hst.shape))]
        now = np.where(hst, np.uint8(HST), np.uint8(LST))
        groups = before | now if self.settings.sticky else now
        changed = np.nonzero(used & (groups != before))
        self._groups[changed] = groups[changed]
        bits, how = self._bits[changed] ^ self._lost(changed), self.settings.format
        self.readings[changed] = decode(bits, self._scales[changed], how)
        return changed

    def _lost(self, at: Where) -> Bits:
        groups = self._groups[at][:, None]
        lost = np.where(groups & HST, self._hst[at], 0) | np.where(groups & LST, self._lst[at], 0)
        return lost.astype(np.uint16)

    def lost_bits(self, used: Flags) -> int:
        return int(np.unpackbits(self._lost(np.nonzero(used)).view(np.uint8)).sum()) if self.settings.rates.any else 0
