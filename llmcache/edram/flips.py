"""Bit flips of 2DRP: what is read from eDRAM whose four groups are refreshed at their intervals, decided by a seed.

Format: 16-bit cells hold integers with one scale per vector, or halves. Differs from the paper: it says "16 bits" and never
which. The choice decides the result: a lost exponent bit of a half wrecks the model at rates that integers hardly notice,
so integers are the default.

Draws: one uniform number per stored bit, a hash of where it lies, so no order of drawing matters. A bit is lost in a group
if its number is below the group's rate. The same bit has the same number at every rate, so what is lost at a short
interval is lost at every longer one (nested), and two runs with one seed differ by the rates alone.

A loss is decided once, at the write, and stays until the next write: retention failures are weak cells, and refreshing a
wrong bit keeps it wrong. By default a bit that was lost while its token had a low score stays lost when the token is
promoted (`sticky`). Differs from the paper: section 4.2 does not say when bits are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.edram.constants import GROUPS, KELLE_INTERVALS, TABLE4_INTERVALS, RefreshIntervals
from llmcache.edram.retention import RetentionCurve, parse_intervals
from llmcache.errors import UsageError

Bits = NDArray[np.uint16]
Format = Literal["int16", "fp16", "exact"]
LARGEST_HALF = 65504.0


def encode(rows: Floats, how: Format) -> tuple[Bits, Floats]:
    """Returns `rows` [..., dim] as stored: bits [..., dim], and scales [..., 1], which lie where nothing is lost.

    int16: the largest number of a vector becomes 32767; halves have no scales (1).
    """
    if how == "fp16":
        limited = np.clip(rows, -LARGEST_HALF, LARGEST_HALF)
        return limited.astype(np.float16).view(np.uint16), np.ones((*rows.shape[:-1], 1), np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(32767), np.float32(1)).astype(np.float32)
    return np.rint(rows / scales).astype(np.int16).view(np.uint16), scales


def decode(bits: Bits, scales: Floats, how: Format) -> Floats:
    """Returns what is read of `bits`, float32 [..., dim].

    Halves whose flipped bits are no number: NaN reads as 0, infinities as the largest half.
    """
    if how == "int16":
        return bits.view(np.int16).astype(np.float32) * scales
    numbers = bits.view(np.float16).astype(np.float32)
    return np.nan_to_num(numbers, copy=False, nan=0.0, posinf=LARGEST_HALF, neginf=-LARGEST_HALF)


@dataclass(frozen=True)
class FlipRates:
    """P(a stored bit is lost) of the four groups: high- and low-score tokens, bits 15 to 8 and 7 to 0."""

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
        """Returns one rate for all groups (figure 8a)."""
        return cls(rate, rate, rate, rate)

    @classmethod
    def of_intervals(cls, intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
        """Returns what groups refreshed at `intervals` lose, by `curve`."""
        return cls(*map(curve.failure, intervals.in_order()))

    def in_order(self) -> tuple[float, float, float, float]:
        """Returns the rates in the order of `GROUPS`."""
        return self.hst_msb, self.hst_lsb, self.lst_msb, self.lst_lsb

    @property
    def mean(self) -> float:
        """Mean over the groups: what is lost if they are of one size."""
        return sum(self.in_order()) / len(GROUPS)

    @property
    def any(self) -> bool:
        """Whether anything can be lost."""
        return any(self.in_order())


NO_FLIPS = FlipRates()


def iso_power(intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
    """Returns the rates of the uniform interval that costs as many refreshes as `intervals`: their harmonic mean.

    Source: kelle.txt, table 4, whose uniform intervals are this mean. Differs from the paper: section 7.2 says they have
    "the same average failure rate"; by the curve here 2DRP then fails several times more bits. `iso_failure` has it.
    """
    return FlipRates.of_intervals(RefreshIntervals.uniform(intervals.mean_ns), curve)


def iso_failure(intervals: RefreshIntervals, curve: RetentionCurve) -> FlipRates:
    """Returns the uniform rate that loses as many bits in the mean of the groups as `intervals`: section 7.2, literally."""
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
    """Returns `rate` for the groups of one `side` ("uniform", "msb", "lsb", "hst", "lst"), 0 for the others (figure 8)."""
    return FlipRates(**dict.fromkeys(_ONE_SIDED[side], rate))


def parse_flips(text: str, curve: RetentionCurve) -> FlipRates:
    """Returns the rates meant by `text`; UsageError names what cannot be understood.

    "none"; "uniform=1e-3", likewise msb, lsb, hst, lst; "2drp" (section 7.1), "2drp=540us" (a column of table 4);
    "interval=1050us" or the four intervals in the order of `GROUPS`.
    """
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
    """Returns one 64-bit name per row from numbers that tell it apart (seed, layer, head, position...), broadcast."""
    with np.errstate(over="ignore"):
        name = np.zeros((), np.uint64)
        for part in parts:
            name = _mixed(name + _STEP + np.asarray(part).astype(np.uint64))
    return name


def _mixed(z: Names) -> Names:
    """Splitmix64's finaliser: every bit of the result depends on every bit of `z`."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Names = z ^ (z >> np.uint64(31))
    return mixed


