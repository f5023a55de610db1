"""All policies, one file per family; the command line, the simulator and the contract tests use the table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcache.cache.policies.base import Policy

# name: module:class, imported on first use (compiled loops take a while to load).
POLICIES: dict[str, str] = {
    "lru": "lru:LRU",
    "clock": "lru:Clock",
    "lfu": "lfu:LFU",
    "2q": "ghosts:TwoQ",
    "arc": "ghosts:ARC",
    "sieve": "lru:Sieve",
    "s3fifo": "ghosts:S3FIFO",
    "wtinylfu": "lfu:WTinyLFU",
    "lirs": "ghosts:LIRS",
    "lecar": "lfu:LeCaR",
    "belady": "belady:Belady",
    "algorithm1": "algorithm1:Algorithm1",
    "llmcache": "llmcache:LLMCache",
}


def policy_class(name: str) -> type[Policy]:
    """Return the class of the policy called `name` in `POLICIES`."""
    module, _, attribute = POLICIES[name].partition(":")
    found: type[Policy] = getattr(importlib.import_module(f"llmcache.cache.policies.{module}"), attribute)
    return found
