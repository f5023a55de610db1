"""Policies of KV eviction, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmcache.errors import UsageError

if TYPE_CHECKING:
    from llmcache.kv.policies.base import KvPolicy

# name: module:class, imported on first use, because compiled loops take a while to load.
POLICIES: dict[str, str] = {
    "full": "baselines:Full",
    "window": "baselines:Window",
    "h2o": "h2o:H2O",
    "prefetch": "baselines:Prefetch",
    "leoam": "baselines:LeoAM",
    "hillinfer": "hillinfer:HillInfer",
    "quest": "indexed:Quest",
    "icecache": "indexed:IceCache",
    "mass": "indexed:Mass",
    "oracle": "baselines:Oracle",
    "kelle": "h2o:Kelle",
}


def policy_class(name: str) -> type[KvPolicy]:
    """Return the class of the policy called `name`; UsageError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise UsageError(f"policy: there is no policy {name!r}", f"one of: {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    found: type[KvPolicy] = getattr(importlib.import_module(f"llmcache.kv.policies.{module}"), attribute)
    return found
