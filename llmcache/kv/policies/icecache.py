"""IceCache: a tree of keys for each head tells which tokens matter, without a look at all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcache.kv.index.dci.index import DciSettings
from llmcache.kv.index.scorers import SCORERS, ScorerSettings
from llmcache.kv.policies.base import one_of
from llmcache.kv.policies.indexed import IndexedPolicy, IndexedSettings


@dataclass(frozen=True)
class IceCacheSettings(IndexedSettings):
    """Settings of IceCache.

    `scorer`: "dci", "exact", "rounded" (keys of a byte a number), "quest", or "auto", which measures whether the tree is
    worth it, and scans exactly where it is not (`policy.whys` tells).
    `whole_pages`: whole pages of the tree, as in the paper, rather than the best keys alone. `dci`: the knobs of the tree.
    """

    scorer: str = one_of("auto", SCORERS)
    whole_pages: bool = False
    dci: DciSettings = field(default_factory=DciSettings)


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
    settings: IceCacheSettings

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        asked, made = self.settings, SCORERS[self.settings.scorer]
        knobs = ScorerSettings(asked.combine, self.store.config.threads, asked.whole_pages, dci=asked.dci)
        self._use(lambda first: made(self.store.shape, first, knobs))

    @property
    def whys(self) -> list[str]:
        """Which scorer each layer uses for its first sequence, and why; empty for a layer without one."""
        firsts = [row[0] for row in self.indexes.scorers]
        return ["" if scorer is None else scorer.why for scorer in firsts]
