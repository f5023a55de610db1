"""What tests of JSON documents share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def keys(document: Any) -> Iterator[str]:
    """Every key of a document, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from keys(value)
    elif isinstance(document, list):
        for entry in document:
            yield from keys(entry)
