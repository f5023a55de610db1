"""Prompts of llama-cpp-python on disk: `PrefixCache`, and its server with one.

Needs the [llama] extra; nothing else in this package does, and nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcache.errors import EnvironmentProblem

if TYPE_CHECKING:
    from llmcache.kv.llama.cache import PrefixCache

__all__ = ["PrefixCache"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, once llama-cpp-python is found to be there."""
    if name != "PrefixCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("llama_cpp")
    except ImportError as error:
        raise EnvironmentProblem(f"llmcache.kv.llama: {error}", "pip install 'llmcache-toolkit[llama]'") from error
    return importlib.import_module("llmcache.kv.llama.cache").PrefixCache
