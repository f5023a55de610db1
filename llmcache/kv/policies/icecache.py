"""IceCache: a tree of keys for each head finds the important tokens without a scan."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmcache.errors import DataError
from llmcache.kv.index.dci import DciSettings, load_indexes, path_of, save_indexes
from llmcache.kv.index.scorers import SCORERS, AutoScorer, DciScorer, ScorerSettings
from llmcache.kv.policies.base import one_of
from llmcache.kv.policies.indexed import IndexedPolicy, IndexedSettings

log = logging.getLogger("llmcache.kv")


@dataclass(frozen=True)
class IceCacheSettings(IndexedSettings):
    """Settings of IceCache.

    `scorer`: "dci", "exact", "rounded" (keys of one byte per number), "quest", or "auto", which measures whether the tree is
    faster, and otherwise scans (see `policy.whys`). `whole_pages`: choose whole pages of the tree, as in the paper, instead
    of the best keys. `dci`: settings of the tree.
    """

    scorer: str = one_of("auto", SCORERS)
    whole_pages: bool = False
    dci: DciSettings = field(default_factory=DciSettings)


class IceCache(IndexedPolicy):
    """IceCache: keys are clustered in DCI-trees, which grow as pages leave the window; queries descend the trees.

        prefilled: a tree is built for each key head while the next layer computes
        select:    the tokens that the trees find (algorithms 3 and 4), from the union over the queries of a key head
        attended:  the page that leaves the window is inserted (algorithm 1, lines 27 to 37)

    Trees are in host memory (see `DciIndex` for their size); keys and values are in the store's tiers.

    Source: icecache.txt, section 4, appendix A and B, algorithms 1 to 4. Differs from the paper: pages of the tree are not
    pages of the store, whose file only grows and serves all heads, so that the chosen rows are fetched individually in one
    gather; all layers keep to the budget by default (the paper: `full_layers` 2); and the union is cut to the budget.
    """

    name = "icecache"
    title = "IceCache"
    settings_class = IceCacheSettings
    settings: IceCacheSettings

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        settings, made = self.settings, SCORERS[self.settings.scorer]
        self.knobs = ScorerSettings(settings.combine, self.store.config.threads, settings.whole_pages, dci=settings.dci)
        self._use(lambda first: made(self.store.shape, first, self.knobs))

    @property
    def whys(self) -> list[str]:
        """For each layer, the scorer of its first sequence and the reason; empty for a layer without one."""
        firsts = [row[0] for row in self.indexes.found]
        return ["" if scorer is None else scorer.why for scorer in firsts]

    # Saving trees next to the spill file

    def saved(self) -> None:
        """Replace the trees next to the spill file; MissingRequirement if that fails."""
        if self.store.config.path is None:
            return
        found: dict[tuple[int, int, int], Any] = {}
        for layer, row in enumerate(self.indexes.found):
            for sequence, scorer in enumerate(row):
                tree = scorer.used if isinstance(scorer, AutoScorer) else scorer
                if isinstance(tree, DciScorer):
                    found |= {(layer, sequence, head): index for head, index in enumerate(tree.indexes)}
        save_indexes(path_of(self.store.config.path), found, self._identity())

    def restored(self) -> None:
        """Restore saved trees, unless the scorer needs none; a layer without a tree builds its own.

        Trees that are damaged, or of another state of the spill file, are ignored with a log message, because they can be
        rebuilt.
        """
        path = self.store.config.path
        if path is None or self.settings.scorer not in ("dci", "auto") or not path_of(path).exists():
            return
        try:
            found = load_indexes(path_of(path), self._identity())
        except DataError as error:
            log.warning("%s: the trees are rebuilt", error.message)
            return
        for layer, sequence in {place[:2] for place in found}:
            tree = DciScorer(self.store.shape, int(self._starts[sequence]), self.knobs)
            tree.indexes = [found[layer, sequence, head] for head in range(self.kv_heads)]
            tree.end = tree.first + len(tree.indexes[0])
            self.indexes.found[layer][sequence] = tree
        self.indexes.crop(self.store.length)  # the window may be larger than before

    def _identity(self) -> dict[str, Any]:
        """Return the properties that an index and a store must share: shape, number and ids of tokens, padding, and sink."""
        store = self.store
        ids = zlib.crc32(np.ascontiguousarray(store.ids).tobytes())
        identity = {"shape": store.shape.to_json(), "batch": store.batch, "tokens": store.length}
        return {**identity, "ids": ids, "first": self.first.tolist(), "sink": store.config.sink_pages}
