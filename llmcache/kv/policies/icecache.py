"""IceCache: a tree of keys for each head tells which tokens matter, without a look at all of them."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmcache.errors import DataError, UsageError
from llmcache.kv.index.dci import DciSettings, load_indexes, path_of, save_indexes
from llmcache.kv.index.scorers import SCORERS, Auto, Dci, Scorer, ScorerSettings, scorer_class
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Timeline
from llmcache.kv.policies.indexed import IndexedPolicy, IndexedSettings
from llmcache.kv.policies.settings import PolicySettings, check
from llmcache.kv.tiers import KvStore

log = logging.getLogger("llmcache.kv")


@dataclass(frozen=True)
class IceCacheSettings(IndexedSettings):
    """Settings of IceCache.

    `scorer`: "dci", "exact", "rounded" (keys of a byte a number), "quest", or "auto", which measures whether the tree is
    worth it, and scans exactly where it is not (`policy.whys` tells).
    `whole_pages`: whole pages of the tree, as in the paper, rather than the best keys alone. `dci`: the knobs of the tree.
    """

    scorer: str = "auto"
    whole_pages: bool = False
    dci: DciSettings = field(default_factory=DciSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scorer in SCORERS, "scorer", self.scorer, f"one of: {', '.join(SCORERS)}")

    @classmethod
    def reuse(cls, **fields: Any) -> IceCacheSettings:
        """Returns IceCache (reuse): from the third layer on every third chooses; icecache.txt, appendix B."""
        return cls(**{"full_layers": 2, "anchor_every": 3, **fields})


class IceCache(IndexedPolicy):
    """IceCache: keys are clustered in DCI-trees, which grow as pages leave the window; queries walk down the trees.

        prefilled: a tree for each head of keys is built while the next layer computes
        select:    the tokens that the trees find (algorithms 3 and 4), of the union over the queries of a key head
        attended:  the page that leaves the window is inserted (algorithm 1, lines 27 to 37)

    Trees stay in the host's memory (see `DciIndex` for how much); keys and values are in the store's tiers.

    Source: icecache.txt, section 4, appendix A and B, algorithms 1 to 4. Differs from the paper: pages of the tree are not
    pages of the store, whose file only grows and serves all heads, so what is chosen is fetched row by row, in one bulk
    gather; all layers keep to the budget unless `full_layers` says otherwise (the paper: 2); the union is cut to the budget.
    """

    name = "icecache"
    title = "IceCache"
    settings_class = IceCacheSettings

    def __init__(self, store: KvStore, settings: PolicySettings | None = None, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(store, settings, timeline)
        asked = self.settings
        assert isinstance(asked, IceCacheSettings)
        self.scorer = asked.scorer
        made = scorer_class(asked.scorer)
        threads = store.config.threads
        self.knobs = ScorerSettings(asked.combine, threads, asked.whole_pages, dci=asked.dci)
        self._use(lambda first: made(store.shape, first, self.knobs))

    @property
    def whys(self) -> list[str]:
        """Which scorer each layer uses for its first sequence, and why; empty for a layer without one."""
        firsts = [row[0] for row in self.indexes.scorers]
        return ["" if scorer is None else scorer.why for scorer in firsts]

    # Beside the spill file

    def saved(self) -> None:
        """Writes the trees beside the spill file, in place of older ones; EnvironmentProblem if it cannot."""
        if self.store.config.path is not None:
            self.save_index()

    def restored(self) -> None:
        """Takes the trees that were saved, where trees are asked for; a layer without them builds its own.

        Trees that are damaged, or of another state of the spill file, are left alone and logged: they can be built again.
        """
        path = self.store.config.path
        if path is None or self.scorer not in ("dci", "auto") or not path_of(path).exists():
            return
        try:
            self.load_index()
        except DataError as error:
            log.warning("%s: trees are built anew", error.message)

    def save_index(self) -> int:
        """Writes all trees beside the spill file; returns the bytes. After `KvStore.save`, between steps.

        UsageError: the store has no file. EnvironmentProblem: it cannot be written.
        """
        found: dict[tuple[int, int, int], Any] = {}
        for layer, row in enumerate(self.indexes.scorers):
            for sequence, scorer in enumerate(row):
                tree = _tree_of(scorer)
                if tree is not None:
                    found |= {(layer, sequence, head): index for head, index in enumerate(tree.indexes)}
        return save_indexes(path_of(self._path), found, self._identity())

    def load_index(self) -> int:
        """Takes the trees that `save_index` has written; returns how many. What is missing is built when it is needed.

        DataError: damaged, or of another spill file or state of it. EnvironmentProblem: not there.
        """
        found = load_indexes(path_of(self._path), self._identity())
        for layer, sequence, head in found:
            if head == 0:
                heads = [found[layer, sequence, other] for other in range(self.kv_heads)]
                first = int(self._starts[sequence])
                tree = Dci(self.store.shape, first, self.knobs)
                tree.indexes = heads
                tree.end = first + len(heads[0])
                self.indexes.scorers[layer][sequence] = tree
        return len(found)

    @property
    def _path(self) -> Any:
        if self.store.config.path is None:
            raise UsageError("path: the store has no spill file that an index could lie beside", "make it with one")
        return self.store.config.path

    def _identity(self) -> dict[str, Any]:
        """What an index must have in common with a spill file: its shape, how many tokens of which ids, and padding."""
        store = self.store
        ids = zlib.crc32(np.ascontiguousarray(store.ids).tobytes())
        identity = {"shape": store.shape.to_json(), "batch": store.batch, "tokens": store.length}
        return {**identity, "ids": ids, "first": self.first.tolist()}


def _tree_of(scorer: Scorer | None) -> Dci | None:
    used = scorer.used if isinstance(scorer, Auto) else scorer
    return used if isinstance(used, Dci) else None
