"""PrefixCache: prompts of llama-cpp-python on disk; and the server of llama-cpp-python with a PrefixCache.

Only this package needs the [llama] extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcache.errors import MissingRequirement

if TYPE_CHECKING:
    from llmcache.kv.llama.cache import PrefixCache

__all__ = ["PrefixCache"]


def __getattr__(name: str) -> Any:
    if name != "PrefixCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("llama_cpp")
    except ImportError as error:
        raise MissingRequirement(f"llmcache.kv.llama: {error}", "pip install 'llmcache-toolkit[llama]'") from error
    return importlib.import_module("llmcache.kv.llama.cache").PrefixCache
