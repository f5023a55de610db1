"""Rows of 16-bit numbers in eDRAM that is refreshed too seldom: what was written, what each group loses, what is read.

A loss is decided once, at the write, and stays until the next write: retention failures are weak cells, and refreshing a
wrong bit keeps it wrong. By default a bit that was lost while its token had a low score stays lost when the token is
promoted (`sticky`). Differs from the paper: section 4.2 does not say when bits are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.flips.draws import Names, draw
from llmcache.edram.flips.formats import FORMATS, Floats, Format, Stored, decode, encode
from llmcache.edram.flips.rates import NO_FLIPS, FlipRates

Where = tuple[NDArray[np.intp], ...]
HST, LST = 1, 2


@dataclass(frozen=True)
class CellSettings:
    """How vectors are stored and lost.

    `polarity`: which stored bits leak ("any", or only "ones" or "zeros", as real cells do). `sticky`: see the module.
    `nonfinite`: what a half reads as that is no number any more ("clamp", "keep"). `protect`: sinks and the recent window
    count as high-score tokens whatever their score; by score alone every new token would be a low one.
    """

    format: Format = "int16"
    rates: FlipRates = NO_FLIPS
    seed: int = 0
    sticky: bool = True
    polarity: Literal["any", "ones", "zeros"] = "any"
    nonfinite: Literal["clamp", "keep"] = "clamp"
    protect: bool = True

    def __post_init__(self) -> None:
        known = {"format": FORMATS, "polarity": ("any", "ones", "zeros"), "nonfinite": ("clamp", "keep")}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: '{getattr(self, name)}', known are {', '.join(values)}")
        if self.format == "exact" and self.rates.any:
            raise ValueError("rates: format 'exact' has no bits to lose")


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
        self._groups = np.zeros(self.places, np.uint8)  # HST, LST or both since the write; 0: not settled yet
        if self.settings.rates.any:
            self._bits, self._hst, self._lst = (np.zeros(shape, np.uint16) for _ in range(3))
            self._scales = np.zeros((*self.places, 1), np.float32)

    def write(self, at: Where, rows: Floats, names: Names) -> None:
        """Stores `rows` [n, dim] at the places `at` (one index array per axis); `names` [n] seeds what they will lose."""
        how = self.settings.format
        stored = encode(rows, how)
        self._groups[at] = 0
        self.readings[at] = decode(stored, how)
        if not self.settings.rates.any:
            return
        self._bits[at] = stored.bits
        if stored.scales is not None:
            self._scales[at] = stored.scales
        lost = draw(names, self.dim, self.settings.rates)
        for mask, into in zip(lost, (self._hst, self._lst), strict=True):
            into[at] = mask & self._leaking(stored)

    def _leaking(self, stored: Stored) -> NDArray[np.uint16]:
        if self.settings.polarity == "any":
            return np.full(stored.bits.shape, 0xFFFF, np.uint16)
        return stored.bits if self.settings.polarity == "ones" else ~stored.bits

    def grow(self, more: int) -> None:
        """Adds `more` places along the first axis."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self.places = (self.places[0] + more, *self.places[1:])

    def settle(self, hst: NDArray[np.bool_], used: NDArray[np.bool_]) -> Where:
        """Puts the `used` rows in their groups for a step (`hst`) and returns which readings may differ.

        Both [*places], or fewer from the first place of each axis on: the rest is not in use.
        """
        if not self.settings.rates.any:
            return np.nonzero(np.zeros(hst.shape, np.bool_))
        before = self._groups[tuple(map(slice, hst.shape))]
        now = np.where(hst, np.uint8(HST), np.uint8(LST))
        groups = before | now if self.settings.sticky else now
        changed = np.nonzero(used & (groups != before))
        self._groups[changed] = groups[changed]
        both = self._groups[changed][:, None]
        lost = np.where(both & HST, self._hst[changed], 0) | np.where(both & LST, self._lst[changed], 0)
        stored = Stored(self._bits[changed], self._scales[changed])
        self.readings[changed] = decode(stored, self.settings.format, lost.astype(np.uint16), self.settings.nonfinite)
        return changed

    def lost_bits(self, used: NDArray[np.bool_]) -> int:
        """Returns how many bits of the `used` rows read wrongly, in the groups they have been in."""
        if not self.settings.rates.any:
            return 0
        at = np.nonzero(used)
        groups = self._groups[at][:, None]
        lost = np.where(groups & HST, self._hst[at], 0) | np.where(groups & LST, self._lst[at], 0)
        return int(np.unpackbits(lost.astype(np.uint16).view(np.uint8)).sum())
