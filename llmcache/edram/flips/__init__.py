"""Bit flips of 2DRP: what is read from eDRAM whose four groups are refreshed at their intervals, decided by a seed."""

from llmcache.edram.flips.cells import Cells, CellSettings
from llmcache.edram.flips.draws import draw, name_rows
from llmcache.edram.flips.rates import NO_FLIPS, FlipRates, iso_failure, iso_power, one_sided, parse_flips

__all__ = [
    "NO_FLIPS",
    "CellSettings",
    "Cells",
    "FlipRates",
    "draw",
    "iso_failure",
    "iso_power",
    "name_rows",
    "one_sided",
    "parse_flips",
]
