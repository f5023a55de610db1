"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK, LIMITED, FAILED, SKIPPED = "ok", "limited", "failed", "skipped"
"""Statuses: no limits; works with limits; a mount is impossible; not examined."""


@dataclass(frozen=True)
class Check:
    """`found` is text; `facts` has the same data in base units. ValueError for a check that is not OK without `remedy`."""

    name: str
    status: str
    found: str
    remedy: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status != OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.status} and has no remedy")
