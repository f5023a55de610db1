"""Supported versions of torch and transformers."""

from __future__ import annotations

import re
from typing import Any

from llmcache.errors import MissingRequirement

OLDEST = (4, 56)  # the first supported version: from 4.56 on, caches consist of layers that are initialized late
FIRST_UNKNOWN = (6, 0)  # the first untested version: a new major version removes deprecated interfaces

CACHE_ARGUMENT_SINCE = (5, 24)  # the first version whose models take the cache as `cache` and deprecate `past_key_values`

_HINT = "pip install 'llmcache-toolkit[transformers]' (torch for CPUs only: from download.pytorch.org/whl/cpu)"


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version: "5.24.0.dev0" gives (5, 24)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise MissingRequirement(f"transformers: unknown version '{text}'", _HINT)
    return int(found[1]), int(found[2])


def check_versions() -> None:
    """Raise MissingRequirement if torch or transformers is missing or has an unsupported version."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingRequirement(f"llmcache.kv.transformers: {error}", _HINT) from error
    check_transformers(transformers.__version__)


def check_transformers(version: str) -> None:
    """Raise MissingRequirement if `version` of transformers is not supported."""
    if not OLDEST <= version_of(version) < FIRST_UNKNOWN:
        needed = f"must be {OLDEST[0]}.{OLDEST[1]} or later, and before {FIRST_UNKNOWN[0]}"
        raise MissingRequirement(f"transformers: version {needed}, not {version}", _HINT)


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return `cache` as the keyword argument that the installed transformers expects."""
    import transformers

    name = "cache" if version_of(transformers.__version__) >= CACHE_ARGUMENT_SINCE else "past_key_values"
    return {name: cache}
