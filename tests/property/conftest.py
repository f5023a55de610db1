"""The fixture that runs the engine with the modeled kernel, in both modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.property.rig import Rig, running


@pytest.fixture(params=["steer", "arena"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with running(tmp_path, request.param, monkeypatch) as rig:
        yield rig
