"""SpillSettings: what a user says of a cache, checked before the model runs for the first time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcache.errors import UsageError
from llmcache.kv.csd import PROFILES, CsdProfile
from llmcache.kv.pipeline import NO_TIMELINE, Timeline
from llmcache.kv.policies import policy_class
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.policies.settings import PolicySettings
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import StoreConfig

POOL_TOKENS = 4096
"""Tokens of each layer and sequence kept in memory where neither a pool nor a token budget is given, but a spill file."""


@dataclass(frozen=True)
class SpillSettings:
    """Settings of a cache, as `SpillCache` takes them; `chosen` are those of the policy. UsageError names what is wrong."""

    policy: type[KvPolicy]
    chosen: PolicySettings
    path: Path | None = None
    ssd: str = "file"
    sink_tokens: int = 16
    window_tokens: int = 32
    cpu_pages: int | None = None
    gpu_pages: int | None = None
    profile: CsdProfile = field(default_factory=lambda: PROFILES["none"])
    lookahead: bool = False
    exact: bool = True
    threads: int | None = None
    timeline: Timeline = NO_TIMELINE

    def __post_init__(self) -> None:
        if self.gpu_pages is not None and self.gpu_pages < 1:
            raise UsageError(f"gpu_pages: {self.gpu_pages}, at least 1 is needed", "leave it out for no gpu tier")
        if self.gpu_pages is not None and self.lookahead:
            raise UsageError("gpu_pages: looking ahead fetches to the host, not to the gpu", "give one of the two")
        # A shape of nothing: what does not fit whatever the model is must be said now, and not within its first step.
        self.chosen.check_store(self.store_config(KvShape("none", 1, 1, 1), 1, self.path))

    def store_config(self, shape: KvShape, batch: int, path: Path | None) -> StoreConfig:
        """Returns what the store of a model of `shape` is made from, with the spill file `path`."""
        if self.ssd not in ("file", "csd"):
            raise UsageError(f"ssd: there is no kind {self.ssd!r}", "one of: file, csd")
        pages = self._pool(shape) if path is not None else self.cpu_pages
        return StoreConfig(
            shape,
            batch,
            sink_tokens=self.sink_tokens,
            window_tokens=self.window_tokens,
            cpu_pages=pages,
            path=path,
            ssd=self.ssd,
            profile=self.profile,
            threads=self.threads,
        )

    def _pool(self, shape: KvShape) -> int:
        """Pages of the cpu pool beside a spill file: as given, else as many as the token budget has, else POOL_TOKENS."""
        pinned = shape.pages_of(self.sink_tokens) + shape.pages_of(self.window_tokens)
        if self.cpu_pages is not None:
            return self.cpu_pages
        return max(pinned, shape.pages_of(self.chosen.token_budget or POOL_TOKENS))


def policy_settings(name: str, options: dict[str, Any]) -> tuple[type[KvPolicy], PolicySettings]:
    """Returns the policy called `name` and its settings made of `options`; UsageError names an option that it has not."""
    policy = policy_class(name)
    known = {entry.name for entry in dataclasses.fields(policy.settings_class)}
    for option in options:
        if option not in known:
            hint = f"the policy {name!r} has: {', '.join(sorted(known))}"
            raise UsageError(f"{option}: neither a setting of the cache nor of its policy", hint)
    return policy, policy.settings_class(**options)
