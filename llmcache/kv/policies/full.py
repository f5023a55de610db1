"""Full: everything is attended to."""

from __future__ import annotations

from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.tiers import Selection


class Full(KvPolicy):
    """The full cache: every token is fetched and attended to, in every step, whatever the budget says.

    Source: hillinfer.txt, section 4.2, baseline (1): "retains the entire KV cache without performing any token importance
    evaluation". What its results are is what those of all others are compared with.
    """

    name = "full"
    title = "Full cache"

    @property
    def tokens(self) -> int:
        """All tokens of the middle."""
        return len(self.store.middle) * self.page_tokens

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """See `KvPolicy.choose`; not called, as there is no choice."""
        return self.store.everything
