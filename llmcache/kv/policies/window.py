"""Window: sink and recent tokens, nothing between them."""

from __future__ import annotations

from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.tiers import Selection


class Window(KvPolicy):
    """StreamingLLM-like: the first tokens and the last, however many the budget has room for; nothing is evaluated.

    Source: Xiao et al., Efficient streaming language models with attention sinks, ICLR 2024, section 3.2. Differs from
    it: positions are the tokens' own, not those in the cache; and what is not attended to is kept, so a page that leaves
    the window is not lost (it is just never looked at again).
    """

    name = "window"
    title = "Window"

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the last tokens of the middle: with the store's own window they make one window of the budget."""
        stop = self.store.middle.stop * self.page_tokens
        pages = range(stop - tokens, stop)
        return Selection.of_all(pages, len(queries), self.kv_heads, 1)
