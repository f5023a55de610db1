"""All policies by name, one file per family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcache.cache.policies.base import Policy

# name: module:class, imported on first use (compiled loops take a while to load).
POLICIES: dict[str, str] = {
    "lru": "llmcache.cache.policies.lru:LRU",
    "clock": "llmcache.cache.policies.lru:Clock",
    "lfu": "llmcache.cache.policies.lfu:LFU",
    "2q": "llmcache.cache.policies.ghosts:TwoQ",
    "arc": "llmcache.cache.policies.ghosts:ARC",
    "sieve": "llmcache.cache.policies.lru:Sieve",
    "s3fifo": "llmcache.cache.policies.ghosts:S3FIFO",
    "wtinylfu": "llmcache.cache.policies.lfu:WTinyLFU",
    "lirs": "llmcache.cache.policies.ghosts:LIRS",
    "lecar": "llmcache.cache.policies.lfu:LeCaR",
    "belady": "llmcache.cache.policies.belady:Belady",
    "algorithm1": "llmcache.papers.algorithm1:Algorithm1",
    "llmcache": "llmcache.cache.policies.llmcache:LLMCache",
}


def policy_class(name: str) -> type[Policy]:
    """Return a class of `POLICIES`."""
    module, _, attribute = POLICIES[name].partition(":")
    found: type[Policy] = getattr(importlib.import_module(module), attribute)
    return found