_mixed_one = njit(nogil=True)(_mixed)


def draw(names: Names, dim: int, rates: FlipRates) -> tuple[Bits, Bits]:
    """Returns the bits that rows of `dim` numbers lose as HST and as LST, uint16 [*names.shape, dim] each."""
    shape = (*names.shape, dim)
    hst, lst = np.empty(shape, np.uint16), np.empty(shape, np.uint16)
    limits = np.array([round(rate * 2**32) for rate in rates.in_order()], np.uint64)
    _draw(names.reshape(-1), limits, hst.reshape(-1, dim), lst.reshape(-1, dim))
    return hst, lst


@njit(cache=True, nogil=True)
def _draw(names, limits, hst, lst):  # type: ignore[no-untyped-def]
    """Eight hashes a number: each is the draws of two bits, 32 binary digits fine."""
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
    """How vectors are stored and lost (`sticky`: see the module); of "exact" ones nothing is rounded, and nothing lost."""

    format: Format = "int16"
    rates: FlipRates = NO_FLIPS
    seed: int = 0
    sticky: bool = True

    def __post_init__(self) -> None:
        if self.format == "exact" and self.rates.any:
            raise ValueError("rates: must be 0 for the format 'exact'")


@dataclass
class Cells:
    """Rows [*places, dim] with their `readings`, float32, kept up to date by `write` and `settle`."""

    places: tuple[int, ...]
    dim: int
    settings: CellSettings
    readings: Floats = field(init=False)

    def __post_init__(self) -> None:
        shape = (*self.places, self.dim)
        self.readings = np.zeros(shape, np.float32)
        if self.settings.rates.any:
            self._groups = np.zeros(self.places, np.uint8)  # HST, LST or both since the write; 0: not settled yet
            self._bits, self._hst, self._lst = (np.zeros(shape, np.uint16) for _ in range(3))
            self._scales = np.zeros((*self.places, 1), np.float32)

    def write(self, at: Where, rows: Floats, names: Names) -> None:
        """Stores `rows` [n, dim] at the places `at` (one index array per axis); `names` [n] seeds what they will lose."""
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
        """Adds `more` places along the first axis."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self.places = (self.places[0] + more, *self.places[1:])

    def settle(self, hst: Flags, used: Flags) -> Where:
        """Puts the `used` rows in their groups for a step (`hst`) and returns which readings may differ.

        Both [*places], or fewer from the first place of each axis on: the rest is not in use. Only where bits can be lost.
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
        """Returns the bits that the rows at `at` have lost in the groups they have been in."""
        groups = self._groups[at][:, None]
        lost = np.where(groups & HST, self._hst[at], 0) | np.where(groups & LST, self._lst[at], 0)
        return lost.astype(np.uint16)

    def lost_bits(self, used: Flags) -> int:
        """Returns how many bits of the `used` rows read wrongly."""
        return int(np.unpackbits(self._lost(np.nonzero(used)).view(np.uint8)).sum()) if self.settings.rates.any else 0
