"""A KV cache for transformers' models that spills to SSD: call `enable(model)`, then pass the model a `SpillCache`.

Needs the [transformers] extra. torch and transformers are imported on the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcache.kv.transformers.versions import cache_argument, check_transformers, check_versions

if TYPE_CHECKING:
    from llmcache.kv.transformers.attention import disable, enable
    from llmcache.kv.transformers.cache import SpillCache

__all__ = ["SpillCache", "cache_argument", "check_transformers", "check_versions", "disable", "enable"]

_WHERE = {"SpillCache": "cache", "disable": "attention", "enable": "attention"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_versions()
    return getattr(importlib.import_module(f"llmcache.kv.transformers.{_WHERE[name]}"), name)
