"""Quest: chooses pages by bounds from their smallest and largest numbers."""

from __future__ import annotations

from llmcache.kv.index.scorers import QuestScorer, ScorerSettings
from llmcache.kv.policies.indexed import IndexedPolicy


class Quest(IndexedPolicy):
    """Quest: the pages whose keys could have the largest products, without reading the keys.

        select:   bounds of all pages of the middle, from the smallest and largest number of each channel; the best pages
        attended: summaries of the pages that have left the window

    Summaries (2 of a page's 16 rows of keys, as float32) are in host memory.

    Source: Tang et al., Quest, ICML 2024, section 3; baseline of icecache.txt, sections 2.2 and 5.
    Differs from Quest: there, the first two layers have full attention; here, only with `full_layers`.
    """

    name = "quest"
    title = "Quest"
    whole_pages = True

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        knobs = ScorerSettings(combine=self.settings.combine, threads=self.store.config.threads)
        self._use(lambda first: QuestScorer(self.store.shape, first, knobs))
