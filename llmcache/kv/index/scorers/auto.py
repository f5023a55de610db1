"""Auto: scores exactly while that is cheap, and by a tree where a trial has shown that it is faster and finds enough.

A trial builds the tree and asks both the last queries. It takes place when `least` tokens are there, and whenever their
number has doubled since; building for trials costs at most twice what building the last tree does. What it finds
depends on measured times: two runs may choose differently, and so select differently.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.scorers.base import Floats, Positions, Scorer, ScorerSettings
from llmcache.kv.index.scorers.dci import Dci
from llmcache.kv.index.scorers.exact import Exact
from llmcache.kv.spill.shape import KvShape

QUERIES = 16
"""Sets of queries that a trial asks."""
WIDER = (1, 2, 4)
"""How much wider than its knobs say a tree may look to find enough."""
MARGIN = 1.1
"""How much faster the tree has to be: times of a few queries are not exact."""


@dataclass(frozen=True)
class Trial:
    """What a trial has found: *measured* medians of times in seconds and the mean share of the best keys found."""

    tokens: int
    exact_s: float
    dci_s: float
    recall: float
    wider: int
    enough: bool

    @property
    def chosen(self) -> str:
        """The faster of those that find enough."""
        return "dci" if self.enough and self.dci_s * MARGIN < self.exact_s else "exact"


class Auto(Scorer):
    """Keeps either the keys or trees of them, never both but for the time of a trial."""

    name = "auto"

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first, settings)
        self.used: Exact | Dci = Exact(shape, first, self.settings)
        self.trial: Trial | None = None
        self._asked: deque[tuple[Floats, int]] = deque(maxlen=QUERIES)
        self._next = self.settings.least

    @property
    def size_bytes(self) -> int:
        """Memory of what is in use."""
        return self.used.size_bytes

    @property
    def why(self) -> str:
        """Which scorer is in use, and by which figures."""
        if self.trial is None:
            return f"exact: {len(self)} keys of {self.shape.head_dim}, a tree is tried from {self._next} on"
        told = f"{1e6 * self.trial.exact_s:.0f} us exact, {1e6 * self.trial.dci_s:.0f} us dci"
        return f"{self.used.name}: {told} with recall {self.trial.recall:.2f}, measured at {self.trial.tokens} keys"

    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None:
        self.used.add(keys, scales)

    def _crop(self, end: int) -> None:
        self.used.crop(end)

    def _top(self, queries: Floats, k: int) -> Positions:
        self._asked.append((queries.copy(), k))
        if isinstance(self.used, Exact) and len(self) >= self._next and len(self._asked) >= QUERIES:
            self._try(self.used)
        found = self.used.top(queries, k)
        self.touched = self.used.touched
        return found

    def _try(self, exact: Exact) -> None:
        """Builds trees and keeps them if they win. Once they do, they stay: a scan grows faster with the number of keys."""
        tree = Dci(self.shape, self.first, self.settings)
        tree.heads.insert(exact.singles(self.first, self.end), np.arange(self.first, self.end))
        tree.end = self.end
        for wider in WIDER:
            knobs = self.settings.dci
            wide = replace(
                knobs,
                field_of_view=knobs.field_of_view * wider,
                visit=min(1.0, knobs.visit * wider),
                visit_each=knobs.visit_each * wider,
            )
            for index in tree.heads.indexes:
                index.settings = replace(wide, seed=index.settings.seed)
            self.trial = self._measured(exact, tree, wider)
            if self.trial.enough or self.trial.dci_s > self.trial.exact_s:
                break
        self._next = 2 * len(self)
        if self.trial is not None and self.trial.chosen == "dci":
            self.used = tree

    def _measured(self, exact: Exact, tree: Dci, wider: int) -> Trial:
        times: dict[str, list[float]] = {"exact": [], "dci": []}
        recalls = []
        for queries, k in [self._asked[0], *self._asked]:  # the first once more: what was never used is slow
            found = []
            for scorer in (exact, tree):
                begin = time.perf_counter()
                found.append(scorer.top(queries, k) if scorer is exact else tree.heads.top(queries, k).tokens)
                times[scorer.name].append(time.perf_counter() - begin)
            recalls.append(recall_of(found[1], found[0]))
        recall = float(np.mean(recalls[1:]))
        # As far as so few queries can tell.
        enough = recall + float(np.std(recalls[1:])) / len(self._asked) ** 0.5 >= self.settings.recall
        exact_s, dci_s = (float(np.median(times[name][1:])) for name in ("exact", "dci"))
        return Trial(len(self), exact_s, dci_s, recall, wider, enough)


def recall_of(found: Positions, wanted: Positions) -> float:
    """Returns the share of `wanted` [kv_heads, k] that is in `found` [kv_heads, n]."""
    hits = sum(len(np.intersect1d(*pair)) for pair in zip(found, wanted, strict=True))
    return hits / max(1, wanted.size)
