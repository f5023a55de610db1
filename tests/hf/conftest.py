"""Without torch or transformers, only test_supported.py is collected, and is skipped or fails with the reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PRESENT = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
_OTHERS = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_supported.py"]

collect_ignore = [] if _PRESENT else _OTHERS


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, because spinning threads of torch disturb tests that run in parallel.

    Attend fully to no context, however short, unless a test enables that: otherwise the store would not be used.
    """
    if _PRESENT:
        import torch

        from llmcache.kv.transformers import conversation

        torch.set_num_threads(1)
        monkeypatch.setattr(conversation, "SHORT", 0)
        monkeypatch.setattr(conversation, "SPILLED", 0)
        monkeypatch.setattr(conversation, "break_even", lambda *arguments: 0)


@pytest.fixture
def enabled() -> Iterator[Callable[..., Any]]:
    """Return a function that enables a tiny model of a family and dtype; models are disabled after the test."""
    from llmcache.kv.transformers import disable, enable
    from tests.hf.tiny_models import tiny

    models: list[Any] = []

    def make(*kind: str) -> Any:
        models.append(enable(tiny(*kind)))
        return models[-1]

    yield make
    for model in models:
        disable(model)


@pytest.fixture
def llama(enabled: Callable[..., Any]) -> Any:
    return enabled("llama")


def pytest_report_header() -> str:
    """Report the version of transformers, which `test_oldest.py` checks."""
    return f"transformers {importlib.metadata.version('transformers')}" if _PRESENT else "transformers: missing"
