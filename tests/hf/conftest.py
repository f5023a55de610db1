"""Where torch or transformers is missing, only test_supported.py is collected: it is skipped, or fails, with the reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

_PRESENT = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
_OTHERS = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_supported.py"]

collect_ignore = [] if _PRESENT else _OTHERS


def pytest_report_header() -> str:
    """Say which transformers it is: `test_oldest.py` looks for it."""
    return f"transformers {importlib.metadata.version('transformers')}" if _PRESENT else "transformers: missing"
