"""What is asked of an accelerator: context, decoded tokens, batch, and how many tokens eviction keeps."""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.edram.constants import AERP


@dataclass(frozen=True)
class Workload:
    """`batch` sequences of `context` tokens that each decode `decode` more; `budget`: N' of the policies that evict.

    Tokens throughout. ValueError, naming the field, for what cannot be.
    """

    name: str
    context: int
    decode: int
    budget: int
    window: int = 0
    batch: int = AERP.batch
    sinks: int = AERP.sinks

    def __post_init__(self) -> None:
        for field, least in (("context", 1), ("decode", 1), ("batch", 1), ("window", 0), ("sinks", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}: {getattr(self, field)}, at least {least} is needed")
        if self.budget <= self.sinks:
            raise ValueError(f"budget: {self.budget}, more than the {self.sinks} sinks is needed")

    @property
    def eviction_bound(self) -> float:
        """How much less any cost that is linear in cached tokens can become by eviction: mean(n) / mean(min(n, N')).

        n: the cached tokens of each decode step, the new one included.
        """
        first, last = self.context + 1, self.context + self.decode
        whole = (first + last) * self.decode / 2
        growing = max(0, min(last, self.budget) - first + 1)  # steps before the budget is reached
        kept = growing * (first + first + growing - 1) / 2 + (self.decode - growing) * self.budget
        return whole / kept


# Contexts and decoded lengths: section 8. Budgets and windows: section 7.1. The paper calls Qasper QP and QA.
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("LA", 128, 512, 128, 64),
        Workload("TQ", 512, 2048, 1024, 512),
        Workload("QP", 1024, 5120, 1024, 512),
        Workload("PG19", 512, 8192, 2048, 1024),
    )
}
"""Lambada, TriviaQA, Qasper and PG19 as the paper runs them."""
