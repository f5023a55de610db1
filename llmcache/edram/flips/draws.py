"""One uniform number per stored bit, drawn when it is written: a hash of where it lies, so no order of drawing matters.

A bit is lost in a group if its number is below the group's rate. The same bit has the same number at every rate, so what
is lost at a short interval is lost at every longer one (nested), and two runs with one seed differ by the rates alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.edram.flips.formats import Bits
from llmcache.edram.flips.rates import FlipRates

Names = NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)


def name_rows(*parts: int | NDArray[np.int64]) -> Names:
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
                z += np.uint64(0x9E3779B97F4A7C15)
                m = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                m = (m ^ (m >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                m ^= m >> np.uint64(31)
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
