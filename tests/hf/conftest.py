"""Where torch or transformers is missing, only test_supported.py is collected: it is skipped, or fails, with the reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

_PRESENT = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
_OTHERS = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_supported.py"]

collect_ignore = [] if _PRESENT else _OTHERS


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever a test before has set: threads of torch wait for each other by spinning, and tests run side by side."""
    import torch

    torch.set_num_threads(1)


def pytest_report_header() -> str:
    """Say which transformers it is: `test_oldest.py` looks for it."""
    return f"transformers {importlib.metadata.version('transformers')}" if _PRESENT else "transformers: missing"
