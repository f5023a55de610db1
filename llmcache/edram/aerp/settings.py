"""What AERP is told: the budget of a head and how it is spent, how tokens are scored, what may be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcache.edram.constants import AERP

RECOMPUTE = ("none", "prefill", "decode")


@dataclass(frozen=True)
class AerpSettings:
    """Settings of eviction and recomputation; the names of the paper in brackets.

    `budget` [N']: tokens that each key-value head keeps, of them the first `sinks` and the last `window` always.
    `score`: "softmax" sums attention weights over all queries (column sums); "logit" sums scaled products before the
    softmax (section 5.3). `score_bits`: 4 compares scores as 4-bit numbers, as section 5.1 stores them; 0: as they are.
    `per_query`: compares scores divided by the number of queries that could attend to a token, which takes from early tokens
    what they have gathered by their age alone; not in the paper.
    `recompute`: which tokens may be stored as x, the input of their projections: "none", those of the "prefill", or also
    those of "decode". `max_x`: at most so many are, as the array has time to recompute (None: no bound).

    Differs from the paper: equation 3 as printed sums a row of weights, which is 1 for every token; column sums are meant
    (section 4.1.1 has them for the prefill). A token within sinks or window is never stored as x, as all heads retain it
    there and every x would seem to pay; in "decode" its x lies beside its keys and values until it leaves the window, and
    those bytes are counted.
    """

    budget: int
    sinks: int = AERP.sinks
    window: int = 64
    score: Literal["softmax", "logit"] = "softmax"
    score_bits: int = 0
    per_query: bool = False
    recompute: Literal["none", "prefill", "decode"] = "none"
    max_x: int | None = None

    def __post_init__(self) -> None:
        for name in ("sinks", "window", "score_bits"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}, at least 0 is needed")
        if self.budget <= self.sinks:
            raise ValueError(f"budget: {self.budget} tokens leave none beside {self.sinks} sinks")
        if self.score not in ("softmax", "logit"):
            raise ValueError(f"score: '{self.score}', known are softmax, logit")
        if self.score_bits > 16:
            raise ValueError(f"score_bits: {self.score_bits}, 0 to 16 are possible")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute: '{self.recompute}', known are {', '.join(RECOMPUTE)}")
        if self.max_x is not None and self.max_x < 0:
            raise ValueError(f"max_x: {self.max_x}, at least 0 is needed")

    @property
    def recent(self) -> int:
        """The window, or what sinks leave of the budget; with all of it the policy is StreamingLLM."""
        return min(self.window, self.budget - self.sinks)


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: query heads [H], key-value heads, numbers of a head [d_h] and of the input x [C].

    `channels` 0: there is no x, nothing can be recomputed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    channels: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, at least 1 is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is no multiple of the {self.kv_heads} key-value heads")

    def x_pays(self, retaining: int) -> bool:
        """Whether x is smaller than keys and values of the `retaining` key-value heads: strictly, or nothing is saved.

        With MHA that is more than half of the heads; with GQA often never, as all keys and values of a token together
        are not larger than x. Source: kelle.txt, section 4.1.2 (there for MHA, and "at least 50%" beside "> 50%").
        """
        return 0 < self.channels < 2 * self.head_dim * retaining
