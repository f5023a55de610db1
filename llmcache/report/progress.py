"""What begins, told on stderr to whoever looks."""

from __future__ import annotations

import sys


def tell(what: str) -> None:
    """Says on stderr what begins, if somebody looks."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr)
