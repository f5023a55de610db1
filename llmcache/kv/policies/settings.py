"""PolicySettings: how many tokens a step attends to, and how they are scored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmcache.errors import UsageError
from llmcache.kv.csd.wire import MOST_TOKENS
from llmcache.kv.kernels.scores import COMBINE
from llmcache.kv.tiers import StoreConfig

PAPER_ALPHA = 0.2
"""hillinfer.txt, section 4.2: "we set the importance rate alpha as 0.2"."""


@dataclass(frozen=True)
class PolicySettings:
    """What all policies have in common.

    `alpha` (0, 1]: the share of the context that a step attends to; or `token_budget`: how many tokens. Both include sink,
    window and tail, which are always attended. Neither: alpha 0.2. `score_block_tokens` (n): tokens of a score block.
    `combine`: "max" or "sum" over the query heads of a key head. `scale` of the softmax: None for 1/sqrt(head_dim); only
    policies that add up attention need it. `seed` of what is drawn by chance. UsageError names the field that is wrong.
    """

    alpha: float | None = None
    token_budget: int | None = None
    score_block_tokens: int = 256
    combine: str = "max"
    scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.alpha is not None and self.token_budget is not None:
            raise UsageError("token_budget: given together with alpha", "give one of the two")
        if self.alpha is not None:
            check(0 < self.alpha <= 1, "alpha", self.alpha, "it is a share of the context: above 0, at most 1")
        if self.token_budget is not None:
            check(self.token_budget >= 1, "token_budget", self.token_budget, "at least 1 token is needed")
        hint = f"1 .. {MOST_TOKENS} tokens fit a score block"
        check(1 <= self.score_block_tokens <= MOST_TOKENS, "score_block_tokens", self.score_block_tokens, hint)
        check(self.combine in COMBINE, "combine", self.combine, f"one of: {', '.join(COMBINE)}")
        if self.scale is not None:
            check(0 < self.scale < math.inf, "scale", self.scale, "it is above 0")
        check(self.seed >= 0, "seed", self.seed, "it is 0 or above")

    def check_store(self, config: StoreConfig) -> None:
        """Raises UsageError if the budget does not even hold the sink and the window of a store."""
        pinned = (config.sink_pages + config.window_pages) * config.shape.page_tokens
        if self.token_budget is not None and self.token_budget < pinned:
            hint = "give a larger budget, or make sink and window smaller"
            raise UsageError(f"token_budget: {self.token_budget}, sink and window alone take {pinned} tokens", hint)

    def attended(self, length: int) -> int:
        """Returns how many tokens of a context of `length` are attended to: the budget, or alpha of it rounded up."""
        if self.token_budget is not None:
            return min(length, self.token_budget)
        share = PAPER_ALPHA if self.alpha is None else self.alpha
        return min(length, math.ceil(share * length - 1e-9))  # 0.1 * 30 is 3.0000000000000004

    def middle_tokens(self, length: int, pinned: int) -> int:
        """Returns how many tokens of the middle may be chosen, when `pinned` of `length` are attended in any case.

        0 where these are more than the budget: a tail of less than a page may be, and alpha of a short context is.
        """
        return max(0, self.attended(length) - pinned)


def check(holds: bool, field: str, value: Any, hint: str) -> None:
    """Raises UsageError naming `field` unless `holds`."""
    if not holds:
        raise UsageError(f"{field}: {value!r} is out of range", hint)
