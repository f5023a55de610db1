"""All policies, one file each; the table below is what the command line, the simulator and the contract tests use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmcache.errors import UsageError

if TYPE_CHECKING:
    from llmcache.cache.policies.base import Policy

# name: module:class, imported when it is asked for (compiled loops take a while to load).
POLICIES: dict[str, str] = {
    "lru": "lru:LRU",
    "clock": "clock:Clock",
    "lfu": "lfu:LFU",
    "2q": "twoq:TwoQ",
    "arc": "arc:ARC",
    "sieve": "sieve:Sieve",
    "s3fifo": "s3fifo:S3FIFO",
    "wtinylfu": "wtinylfu:WTinyLFU",
    "lirs": "lirs:LIRS",
    "lecar": "lecar:LeCaR",
    "belady": "belady:Belady",
    "algorithm1": "algorithm1:Algorithm1",
    "llmcache": "llmcache:LLMCache",
}


def policy_class(name: str) -> type[Policy]:
    """Returns the class of the policy called `name`; UsageError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise UsageError(f"policy: there is no policy {name!r}", f"one of: {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    found: type[Policy] = getattr(importlib.import_module(f"llmcache.cache.policies.{module}"), attribute)
    return found
