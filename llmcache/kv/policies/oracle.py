"""Oracle: the tokens that draw the most attention, found by a look at all keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.kv.kernels import top
from llmcache.kv.pipeline.attention import widened
from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.policies.settings import PolicySettings, check
from llmcache.kv.tiers import Selection

RULES = ("mass", "product")


@dataclass(frozen=True)
class OracleSettings(PolicySettings):
    """`by`: "mass", the weights of softmax added up over the query heads of a key head; "product", the largest product."""

    by: str = "mass"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.by in RULES, "by", self.by, f"one of: {', '.join(RULES)}")


class Oracle(KvPolicy):
    """What others are compared with: reads every key at every step, so nothing is saved but in attention itself.

        select: products of queries and all keys, exactly; their softmax over all tokens, added up by key head
                the middle tokens with the largest sums, or by the largest product of the group

    Source: icecache.txt, section 5, and hillinfer.txt, Algorithm 1, choose by the largest product; Yuan et al., Native
    Sparse Attention, 2025, section 3.3.2, equation 10, by the sum of weights.
    """

    name = "oracle"
    title = "Oracle"
    settings_class = OracleSettings

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the best of the middle; see `OracleSettings`."""
        assert isinstance(self.settings, OracleSettings)
        everything = self.store.gather(layer, self.store.everything)
        keys = widened(everything.keys)
        grouped = queries.reshape(len(keys), self.kv_heads, -1, keys.shape[3]) * np.float32(self.scale)
        logits: Floats = np.matmul(grouped, keys.swapaxes(2, 3))
        everything.release()
        np.copyto(logits, -np.inf, where=np.arange(logits.shape[3]) < self.first[:, None, None, None])
        if self.settings.by == "mass":
            weights = np.exp(logits - logits.max(axis=3, keepdims=True))
            scores: Floats = (weights / weights.sum(axis=3, keepdims=True)).sum(axis=2)
        else:
            scores = logits.max(axis=2)
        start, stop = (self.page_tokens * page for page in (self.store.middle.start, self.store.middle.stop))
        return Selection(top(np.ascontiguousarray(scores[..., start:stop]), tokens) + start)
