"""The one error that benchmark code raises for the world: a message and what to do about it."""

from __future__ import annotations


class BenchError(Exception):
    """Something outside the program is missing or refuses; `hint` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"
