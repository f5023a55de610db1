"""Dci: a DCI-tree for each head finds the keys without looking at all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.heads import DciHeads
from llmcache.kv.index.dci.transforms import single
from llmcache.kv.index.scorers.base import Floats, Positions, Scorer, ScorerSettings
from llmcache.kv.spill.shape import KvShape


class Dci(Scorer):
    """Keeps the keys as halves in trees (see `DciIndex` for their memory); what it finds is not always the best."""

    name = "dci"

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first, settings)
        knobs = self.settings
        self.heads = DciHeads(shape.kv_heads, shape.head_dim, knobs.dci, first, knobs.threads)

    @property
    def size_bytes(self) -> int:
        """Memory of the trees."""
        return self.heads.size_bytes

    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None:
        self.heads.insert(single(keys, scales), np.arange(self.end, self.end + keys.shape[1]))

    def _crop(self, end: int) -> None:
        self.heads.crop(end)

    def _top(self, queries: Floats, k: int) -> Positions:
        choose = self.heads.pages if self.settings.whole_pages else self.heads.top
        chosen = choose(queries, k)
        self.touched = chosen.touched
        return chosen.tokens
