"""What a model file holds: tensors, and the regions a decoder reads in order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from llmcache.errors import DataError
from llmcache.fs.layout.order import OrderKey, compute_key, is_embedding, is_expert, is_output, layer_name

Role = Literal["hot", "loop", "rows"]
LONGEST_NAME = 1024  # bytes of a tensor's name or a key: ggml allows 64, and modules of Python are not nested so deep
MOST_TENSORS = 2**16  # of one file: a mixture of experts in four bits, unsharded, has 55 000
_NAMES_BYTES = 8 * 2**20  # of all names as Python keeps them
_LONGEST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: `size_bytes` bytes at `offset` (from the start of the file)."""

    name: str
    offset: int
    size_bytes: int
    dtype: str

    @property
    def end(self) -> int:
        """The first byte behind the tensor."""
        return self.offset + self.size_bytes

    @property
    def layer(self) -> str:
        """The layer that it is part of; its own name if it is in none."""
        return layer_name(self.name)


@dataclass(frozen=True, slots=True)
class Region:
    """A range of a file and how a decoder reads it.

    hot: often and early (the header) · loop: once per token, in this order · rows: a few rows per token (embedding).
    `sparse` marks tensors of which a token needs only a part (experts of a mixture).
    """

    first_byte: int
    size_bytes: int
    role: Role
    name: str
    sparse: bool = False

    @property
    def end(self) -> int:
        """The first byte behind the region."""
        return self.first_byte + self.size_bytes


@dataclass(frozen=True)
class ModelLayout:
    """The header of a model file: its length, and the tensors in file order.

    `shard` is (number from 0, count) where the file is one shard of several. Padding between tensors is part of none.
    """

    kind: Literal["gguf", "safetensors"]
    header_bytes: int
    tensors: tuple[Tensor, ...]
    shard: tuple[int, int] | None = None

    @property
    def has_output(self) -> bool:
        """Whether this file holds an output projection of its own."""
        return any(is_output(tensor.name) for tensor in self.tensors)

    def regions(self, tied: bool | None = None) -> tuple[Region, ...]:
        """Header and tensors in the order a decoder computes.

        `tied`: the token embedding is the output projection too, hence read whole for each token. By default it is
        when a file that is a model of its own has no output; a lone shard cannot tell and counts as not tied.
        """
        if tied is None:
            tied = self.shard is None and not self.has_output
        in_order = sorted(self.tensors, key=lambda tensor: order_key(tensor, tied))
        header = Region(0, self.header_bytes, "hot", "header")
        return (header, *(region_of(tensor, tied) for tensor in in_order))


def order_key(tensor: Tensor, tied: bool) -> tuple[OrderKey, int]:
    """Sort key of `tensor` in the order a decoder computes; what the names leave open goes by place in the file."""
    return compute_key(tensor.name, tied), tensor.offset


def region_of(tensor: Tensor, tied: bool) -> Region:
    """The region that `tensor` occupies."""
    role: Role = "rows" if is_embedding(tensor.name) and not tied else "loop"
    return Region(tensor.offset, tensor.size_bytes, role, tensor.name, sparse=is_expert(tensor.name))


def quoted(name: str) -> str:
    """`name` as messages show it: damaged headers have names of any length, and of characters that cannot be printed."""
    return repr(name) if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]!r}…"


def is_text(text: str) -> bool:
    """Whether `text` can be printed: JSON may escape a surrogate that stands alone."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def bounded(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields `tensors`; DataError once there are more of them, or longer names, than the memory of a mount has room for."""
    names = 0
    for number, tensor in enumerate(tensors):
        names += sys.getsizeof(tensor.name)
        if number >= MOST_TENSORS or names > _NAMES_BYTES:
            raise DataError(f"more tensors, or longer names of them, than any model has: {number} are read")
        yield tensor


def check_tensors(tensors: Iterable[Tensor], header_bytes: int, file_bytes: int) -> tuple[Tensor, ...]:
    """`tensors` in file order; DataError when one lies outside the data, overlaps another or has its name."""
    in_order = tuple(sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)))
    names: set[str] = set()
    end, previous = header_bytes, "the header"
    for tensor in in_order:
        if tensor.name in names:
            raise DataError(f"two tensors are called {quoted(tensor.name)}")
        if tensor.offset < end and tensor.size_bytes:
            name = quoted(tensor.name)
            raise DataError(f"tensor {name} at byte {tensor.offset} overlaps {previous}, which ends at {end}")
        if tensor.end > file_bytes:
            raise DataError(
                f"tensor {quoted(tensor.name)} ends at byte {tensor.end}, behind the end of the file ({file_bytes})",
                "the file is incomplete: copy or download it again",
            )
        names.add(tensor.name)
        if tensor.size_bytes:
            end, previous = tensor.end, quoted(tensor.name)
    return in_order
