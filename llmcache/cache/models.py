"""What simulator, classifier and mounts need to know of model files; `llmcache.fs.layout` reads it from their headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile


class Named(Protocol):
    """A range of bytes of a file that has a name, a tensor, and the layer it is part of: its own name if it is in none."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class ModelRegion(Protocol):
    """A part of a model file, and how a decoder reads it: `role` is "loop", "hot" or "rows"; experts are `sparse`."""

    @property
    def first_byte(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def sparse(self) -> bool: ...


class ExpertSlices(Protocol):
    """The experts of a file, numbered layer by layer, and the slices that are theirs, numbered as they lie.

    `layers`: name, first expert, how many. Of each slice: its first byte, its bytes, and the expert that it is part of.
    """

    layers: list[tuple[str, int, int]]
    count: int

    @property
    def token_uses(self) -> int:
        """How many experts a token uses, of all layers; 0 where that is not known."""

    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def expert_of(self) -> Sequence[int]: ...

    def ranges(self, expert: int) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of the slices of an expert."""

    def bytes_of(self, expert: int) -> int:
        """Bytes of all slices of an expert."""


class ModelHeader(Protocol):
    """What the header of a model, `header_bytes` long, says of its parts."""

    @property
    def header_bytes(self) -> int: ...

    def regions(self) -> Sequence[ModelRegion]:
        """The parts in the order of computation."""


class Models(Protocol):
    """Looks at the model files of a trace. Nothing is known of a file that is no model, or not there as it was."""

    def __call__(self, file: TraceFile) -> Sequence[Named]:
        """The tensors of `file` in the order of their bytes."""

    def header(self, file: TraceFile) -> ModelHeader | None:
        """Its header."""

    def experts(self, file: TraceFile) -> tuple[str, ExpertSlices] | None:
        """The model that it is, or is a part of, and its experts; None if it has none."""


class _NoModels:
    def __call__(self, file: TraceFile) -> Sequence[Named]:
        return ()

    def header(self, file: TraceFile) -> None:
        return None

    def experts(self, file: TraceFile) -> None:
        return None


UNKNOWN: Models = _NoModels()  # knows nothing


class Guess(NamedTuple):
    """What a header says of a file's extents: those that are read page by page, the `hot` of these, and the order of all."""

    single: list[int]
    hot: list[int]
    order: list[int]


def first_guess(regions: Iterable[ModelRegion], header_bytes: int, extent_bytes: int, count: int, mixture: bool) -> Guess:
    """The guess for a model file of `count` extents with these `regions`, in the order of computation.

    What lies in extents that are wholly hot, rows or (of a mixture, whose experts come in by themselves) sparse is single.
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
