"""What simulator and classifier need to know of the model files of a trace; `llmcache.fs.layout` reads it from headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmcache.cache.extents import Region
    from llmcache.trace.record import TraceFile


class Named(Protocol):
    """A range of bytes of a file that has a name: a tensor."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def layer(self) -> str:
        """The layer that it is part of; its own name if it is in none."""

    @property
    def offset(self) -> int:
        """Its first byte in the file."""

    @property
    def size_bytes(self) -> int:
        """Its length."""


class Experts(Protocol):
    """The experts of a file, numbered layer by layer, and the slices that are theirs, numbered as they lie."""

    layers: list[tuple[str, int, int]]
    """Name, first expert, how many."""
    count: int

    @property
    def starts(self) -> Sequence[int]:
        """First byte of each slice."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each slice."""

    @property
    def expert_of(self) -> Sequence[int]:
        """The expert of each slice."""

    def ranges(self, expert: int) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of the slices of an expert."""

    def bytes_of(self, expert: int) -> int:
        """Bytes of all slices of an expert."""


class Header(Protocol):
    """What the header of a model says of its parts."""

    @property
    def header_bytes(self) -> int:
        """Its own length."""

    def regions(self) -> Sequence[Region]:
        """The parts in the order of computation."""


class Models(Protocol):
    """Looks at the model files of a trace. Nothing is known of a file that is no model, or not there as it was."""

    def __call__(self, file: TraceFile) -> Sequence[Named]:
        """The tensors of `file` in the order of their bytes."""

    def header(self, file: TraceFile) -> Header | None:
        """Its header."""

    def experts(self, file: TraceFile) -> tuple[str, Experts] | None:
        """The model that it is, or is a part of, and its experts; None if it has none."""


class _NoModels:
    """Knows nothing."""

    def __call__(self, file: TraceFile) -> Sequence[Named]:
        """None."""
        return ()

    def header(self, file: TraceFile) -> None:
        """None."""

    def experts(self, file: TraceFile) -> None:
        """None."""


UNKNOWN: Models = _NoModels()
