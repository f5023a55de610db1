"""AERP: each key-value head keeps the tokens it attends to most, and popular tokens are kept as x and recomputed."""

from llmcache.edram.aerp.attention import attend, attend_prompt, column_sums
from llmcache.edram.aerp.layer import AerpLayer
from llmcache.edram.aerp.projections import Projections, Recompute, Rope
from llmcache.edram.aerp.settings import RECOMPUTE, AerpSettings, LayerShape
from llmcache.edram.aerp.slots import Placed, Slots

__all__ = [
    "RECOMPUTE",
    "AerpLayer",
    "AerpSettings",
    "LayerShape",
    "Placed",
    "Projections",
    "Recompute",
    "Rope",
    "Slots",
    "attend",
    "attend_prompt",
    "column_sums",
]
