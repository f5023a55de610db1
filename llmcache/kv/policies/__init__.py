"""Policies of KV eviction, one file each; the table below is what the command line, the engine and the tests use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmcache.errors import UsageError

if TYPE_CHECKING:
    from llmcache.kv.policies.base import KvPolicy
    from llmcache.kv.policies.settings import PolicySettings

__all__ = ["POLICIES", "KvPolicy", "PolicySettings", "policy_class"]

# name: module:class, imported when it is asked for (compiled loops take a while to load).
POLICIES: dict[str, str] = {
    "full": "full:Full",
    "window": "window:Window",
    "h2o": "h2o:H2O",
    "prefetch": "prefetch:Prefetch",
    "leoam": "leoam:LeoAM",
    "hillinfer": "hillinfer:HillInfer",
    "quest": "quest:Quest",
    "icecache": "icecache:IceCache",
    "mass": "mass:Mass",
    "oracle": "oracle:Oracle",
    "kelle": "kelle:Kelle",
}
_LAZY = {"KvPolicy": "base", "PolicySettings": "settings"}


def policy_class(name: str) -> type[KvPolicy]:
    """Returns the class of the policy called `name`; UsageError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise UsageError(f"policy: there is no policy {name!r}", f"one of: {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    found: type[KvPolicy] = getattr(importlib.import_module(f"llmcache.kv.policies.{module}"), attribute)
    return found


def __getattr__(name: str) -> type:
    """Imports the base of all policies, or their settings, when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = getattr(importlib.import_module(f"llmcache.kv.policies.{_LAZY[name]}"), name)
    return found
