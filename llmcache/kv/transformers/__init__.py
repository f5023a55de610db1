"""The cache of transformers' models, spilled: `enable(model)`, then a `SpillCache` as `past_key_values`.

Needs the [transformers] extra; nothing else in this package does, and nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcache.kv.transformers.cache import SpillCache
    from llmcache.kv.transformers.enabling import disable, enable

_WHERE = {"SpillCache": "cache", "disable": "enabling", "enable": "enabling"}

__all__ = ["SpillCache", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, once torch and transformers are found to be there and of a supported version."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    supported = importlib.import_module("llmcache.kv.transformers.supported")
    supported.check_versions()
    return getattr(importlib.import_module(f"llmcache.kv.transformers.{_WHERE[name]}"), name)
