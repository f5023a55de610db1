"""Interfaces to model files for simulator, classifier and mounts; `llmcache.fs.layout` implements them from file headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile


class Named(Protocol):
    """A named byte range of a file (a tensor), and its layer; a tensor outside of the layers has its own name as layer."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class ModelRegion(Protocol):
    """A region of a model file, and how a decoder reads it: `role` is "loop", "hot" or "rows"; experts are `sparse`."""

    @property
    def first_byte(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def sparse(self) -> bool: ...


class ExpertSlices(Protocol):
    """The experts of a file, numbered layer by layer, and their slices, numbered in file order.

    `layers`: name, first expert, number of experts. For each slice: its first byte, its bytes, and its expert.
    """

    layers: list[tuple[str, int, int]]
    count: int

    @property
    def token_uses(self) -> int:
        """Number of experts that a token uses, of all layers; 0 if unknown."""

    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def expert_of(self) -> Sequence[int]: ...

    def ranges(self, expert: int) -> Sequence[tuple[int, int]]:
        """Return (offset, bytes) of the slices of an expert."""

    def bytes_of(self, expert: int) -> int:
        """Return the bytes of all slices of an expert."""


class ModelHeader(Protocol):
    """The regions of a model, from its header of `header_bytes`."""

    @property
    def header_bytes(self) -> int: ...

    def regions(self) -> Sequence[ModelRegion]:
        """Return the regions in the order of computation."""


class Models(Protocol):
    """Looks up the model files of a trace. A file that is no model, or no longer exists unchanged, yields nothing."""

    def __call__(self, file: TraceFile) -> Sequence[Named]:
        """Return the tensors of `file` in file order."""

    def header(self, file: TraceFile) -> ModelHeader | None:
        """Return the header of `file`."""

    def experts(self, file: TraceFile) -> tuple[str, ExpertSlices] | None:
        """Return the model that the file is, or is a shard of, and the file's experts; None without experts."""


class _NoModels:
    def __call__(self, file: TraceFile) -> Sequence[Named]:
        return ()

    def header(self, file: TraceFile) -> None:
        return None

    def experts(self, file: TraceFile) -> None:
        return None


UNKNOWN: Models = _NoModels()  # finds no models


class Guess(NamedTuple):
    """Guess from a header: extents read page by page, the `hot` ones among them, and the order of all."""

    single: list[int]
    hot: list[int]
    order: list[int]


def first_guess(regions: Iterable[ModelRegion], header_bytes: int, extent_bytes: int, count: int, mixture: bool) -> Guess:
    """Return the guess for a model file of `count` extents with these `regions`, in the order of computation.

    An extent is single if it is entirely hot, rows or, in an MoE model (whose experts are loaded separately), sparse.
    """
    single = bytearray(count)
    order: dict[int, None] = {}
    for region in regions:
        order.update(dict.fromkeys(range(region.first_byte // extent_bytes, -(-region.end // extent_bytes))))
        if region.role != "loop" or (region.sparse and mixture):
            for extent in range(-(-region.first_byte // extent_bytes), region.end // extent_bytes):
                single[extent] = 1
    singles = [extent for extent in range(count) if single[extent]]
    return Guess(singles, [extent for extent in singles if extent < -(-header_bytes // extent_bytes)], list(order))
