"""The cache of transformers' models, spilled: `enable(model)`, then a `SpillCache` as its cache.

Needs the [transformers] extra, of a supported version; nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from llmcache.errors import EnvironmentProblem

if TYPE_CHECKING:
    from llmcache.kv.transformers.attention import disable, enable
    from llmcache.kv.transformers.cache import SpillCache

__all__ = ["SpillCache", "disable", "enable"]

OLDEST = (4, 56)
"""The first transformers whose caches are made of layers that are initialised late; 4.55 passes them other arguments."""
FIRST_UNKNOWN = (6, 0)
"""Nobody can have tried it: a new major version removes what an old one only deprecates."""

CACHE_ARGUMENT_SINCE = (5, 24)
"""The first transformers whose models take a cache as `cache`, and where `past_key_values` is deprecated."""

_WHERE = {"SpillCache": "cache", "disable": "attention", "enable": "attention"}
_HINT = "pip install 'llmcache-toolkit[transformers]' (torch for CPUs only: from download.pytorch.org/whl/cpu)"


def version_of(text: str) -> tuple[int, int]:
    """Returns the first two numbers of a version: "5.24.0.dev0" gives (5, 24)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise EnvironmentProblem(f"transformers: unknown version '{text}'", _HINT)
    return int(found[1]), int(found[2])


def check_versions() -> None:
    """EnvironmentProblem if torch or transformers cannot be imported, or if transformers is outside the supported range."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(f"llmcache.kv.transformers: {error}", _HINT) from error
    check_transformers(transformers.__version__)


def check_transformers(version: str) -> None:
    """EnvironmentProblem if transformers of `version` is outside the supported range."""
    if not OLDEST <= version_of(version) < FIRST_UNKNOWN:
        needed = f"must be {OLDEST[0]}.{OLDEST[1]} or later, and before {FIRST_UNKNOWN[0]}"
        raise EnvironmentProblem(f"transformers: version {needed}, not {version}", _HINT)


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the keyword argument by which models of the installed transformers take `cache`, None included."""
    import transformers

    name = "cache" if version_of(transformers.__version__) >= CACHE_ARGUMENT_SINCE else "past_key_values"
    return {name: cache}


def __getattr__(name: str) -> Any:
    """Import what is asked for, once torch and transformers are found to be there and of a supported version."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_versions()
    return getattr(importlib.import_module(f"llmcache.kv.transformers.{_WHERE[name]}"), name)
