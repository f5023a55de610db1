"""Settings of a SpillCache, and the division of its memory."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.errors import UsageError
from llmcache.kv.pipeline import NO_TIMELINE, Timeline
from llmcache.kv.policies import policy_class
from llmcache.kv.policies.base import KvPolicy, PolicySettings
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.layout import Layout
from llmcache.kv.tiers import StoreConfig
from llmcache.kv.transformers.dense import DenseLayers
from llmcache.memory import tightest
from llmcache.papers.csd import PROFILES, CsdProfile
from llmcache.units import format_size, parse_size

MEMORY_SHARE = 0.25
"""Share of the available memory for a cache with a spill file, if neither `memory` nor `cpu_pages` is set."""
RECENT_BUDGETS = 2
"""Number of token budgets of read rows that stay in memory, because consecutive tokens attend to similar rows."""
ROWS_SHARE = 0.25  # share of `memory` that these rows may use
AHEAD = 8  # the division of the memory is valid until the context has grown by one in this many tokens
AHEAD_TOKENS = 256  # minimum number of tokens for which it is valid


@dataclass(frozen=True)
class SpillSettings:
    """Settings of a `SpillCache`; `chosen` are those of the policy. UsageError names an invalid setting."""

    policy: type[KvPolicy]
    chosen: PolicySettings
    path: Path | None = None
    ssd: str = "file"
    sink_tokens: int | None = None
    window_tokens: int | None = None
    memory_bytes: int | None = None
    cpu_pages: int | None = None
    gpu_pages: int | None = None
    profile: CsdProfile = field(default_factory=lambda: PROFILES["none"])
    lookahead: bool = False
    exact: bool = True
    threads: int | None = None
    timeline: Timeline = NO_TIMELINE
    full_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "window_tokens", "cpu_pages", "gpu_pages", "threads", "full_tokens"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, np.integer)):
                raise UsageError(f"{name}: {value!r} is not a whole number", f"for example {name}=1024")
        if self.memory_bytes is not None and self.path is None:
            raise UsageError("memory: a limit needs a spill file for the rest of the context", "set path, or omit memory")
        if self.memory_bytes is not None and self.cpu_pages is not None:
            raise UsageError("memory: cannot be combined with cpu_pages", "give only one of them")
        if self.gpu_pages is not None and self.gpu_pages < 1:
            raise UsageError(f"gpu_pages: must be at least 1, not {self.gpu_pages}", "omit it to use no gpu tier")
        if self.gpu_pages is not None and self.lookahead:
            raise UsageError(
                "gpu_pages: cannot be combined with lookahead, which fetches to the host", "give only one of them"
            )
        if self.full_tokens is not None and self.full_tokens < 0:
            raise UsageError(
                f"full_tokens: must be at least 0, not {self.full_tokens}", "use 0 to choose from the first token on"
            )
        if self.full_tokens and self.policy.needs_weights:
            hint = "omit full_tokens: this policy counts the attention of every step"
            raise UsageError(f"full_tokens: the policy {self.policy.name!r} must choose from the first token on", hint)
        # Check against an empty shape now, so that settings that fit no model fail before the first step.
        self.chosen.check_store(self.store_config(KvShape("none", 1, 1, 1), 1, self.path))

    def store_config(self, shape: KvShape, batch: int, path: Path | None) -> StoreConfig:
        """Return the configuration of the store for a model of `shape`, with the spill file `path`.

        With a spill file and without `cpu_pages`, the pools are the smallest possible until a `MemoryBudget` sets them.
        """
        if self.ssd not in ("file", "csd"):
            raise UsageError(f"ssd: must be 'file' or 'csd', not {self.ssd!r}", "one of: file, csd")
        sink = self.policy.sink_tokens if self.sink_tokens is None else self.sink_tokens
        window = self.policy.window_tokens if self.window_tokens is None else self.window_tokens
        pages, rows = self.cpu_pages, RECENT_BUDGETS * (self.chosen.token_budget or 0)
        if path is not None and pages is None:
            pages = shape.pages_of(sink) + shape.pages_of(window)
        config = StoreConfig(
            shape, batch, sink, window, pages, path, self.ssd, self.profile, threads=self.threads, cpu_rows=rows,
            interleaved=self.policy.interleaved,
        )  # fmt: skip
        if self.memory_bytes is None or not rows:
            return config
        row_bytes = batch * config.rows_bytes / rows
        return dataclasses.replace(config, cpu_rows=min(rows, int(ROWS_SHARE * self.memory_bytes / row_bytes)))

    def memory_budget(self, policy: KvPolicy) -> MemoryBudget | None:
        if policy.store.config.path is None or self.cpu_pages is not None:
            return None
        if self.memory_bytes is not None:
            return MemoryBudget(self.memory_bytes, policy)
        return MemoryBudget(int(MEMORY_SHARE * tightest().available_bytes), policy, flexible=True)


def memory_size(memory: int | str | None) -> int | None:
    """Return the argument `memory`, for instance "2G", in bytes; UsageError if it is no size above 0."""
    if isinstance(memory, str):
        try:
            memory = parse_size(memory)
        except UsageError as error:
            raise UsageError(f"memory: {error.message}", error.hint) from None
    if memory is not None and (not isinstance(memory, (int, np.integer)) or memory < 1):
        raise UsageError(f"memory: {memory!r} is not a size above 0", 'for example memory="2G"')
    return memory


def policy_settings(name: str, options: dict[str, Any]) -> tuple[type[KvPolicy], PolicySettings]:
    """Return the policy called `name` and its settings from `options`; UsageError names an unknown option."""
    policy = policy_class(name)
    known = {entry.name for entry in dataclasses.fields(policy.settings_class)}
    for option in options:
        if option not in known:
            hint = f"settings of the policy {name!r}: {', '.join(sorted(known))}"
            raise UsageError(f"{option}: unknown setting of the cache and of its policy", hint)
    return policy, policy.settings_class(**options)


class MemoryBudget:
    """The host memory of a cache: how much a context needs between steps, and how many pages fit.

    `flexible`: the pools always have room for the token budget, even if that exceeds `memory_bytes`.
    """

    def __init__(self, memory_bytes: int, policy: KvPolicy, flexible: bool = False) -> None:
        self.memory_bytes, self._policy, self.flexible = memory_bytes, policy, flexible
        store = policy.store
        self._least = store.config.sink_pages + store.config.window_pages
        self._checksums = sum(Layout(store.shape, 1).of_layer.parts) + 1

    def buffer_bytes(self, tokens: int) -> int:
        store = self._policy.store
        rows = self._policy.settings.attended(tokens) + 2 * store.shape.page_tokens
        return store.batch * rows * store.shape.token_bytes * 5 // 4

    def dense_bytes(self, tokens: int) -> int:
        store = self._policy.store
        rows = store.shape.layers * (tokens + DenseLayers.ROOM) * store.shape.token_bytes
        return store.batch * (rows + 16 * tokens)

    def least_bytes(self, tokens: int) -> int:
        """Return the bytes that a context of `tokens` tokens needs with the smallest pools."""
        policy, store = self._policy, self._policy.store
        pages, shape = store.shape.pages_of(tokens) + 64, store.shape
        choices = 8 * shape.kv_heads * policy.settings.attended(tokens)  # the chosen positions of a layer
        tables = pages * (48 + 5 * self._checksums)  # slots in the pool, and checksums
        of_layer = policy.index_bytes_at(tokens) + choices + tables
        of_sequence = shape.layers * of_layer + 32 * tokens + 64 * pages
        pools = self._pool_bytes(self._least)
        of_sequence += store.config.rows_bytes
        return store.batch * of_sequence + 2 * self.buffer_bytes(tokens) + pools

    def _pool_bytes(self, pages: int) -> int:
        store = self._policy.store  # two more pages: see `Sequences.bound_pools`
        return store.batch * store.shape.layers * (pages + 2) * store.shape.page_tokens * store.shape.token_bytes

    def pages(self, tokens: int, other_bytes: int = 0) -> int:
        page_bytes = self._pool_bytes(-1)
        fitting = self._least + (self.memory_bytes - self.least_bytes(tokens) - other_bytes) // page_bytes
        budget = self._policy.settings.token_budget or 0
        return max(self._least, fitting, self._policy.store.shape.pages_of(budget) if self.flexible else 0)

    def restrict(self, tokens: int, dense_bytes: int | None = None) -> None:
        """Set the limits of the store for a context of `tokens` tokens in addition to a short one of `dense_bytes`.

        None: the short one may use all of the memory, so the pools have the smallest size.
        """
        pages = self._least if dense_bytes is None else self.pages(tokens, dense_bytes)
        self._policy.store.limit(pages, self.buffer_bytes(tokens))

    def check(self, tokens: int) -> None:
        if self.flexible or self.least_bytes(tokens) <= self.memory_bytes:
            return
        # With more memory, more rows are cached: up to `ROWS_SHARE` of it, or the token budgets.
        batch, config = self._policy.store.batch, self._policy.store.config
        all_rows = dataclasses.replace(config, cpu_rows=RECENT_BUDGETS * (self._policy.settings.token_budget or 0))
        others = self.least_bytes(tokens) - batch * config.rows_bytes
        needed = min(others + batch * all_rows.rows_bytes, int(others / (1 - ROWS_SHARE)) + 1)
        message = f"memory: {format_size(self.memory_bytes)} is too small for {tokens} tokens with this model"
        hint = f"give at least {-(-needed // 10**4) / 100:.2f}M, or use a policy with a smaller index, such as quest"
        raise UsageError(message, hint)

    @property
    def full_tokens(self) -> int:
        return self._longest(lambda tokens: self.dense_bytes(tokens) + self.least_bytes(tokens))

    @property
    def longest(self) -> int:
        return self._longest(self.least_bytes)

    def horizon(self, tokens: int) -> int:
        """Return the length of the context up to which a division of the memory for `tokens` tokens should be valid."""
        return max(tokens, min(tokens + max(AHEAD_TOKENS, tokens // AHEAD), self.longest))

    def _longest(self, needed_bytes: Callable[[int], int]) -> int:
        return bisect_right(range(1 << 40), self.memory_bytes, key=needed_bytes) - 1
